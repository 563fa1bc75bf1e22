"""The entry point of a checkout: the same commands as the console script `rl-cluster`."""

from rl_cluster.cli import main

if __name__ == "__main__":
    main()
