"""Every number among the settings: 0, -1, 10^20, NaN and infinity are checked, none ends in a traceback."""

from __future__ import annotations

import math
import typing
from dataclasses import fields, is_dataclass, replace

import pytest

from ppctl import config as c
from ppctl.config.request import check
from ppctl.errors import ConfigError

PARTS = {
    "model": [c.Transformer(), c.MLP()],
    "mesh": [c.Mesh()],
    "schedule": [c.Schedule(), c.Eager1F1B(), c.Interleaved(), c.Gis(), c.Hanayo()],
    "executor": [c.Spmd(), c.Mpmd()],
    "optim": [c.AdamW(), c.SGD()],
    "data": [c.Stdlib(), c.Synthetic(), c.Regression()],
    "costs": [c.Analytic(), c.Measure()],
    "run": [c.Run()],
    "launch": [c.Launch()],
    "verify": [c.Verify()],
    "plan": [c.Plan()],
    "rehearse": [c.Rehearse()],
    "tune": [c.Tune()],
}
VALUES = (0, -1, 10**20, math.nan, math.inf)


def numeric(part, path=()):
    """The path of every setting of a part that takes a number."""
    hints = typing.get_type_hints(type(part))
    for field in fields(part):
        value = getattr(part, field.name)
        if is_dataclass(value):
            yield from numeric(value, (*path, field.name))
        elif {int, float} & {hints[field.name], *typing.get_args(hints[field.name])}:
            yield *path, field.name


def changed(part, path, value):
    first, *rest = path
    return replace(part, **{first: changed(getattr(part, first), rest, value) if rest else value})


def refusal(asked):
    try:
        check(asked)
    except ConfigError as error:
        return str(error)
    return None


SETTINGS = [(key, part, path) for key, parts in PARTS.items() for part in parts for path in numeric(part)]


@pytest.mark.parametrize(
    ("key", "part", "path"), SETTINGS, ids=[f"{type(p).__name__}.{'.'.join(path)}" for _, p, path in SETTINGS]
)
def test_a_number_is_taken_or_refused_by_name(key, part, path):
    for value in VALUES:
        asked = replace(c.Config(), **{key: changed(part, path, value)})
        said = refusal(asked)
        assert said is None or "\n" not in said
        assert value in (0, -1) or (f"{key}.{'.'.join(path)}" in str(said) and str(value) in str(said))


def test_there_are_settings_to_check():
    assert len(SETTINGS) > 60
