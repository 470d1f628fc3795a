"""Sizes of the transformer, and sequences, that tp and cp divide. Standard library only."""

from __future__ import annotations

from ppctl.errors import ConfigError


def check_widths(tp: int, num_heads: int, num_kv_heads: int, hidden: int) -> None:
    """Raise ConfigError for widths of the transformer that tp does not divide; hidden: of its MLP."""
    for name, size in (("model.num_heads", num_heads), ("the width of the MLP", hidden)):
        if size % tp:
            fitting = ", ".join(str(n) for n in range(2, tp) if num_heads % n == 0 and hidden % n == 0)
            raise ConfigError(
                f"{name}={size} is not a multiple of mesh.tp={tp}: each device has whole heads and as many columns. "
                f"Use mesh.tp={fitting or 1}, or other sizes of the model."
            )
    if num_kv_heads % tp and tp % num_kv_heads:
        raise ConfigError(
            f"model.num_kv_heads={num_kv_heads} and mesh.tp={tp}: neither is a multiple of the other, so that devices "
            "would share heads unevenly. Use a mesh.tp that divides it, or is a multiple of it."
        )


def check_sequences(cp: int, num_tokens: int) -> None:
    """Raise ConfigError for sequences that are too short for cp, which divides each into 2*cp pieces."""
    if cp > 1 and num_tokens < 2 * cp:
        raise ConfigError(
            f"sequences of {num_tokens} tokens are fewer than the 2*mesh.cp = 2*{cp} = {2 * cp} pieces that "
            f"mesh.cp={cp} divides each into. Use mesh.cp={max(1, num_tokens // 2)} at most, or longer sequences."
        )
