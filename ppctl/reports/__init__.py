"""Files of runs, read and drawn. Starts no JAX."""
