"""Checkpoints: arrays in natural order by Orbax, each with a manifest of checksums."""
