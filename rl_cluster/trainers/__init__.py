"""The fronts: TRL-like and AutoTrain-like trainers, which build a configuration and run the system below."""
