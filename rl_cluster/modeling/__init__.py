"""Models as torch modules: packed forward passes, heads, loading. No Ray, no DeepSpeed, no vLLM."""
