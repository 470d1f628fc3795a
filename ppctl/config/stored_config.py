"""The settings of a stored run as the dataclasses that they were. Loads no Hydra."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from ppctl.config.composed_config import Config
from ppctl.config.groups.model_settings import Transformer
from ppctl.errors import ConfigError

READ = ("model", "data", "run")  # the parts that decide the function and its batches


def model_and_data(settings: Mapping[str, Any]) -> Config:
    """Return a request with the model, the data and the run of stored settings.

    A missing setting has its default. ConfigError for those that this version does not know.
    """
    kinds = typing.get_type_hints(Config)
    parts: dict[str, Any] = {}
    for part in READ:
        values: Mapping[str, Any] = settings.get(part) or {}
        classes = typing.get_args(kinds[part]) or (kinds[part],)
        found = [each for each in classes if part == "run" or each().name == values.get("name")]
        if not found and part == "model" and "num_heads" in values:  # of sizes with a name
            found = [Transformer]
        if not found:
            choice = f"{part}={values.get('name')}"
            raise ConfigError(f"{choice} of this run is none that this version of ppctl has.")
        parts[part] = settings_from(found[0], values, part)
    return Config(**parts)


def settings_from(cls: Any, values: Mapping[str, Any], key: str) -> Any:
    """Return an instance of a dataclass of settings, nested ones included.

    ConfigError for unknown settings.
    """
    kinds = typing.get_type_hints(cls)
    made: dict[str, Any] = {}
    for name, value in values.items():
        if name not in {field.name for field in fields(cls)}:
            raise ConfigError(f"{key}.{name} is no setting of this version of ppctl.")
        is_nested = is_dataclass(kinds[name])
        made[name] = settings_from(kinds[name], value, f"{key}.{name}") if is_nested else value
    return cls(**made)
