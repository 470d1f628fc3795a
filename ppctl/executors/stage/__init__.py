"""A stage's forward and backward, and the backward split into I and W."""
