"""Checkpoints: Orbax in natural order, a manifest of checksums beside each."""
