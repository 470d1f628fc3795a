"""The settings that are paths: one list, from the types of the settings."""

import dataclasses
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest

from ppctl.cli.compose import compose
from ppctl.config import Config
from ppctl.errors import ConfigError
from ppctl.reports.recorded_settings import path_settings, recorded_paths, with_paths

# texts that are no paths; a new setting of any text is one of these or gets the type SomePath
TEXTS = {
    *("data.end_token", "data.field", "data.prompt_field", "data.parts.field"),
    *("data.parts.prompt_field", "model.window_pattern", "plan.topology", "run.coordinator"),
    *("run.name", "run.profile", "tune.recipe", "tune.schedules"),
    *("hardware.device_kinds", "hardware.ranks", "mesh.ranks.ranks", "tune.cluster.hardware"),
}
WRITTEN = {"run.dir"}  # the run's place, which readers know


def texts(hint, name=""):
    """The settings below a type whose value may be any text."""
    if hint is str:
        yield name
    elif get_origin(hint) is Annotated:
        if any(type(each).__name__ == "PathCheck" for each in hint.__metadata__):
            yield name
    elif dataclasses.is_dataclass(hint):
        hints = get_type_hints(hint, include_extras=True)
        for key in (field.name for field in dataclasses.fields(hint)):
            if key != "name" or name == "run":
                yield from texts(hints[key], f"{name}.{key}".lstrip("."))
    elif get_origin(hint) is not dict:
        for each in get_args(hint):
            yield from texts(each, name)


def test_every_setting_of_any_text_is_a_path_or_listed_as_other_text():
    assert {*texts(Config)} == {*path_settings()} | TEXTS | WRITTEN


@pytest.mark.parametrize("name", path_settings())
def test_every_path_is_found_in_a_record_except_the_word_for_no_path(name):
    part, *inner = name.split(".")
    of_part = {inner[0]: [{inner[1]: "a"}]} if len(inner) == 2 else {inner[0]: "a"}
    assert recorded_paths({part: of_part}) == ["a"]
    assert recorded_paths(with_paths({part: of_part}, "b/{}".format)) == ["b/a"]
    if (word := path_settings()[name]) is not None:
        assert recorded_paths({part: {inner[0]: word}}) == []


NEEDED = {"data.path": ["data=text"], "data.eval_path": ["data=text", "data.path=a"]}
READ_FIRST = {"schedule.path"}  # refused as a directory


@pytest.mark.parametrize("name", sorted({*path_settings()} - READ_FIRST - {"data.parts.path"}))
def test_an_empty_path_is_refused(name):
    with pytest.raises(ConfigError, match=f"{name}='' names no file"):
        compose([*NEEDED.get(name, []), f"{name}=''"])
