"""Combinations of settings that cannot work, one file per subject; each check yields Problems."""
