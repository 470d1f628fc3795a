"""The sizes of a model that tp and cp must divide. Standard library only."""

from __future__ import annotations

from ppctl.errors import ConfigError


def check_widths(tp: int, num_heads: int, num_kv_heads: int, hidden: int) -> None:
    """Raise ConfigError for widths that tp does not divide. hidden: that of the MLP."""
    for name, size in (("model.num_heads", num_heads), ("the width of the MLP", hidden)):
        if size % tp:
            divisors = (n for n in range(2, tp) if num_heads % n == 0 and hidden % n == 0)
            fitting = ", ".join(map(str, divisors))
            raise ConfigError(
                f"{name}={size} is not a multiple of mesh.tp={tp}: each device has whole heads "
                f"and as many columns. Use mesh.tp={fitting or 1}, or other sizes of the model."
            )
    if num_kv_heads % tp and tp % num_kv_heads:
        raise ConfigError(
            f"model.num_kv_heads={num_kv_heads} and mesh.tp={tp}: devices would share heads "
            "unevenly. Use a mesh.tp that divides it, or is a multiple of it."
        )


def check_sequences(cp: int, num_tokens: int) -> None:
    """Raise ConfigError for sequences too short for cp, which divides each into 2*cp pieces."""
    if cp > 1 and num_tokens < 2 * cp:
        raise ConfigError(
            f"sequences of {num_tokens} tokens are fewer than the 2*mesh.cp = 2*{cp} = {2 * cp} "
            f"pieces that mesh.cp={cp} divides each into. Use mesh.cp={max(1, num_tokens // 2)} "
            "at most, or longer sequences."
        )
