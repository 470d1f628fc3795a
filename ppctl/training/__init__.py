"""One training job: what it is made of, its train step, loop, checkpoints, metrics."""
