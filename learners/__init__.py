"""Workers that take gradients, on Ray or in this process: the only place that imports deepspeed."""
