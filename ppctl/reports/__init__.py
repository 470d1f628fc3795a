"""What runs leave, read and drawn. Starts no JAX."""
