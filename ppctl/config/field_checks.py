"""One-field checks, each a ConfigError with the key and its value."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from ppctl.errors import ConfigError

LARGEST = 2**31 - 1  # of whole numbers: steps and seeds are int32 on devices
MOST_TOKENS = 1e18  # of a training run: a million times what large ones take
DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


def choice(key: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{key}={value} is not one of {', '.join(choices)}.")


def at_least(key: str, value: float | None, least: float) -> None:
    if value is not None and not least <= value < math.inf:  # written so that NaN fails
        raise ConfigError(f"{key}={value} must be a finite number of at least {least}.")


def above_zero(key: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:  # written so that NaN fails
        raise ConfigError(f"{key}={value} must be a finite number above 0.")


def tokens(key: str, value: float | None) -> None:
    """Check a number of tokens to train on, which may be above `LARGEST`."""
    if value is not None and not 1 <= value <= MOST_TOKENS:  # written so that NaN fails
        remedy = f"Use one from 1 to {MOST_TOKENS:g}."
        raise ConfigError(f"{key}={value} is no number of tokens to train on. {remedy}")


def fraction(key: str, value: float, *, below_one: bool = False) -> None:
    if not (0 <= value < 1 if below_one else 0 <= value <= 1):
        raise ConfigError(f"{key}={value} must lie in [0, 1{')' if below_one else ']'}.")


def dotted(key: str, value: str) -> None:
    if DOTTED.fullmatch(value) is None:
        remedy = f"Write {key}=MODULE.FUNCTION."
        raise ConfigError(f"{key}={value} is not the dotted path of a function. {remedy}")


def numbers(key: str, part: Any) -> None:
    """Check every number of a part, nested parts included: finite, whole ones within int32."""
    for field in fields(part):
        name, value = f"{key}.{field.name}", getattr(part, field.name)
        if is_dataclass(value):
            numbers(name, value)
        elif isinstance(value, int) and abs(value) > LARGEST:
            raise ConfigError(f"{name}={value} is out of reach: whole numbers go up to {LARGEST}.")
        elif isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{name}={value} is not finite. Use a number.")


def record_of(key: str, record: Any, values: Mapping[str, Any], but: tuple[str, ...] = ()) -> Any:
    """Return the NamedTuple `record` of `values`, its keys in `but` aside.

    ConfigError where one is missing or unknown.
    """
    values = {name: value for name, value in values.items() if name not in but}
    takes = f"It takes {', '.join(record._fields)}."
    for name in record._fields:
        if name not in record._field_defaults and name not in values:
            raise ConfigError(f"{key} has no {name}. {takes}")
    for name in values:
        if name not in record._fields:
            raise ConfigError(f"{key}.{name} is not used. {takes}")
    return record(**values)
