"""Ray workers that produce experience: engines, scorers, the reference. The only place that imports vllm."""
