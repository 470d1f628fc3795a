"""Domains of single settings: a type names one, as in `steps: Natural = 3`, and `check` keeps it.

Each check raises a ConfigError with the key and its value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, partial
from typing import Annotated, Any, ClassVar, cast, get_args, get_origin, get_type_hints

from ppctl.errors import ConfigError

LARGEST = 2**31 - 1  # of whole numbers: steps and seeds are int32 on devices
MOST_TOKENS = 1e18  # of a training run: a million times what large ones take
DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
Check = Callable[[str, Any], None]  # of a key and its value


def choice(key: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{key}={value} is not one of {', '.join(choices)}.")


def at_least(key: str, value: float | None, least: float) -> None:
    if value is not None and not least <= value < math.inf:  # written so that NaN fails
        raise ConfigError(f"{key}={value} must be a finite number of at least {least}.")


def above_zero(key: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:  # written so that NaN fails
        raise ConfigError(f"{key}={value} must be a finite number above 0.")


def training_tokens(key: str, value: float) -> None:
    """Check a number of tokens to train on, which may be above `LARGEST`."""
    if not 1 <= value <= MOST_TOKENS:  # written so that NaN fails
        remedy = f"Use one from 1 to {MOST_TOKENS:g}."
        raise ConfigError(f"{key}={value} is no number of tokens to train on. {remedy}")


def fraction(key: str, value: float, *, below_one: bool = False) -> None:
    if not (0 <= value < 1 if below_one else 0 <= value <= 1):
        raise ConfigError(f"{key}={value} must lie in [0, 1{')' if below_one else ']'}.")


def dotted(key: str, value: str) -> None:
    if DOTTED.fullmatch(value) is None:
        remedy = f"Write {key}=MODULE.FUNCTION."
        raise ConfigError(f"{key}={value} is not the dotted path of a function. {remedy}")


def one_of(*choices: str) -> Check:
    """Return the check of a choice, for `Annotated[str, one_of("auto", "none")]`."""
    return partial(choice, choices=choices)


Count = Annotated[int, partial(at_least, least=1)]  # 1, 2, ...
Natural = Annotated[int, partial(at_least, least=0)]  # 0, 1, ...
NotNegative = Annotated[float, partial(at_least, least=0)]
Positive = Annotated[float, above_zero]
Share = Annotated[float, fraction]  # [0, 1]
Rate = Annotated[float, partial(fraction, below_one=True)]  # [0, 1)


class Settings:
    """A part of the config, or a part of one."""

    KEY: ClassVar[str]  # before the names of its settings

    def check(self) -> None:
        """Raise ConfigError for the first setting that is impossible."""
        domains(self.KEY, self)


def domains(key: str, part: Any) -> None:
    """Check that every setting of a part, nested parts included, is null or in its domain.

    key: of the part, before the names in messages; empty for arguments of the Python API.
    """
    checks = _checks(part.__class__)
    for field in fields(part):
        name, value = f"{key}.{field.name}".lstrip("."), getattr(part, field.name)
        if is_dataclass(value):
            domains(name, value)
        elif value is not None:
            for check in checks[field.name]:
                for each in cast("list[Any]", value if isinstance(value, list) else [value]):
                    check(name, each)


@cache
def _checks(cls: type) -> dict[str, tuple[Check, ...]]:
    """Return the checks of each setting of a class."""
    hints = get_type_hints(cls, include_extras=True)
    return {name: tuple(_checks_of(hint)) for name, hint in hints.items()}


def _checks_of(hint: Any) -> Iterator[Check]:
    """Yield the checks of a type, those in `Count | None` and `list[Count]` included."""
    if get_origin(hint) is Annotated:
        yield from hint.__metadata__
        return
    for each in get_args(hint):
        yield from _checks_of(each)


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
