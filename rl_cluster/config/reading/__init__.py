"""A YAML text, overrides and names in; checked settings, or every problem at once, out."""
