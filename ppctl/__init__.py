"""Pipeline-parallel training in JAX."""
