"""Prompt data: files and generated tasks in, tokenised `Prompt`s in a reproducible order out."""
