"""Read and draw the files of runs. Starts no JAX."""
