"""How published weights travel and are proved."""
