"""The planner: which layers each stage holds, by measured or counted costs and under a memory limit. No jax."""
