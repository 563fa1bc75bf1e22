"""Ray workers that produce experience: engines, scorers, the reference; created by rl_cluster.assembly.

The only place that imports vllm, but for the sending half of its weight transfer (learners/transfer_vllm.py).
"""
