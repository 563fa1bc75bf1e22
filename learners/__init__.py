"""Workers that take gradients: the only place that imports deepspeed."""
