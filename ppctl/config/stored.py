"""The settings of a stored run as the dataclasses that they were. Loads no Hydra."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, cast

from ppctl.config.model import Transformer
from ppctl.config.request import Config
from ppctl.config.run import Checkpoint, Profile
from ppctl.errors import ConfigError

READ = ("model", "data", "run")  # what decides which function of which batches a run computes


def model_and_data(settings: object) -> Config:
    """Return a request with the model, the data and the run of stored settings; all else has its defaults.

    One that the stored settings do not have had its default. ConfigError for those that this version does not know.
    """
    stored = _mapping(settings)
    kinds = typing.get_type_hints(Config)
    parts: dict[str, Any] = {}
    for part in READ:
        values = _mapping(stored.get(part))
        classes = typing.get_args(kinds[part]) or (kinds[part],)
        found = [each for each in classes if part == "run" or each().name == values.get("name")]
        if not found and part == "model" and "num_heads" in values:  # of sizes with a name
            found = [Transformer]
        if not found:
            raise ConfigError(f"{part}={values.get('name')} of this run is none that this version of ppctl has.")
        unknown = sorted({*values} - {field.name for field in fields(found[0])})
        if unknown:
            raise ConfigError(f"{part}.{unknown[0]} of this run is no setting of this version of ppctl.")
        parts[part] = found[0](**values)
    run = parts["run"]
    run.checkpoint, run.profile = Checkpoint(), Profile()
    return Config(**parts)


def _mapping(value: object) -> dict[str, Any]:
    return dict(cast("Mapping[str, Any]", value)) if isinstance(value, Mapping) else {}
