"""Scores: finished groups in; scores, typed failures, and what shaping makes of the scores out."""
