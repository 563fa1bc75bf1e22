"""Environments to take as they are: text, several objectives, preferences, mathematics, code."""
