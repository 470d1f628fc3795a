"""The sizes of a model that tp and cp must divide. Standard library only."""

from ppctl.errors import ConfigError, setting


def check_widths(tp: int, num_heads: int, num_kv_heads: int, hidden: int) -> None:
    """Raise ConfigError for widths that tp does not divide. hidden: that of the MLP."""
    heads = setting("model.num_heads")
    for name, size in ((heads, num_heads), ("the width of the MLP", hidden)):
        if size % tp:
            divisors = (n for n in range(2, tp) if num_heads % n == 0 and hidden % n == 0)
            fitting = ", ".join(map(str, divisors))
            raise ConfigError(
                f"{name}={size} is not a multiple of {setting('mesh.tp', tp)}: each device has "
                f"whole heads and as many columns. Use {setting('mesh.tp', fitting or 1)}, or "
                "other sizes of the model."
            )
    if num_kv_heads % tp and tp % num_kv_heads:
        raise ConfigError(
            f"{setting('model.num_kv_heads', num_kv_heads)} and {setting('mesh.tp', tp)}: devices "
            f"would share heads unevenly. Use a {setting('mesh.tp')} that divides it, or is a "
            "multiple of it."
        )


def check_sequences(cp: int, num_tokens: int) -> None:
    """Raise ConfigError for sequences too short for cp, which divides each into 2*cp pieces."""
    if cp > 1 and num_tokens < 2 * cp:
        raise ConfigError(
            f"sequences of {num_tokens} tokens are fewer than the 2*{setting('mesh.cp')} = 2*{cp} "
            f"= {2 * cp} pieces that {setting('mesh.cp', cp)} divides each into. Use "
            f"{setting('mesh.cp', max(1, num_tokens // 2))} at most, or longer sequences."
        )
