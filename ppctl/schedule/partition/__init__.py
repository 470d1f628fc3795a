"""The partition of layers into stages, by counted or measured costs. Standard library only."""
