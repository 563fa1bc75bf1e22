"""Files that are whole or absent, lines of JSON, folders that are ours."""
