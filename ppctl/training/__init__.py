"""Training: the pipelined model and its steps, the loop with its metrics, and checkpoints."""
