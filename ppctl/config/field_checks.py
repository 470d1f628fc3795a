"""Domains of single settings. A type names its domain (`steps: Natural`); `check` enforces it.

Each check raises a ConfigError with the key and its value.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, partial
from numbers import Integral, Real
from types import NoneType
from typing import Annotated, Any, ClassVar, NamedTuple, cast, get_args, get_origin, get_type_hints

from ppctl.errors import ConfigError

SMALLEST = 1e-100  # positive numbers up to 1/SMALLEST have finite products and ratios
LARGEST = 2**31 - 1  # largest int setting: steps and seeds are int32 on devices
DOTTED = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")
EXPONENT = re.compile(r"-?[\d.]+[eE][+-]?\d+")
SCALARS = {int: Integral, float: Real, bool: bool, str: str, NoneType: NoneType}
Check = Callable[[str, Any], None]  # check(key, value)


def choice(key: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{key}={value} is not one of {', '.join(choices)}.")


def at_least(key: str, value: float | None, least: float) -> None:
    if value is not None and not least <= value < math.inf:  # written so that NaN fails
        raise ConfigError(f"{key}={value} must be a finite number of at least {least}.")


def above_zero(key: str, value: float | None) -> None:
    if value is not None and not 0 < value < math.inf:  # written so that NaN fails
        raise ConfigError(f"{key}={value} must be a finite number above 0.")
    if value is not None and not SMALLEST <= value <= 1 / SMALLEST:
        reach = f"{SMALLEST:g} to {1 / SMALLEST:g}"
        raise ConfigError(f"{key}={value} is out of reach: numbers go from {reach}.")


def within(key: str, value: float, *, least: float = 0, most: float = 1) -> None:
    if not least <= value <= most:  # written so that NaN fails
        raise ConfigError(f"{key}={value} must lie in [{least}, {most}].")


def below_one(key: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ConfigError(f"{key}={value} must lie in [0, 1).")


def dotted(key: str, value: str) -> None:
    if DOTTED.fullmatch(value) is None:
        remedy = f"Write {key}=MODULE.FUNCTION."
        raise ConfigError(f"{key}={value} is not the dotted path of a function. {remedy}")


def one_of(*choices: str) -> Check:
    """Return a check that a value is among `choices`: `Annotated[str, one_of("auto", "none")]`."""
    return partial(choice, choices=choices)


def up_to(most: int, why: str) -> Check:
    """Return a check for whole numbers from 1 to `most`. why: reason for `most`, in messages."""

    def check(key: str, value: int) -> None:
        at_least(key, value, 1)
        if value > most:
            raise ConfigError(f"{key}={value} is out of reach: {most} at most, because {why}.")

    return check


class PathCheck(NamedTuple):
    """A check that a path is not empty. word: a value that is no path, such as bytes."""

    word: str | None = None

    def __call__(self, key: str, value: str) -> None:
        if not value.strip():
            raise ConfigError(f"{key}='' names no file. Use a path, or . for this directory.")


def paths_in(hint: Any, name: str) -> Iterator[tuple[str, str | None]]:
    """Yield (name, word) of each path in a type: a group's class, `SomePath | None`, `list[Part]`.

    name: prefix of the names.
    """
    if get_origin(hint) is Annotated:
        yield from ((name, each.word) for each in hint.__metadata__ if isinstance(each, PathCheck))
    elif is_dataclass(hint):
        for key, each in get_type_hints(hint, include_extras=True).items():
            yield from paths_in(each, f"{name}.{key}".lstrip("."))
    for each in get_args(hint):
        yield from paths_in(each, name)


# metadata of fields that describe a published model, a chip or assumed costs: only
# `--help PART --all` shows them, and those in a class of settings that such a field holds
DESCRIPTION = {"describes": True}

SomePath = Annotated[str, PathCheck()]  # a file or directory
Count = Annotated[int, partial(at_least, least=1)]  # 1, 2, ...
Natural = Annotated[int, partial(at_least, least=0)]  # 0, 1, ...
NotNegative = Annotated[float, partial(at_least, least=0)]
FromOne = Annotated[float, partial(at_least, least=1)]
Positive = Annotated[float, above_zero]
Share = Annotated[float, within]  # [0, 1]
SomeShare = Annotated[float, above_zero, within]  # (0, 1]
Rate = Annotated[float, below_one]  # [0, 1)


class Settings:
    """Base class of the parts of the config.

    prefix: prefix of the settings' names; by default the name of the direct subclass in lower case.
    """

    prefix: ClassVar[str]

    def __init_subclass__(cls, prefix: str | None = None) -> None:
        if prefix is not None or Settings in cls.__bases__:
            cls.prefix = prefix or cls.__name__.lower()

    def check(self) -> None:
        """Raise ConfigError for the first impossible setting."""
        domains(self.prefix, self)


def domains(key: str, part: Any) -> None:
    """Raise ConfigError if a setting of a part is outside its domain, or a number outside int32.

    Null is allowed. part: a dataclass; nested ones are checked too. key: prefix of the names in
    messages; empty for arguments of the Python API.
    """
    checks = _checks(part.__class__)
    for field in fields(part):
        name, value = f"{key}.{field.name}".lstrip("."), getattr(part, field.name)
        if is_dataclass(value):
            domains(name, value)
        elif isinstance(value, list) and not value and field.default is None:
            raise ConfigError(f"{name}=[] leaves nothing to choose from. Use null for all.")
        else:
            for place, each in _entries(name, value):
                for check in checks[field.name]:
                    check(place, each)
                _finite(place, each)
                is_limited = isinstance(each, int) and place == name  # entries of mappings are not
                if is_limited and abs(each) > LARGEST and not name.endswith("_bytes"):
                    reach = f"whole numbers go up to {LARGEST}"
                    raise ConfigError(f"{name}={each} is out of reach: {reach}.")


def _entries(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of a setting that is not null, or of each entry of a list or mapping."""
    if isinstance(value, list):
        yield from ((name, each) for each in cast("list[Any]", value))
    elif isinstance(value, dict):
        entries = cast("dict[str, Any]", value)
        yield from ((f"{name}.{key}", each) for key, each in entries.items())
    elif value is not None:
        yield name, value


