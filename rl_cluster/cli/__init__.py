"""The command line: `python launch.py …` and `rl-cluster …`. Commands are imported when they are called."""

from rl_cluster.cli.app import main

__all__ = ["main"]
