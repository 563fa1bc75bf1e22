"""Episodes of any environment: played, hosted, read from settings."""
