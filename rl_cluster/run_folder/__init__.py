"""What a run writes and who may write it: paths, lock, claim, card."""
