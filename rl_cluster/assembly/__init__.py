"""A RunConfig in, running workers behind protocols out: the one place that sees both actors and learners.

Nothing is imported here: `rl_cluster.assembly.train` and `.evaluate` hold the functions of those names, and
only what runs on Ray imports it.
"""