def _finite(key: str, value: Any) -> None:
    """Raise ConfigError for an infinite or NaN float, which JSON lacks, also in a mapping."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"{key}={value} is not finite. Use a number.")
    if isinstance(value, list | dict):
        for place, each in _entries(key, value):
            _finite(place, each)


@cache
def _checks(cls: type) -> dict[str, tuple[Check, ...]]:
    """Return the checks of each setting of a class, by the setting's name."""
    hints = get_type_hints(cls, include_extras=True)
    return {name: tuple(_checks_of(hint)) for name, hint in hints.items()}


def _checks_of(hint: Any) -> Iterator[Check]:
    """Yield the checks of a type and of the types inside it: `Count | None`, `list[Count]`."""
    if get_origin(hint) is Annotated:
        yield from hint.__metadata__
        return
    for each in get_args(hint):
        yield from _checks_of(each)


def settings_from(cls: Any, values: Any, key: str) -> Any:
    """Return the settings in a mapping as the dataclass `cls`, nested settings included.

    key: prefix of names in messages. ConfigError for unknown, missing and wrongly typed settings.
    """
    known, kinds = {field.name: field for field in fields(cls)}, get_type_hints(cls)
    takes = f"It takes {', '.join(known)}."
    if not isinstance(values, Mapping):
        raise ConfigError(f"{key}={values} is not a mapping of settings. {takes}")
    values = cast("Mapping[str, Any]", values)
    for name in values:
        if name not in known:
            raise ConfigError(f"{key}.{name} is not a setting of this version of ppctl. {takes}")
    for name, field in known.items():
        if name not in values and field.default is field.default_factory is MISSING:
            raise ConfigError(f"{key} has no {name}. {takes}")
    typed = {name: _typed(kinds[name], each, f"{key}.{name}") for name, each in values.items()}
    return cls(**typed)


def _typed(kind: Any, value: Any, key: str) -> Any:
    """Return a file's value converted to its type. ConfigError if it is of another type.

    Nested settings become their class. 1e12 becomes a float: YAML reads it as text.
    """
    if is_dataclass(kind):
        return settings_from(kind, value, key)
    kinds = get_args(kind) or (kind,)
    if get_origin(kind) is list and isinstance(value, list):
        return [_typed(kinds[0], each, key) for each in cast("list[Any]", value)]
    if isinstance(value, dict):
        entries = cast("dict[str, Any]", value)
        return {name: _typed(kinds[-1], each, key) for name, each in entries.items()}
    can_be_float = isinstance(value, str) and (float in kinds or kind is Any)
    if can_be_float and EXPONENT.fullmatch(value):
        return float(value)
    if all(each in SCALARS for each in kinds):
        fits = isinstance(value, tuple(SCALARS[each] for each in kinds))
        if not fits or (isinstance(value, bool) and bool not in kinds):
            name = kinds[0].__name__
            raise ConfigError(f"{key}={value} is of type {type(value).__name__}, not {name}.")
    return value
