"""Differences between the settings of two starts of a run; configs made from stored settings."""

import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple, TypeGuard, cast

from ppctl.config import Config
from ppctl.config.field_checks import settings_from
from ppctl.config.groups.model_settings import Transformer
from ppctl.errors import ConfigError

# parts and settings without effect on a run's results and records
FREE_PARTS = ("launch", "verify", "plan", "tune", "inspect", "costs")
_FREE_OF_RUN = (
    "name dir resume resume_with start_from log_every trackers checkpoint heartbeat_s slow_after_s "
    "distributed coordinator num_processes process_id compilation_cache"
)
FREE = {f"run.{name}" for name in _FREE_OF_RUN.split()} | {"data.cache_dir"}

# Settings of a model that do not change its outputs for equal parameters. (model.vocab_size and
# model.layers can change the arrays' shapes.)
_SAME_OF_EXPERTS = ("dispatch", "kernel", "balance_loss", "z_loss", "bias_update")
SAME_FUNCTION = (
    *("model.attention", "model.vocab_size", "model.layers", "model.mixes_examples"),
    *(f"model.moe.{name}" for name in _SAME_OF_EXPERTS),
)
# settings outside the model that decide which arrays a checkpoint has
ADAPTERS = ("optim.train", "optim.lora_rank", "optim.lora_targets")
_OF_OPTIMIZERS = ("optim", "optim.momentum", "optim.target")
ARRAYS = (*_OF_OPTIMIZERS, "optim.ema", "run.dtype", *ADAPTERS)
# text that needs no quotes in Hydra's grammar
PLAIN_TEXT = re.compile(r"(?!(true|false|null|nan|inf)$)[A-Za-z_/][\w./-]*", re.IGNORECASE)


class Change(NamedTuple):
    """A changed setting, or a changed choice of a part."""

    name: str
    before: Any
    now: Any

    @property
    def part(self) -> str:
        """The part of the config that contains the setting."""
        return self.name.split(".")[0]

    @property
    def text(self) -> str:
        """The change as in `optim.lr: 0.002 then, 0.1 now`."""
        separator = ": " if "." in self.name else "="
        return f"{self.name}{separator}{shown(self.before)} then, {shown(self.now)} now"

    @property
    def arrow(self) -> str:
        """The change as in `optim.lr 0.002 -> 0.1`."""
        return f"{self.name} {shown(self.before)} -> {shown(self.now)}"

    @property
    def is_of_function(self) -> bool:
        """Whether the change alters the model's outputs for equal parameters."""
        is_of_model = self.part == "model" and self.name not in SAME_FUNCTION
        return is_of_model or self.name == "optim.lora_alpha"

    @property
    def is_of_arrays(self) -> bool:
        """Whether the change may alter the number, shapes or dtypes of a checkpoint's arrays."""
        return self.part == "model" or self.name in ARRAYS


def changes(before: Mapping[str, Any], config: Config) -> list[Change]:
    """Return the settings that differ from `before`, the stored settings of an earlier start.

    Settings without effect on a run's results and records are left out.
    """
    found: list[Change] = []
    for part, now in asdict(config).items():
        stored: Any = before.get(part)
        if part in FREE_PARTS or not _are_settings(stored):
            continue
        if part != "run" and stored.get("name") != now.get("name"):
            found.append(Change(part, stored.get("name"), now["name"]))
            now = {key: value for key, value in now.items() if key in stored and key != "name"}
        found += _differing(part, stored, now)
    return found


def _differing(prefix: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Change]:
    for key, value in now.items():
        name, stored = f"{prefix}.{key}", before.get(key)
        if name in FREE:
            continue
        if _are_settings(stored) and _are_settings(value):
            yield from _differing(name, stored, {**dict.fromkeys(stored), **value})
        elif stored != value:
            yield Change(name, stored, value)


def _are_settings(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def shown(value: object) -> str:
    """Return a value as typed on the command line.

    >>> shown(None), shown(True), shown(0.5), shown([3, 2])
    ('null', 'true', '0.5', '[3,2]')
    """
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(shown, cast('list[object]', value)))}]"
    return str(value)


def value_text(value: object) -> str:
    """Return a value as text in Hydra's grammar, quoted where needed.

    >>> value_text(None), value_text("a b"), value_text([1, "x"]), value_text("3")
    ('null', '"a b"', '[1,x]', '"3"')
    """
    if value is None or isinstance(value, bool):
        return shown(value)
    if isinstance(value, list):
        return f"[{','.join(map(value_text, cast('list[object]', value)))}]"
    if _are_settings(value):
        return f"{{{','.join(f'{key}:{value_text(each)}' for key, each in value.items())}}}"
    if not isinstance(value, str) or PLAIN_TEXT.fullmatch(value):
        return str(value)
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', value)  # a backslash is special only before a quote
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
    return '"' + escaped.replace("${", r"\${") + '"'


# --- a config from stored settings ---------------------------------------------------------------

READ = ("model", "data", "run")  # parts that decide the model's function and its batches


def model_and_data(settings: Mapping[str, Any]) -> Config:
    """Return a config with the parts model, data and run of stored settings.

    A missing setting has its default. ConfigError for settings unknown to this version.
    """
    kinds = typing.get_type_hints(Config)
    parts: dict[str, Any] = {}
    for part in READ:
        values: Mapping[str, Any] = settings.get(part) or {}
        classes = typing.get_args(kinds[part]) or (kinds[part],)
        found = [each for each in classes if part == "run" or each().name == values.get("name")]
        if not found and part == "model" and "num_heads" in values:  # a size, as llama3_8b
            found = [Transformer]
        if not found:
            choice = f"{part}={values.get('name')}"
            raise ConfigError(f"this version of ppctl has no {choice}, which this run uses.")
        parts[part] = settings_from(found[0], values, part)
    return Config(**parts)
