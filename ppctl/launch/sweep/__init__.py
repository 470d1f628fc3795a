"""The jobs of a sweep: what runs and what is finished, side by side, and the summary of them. Loads no JAX."""
