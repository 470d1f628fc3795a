"""Differences between the settings of two starts of a run, and which of them make another model. Loads no JAX."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, fields
from typing import Any, NamedTuple, TypeGuard

from ppctl.config.request import Config
from ppctl.config.run import Run

# What changes nothing that a run computes or records.
FREE_PARTS = ("launch", "verify", "plan", "rehearse", "tune", "inspect")
FREE = {
    f"run.{name}"
    for name in (
        *("name", "dir", "resume", "resume_with", "start_from", "log_every", "tensorboard", "trackers", "checkpoint"),
        *("join_s", "heartbeat_s", "slow_after_s", "distributed", "coordinator", "num_processes", "process_id"),
        *("show_placement", "compilation_cache"),
    )
} | {"data.cache_dir", "costs.cache_dir"}

# Settings of a model that leave its function as it is. Another vocabulary or cut shows in the shapes of its arrays.
SAME_FUNCTION = ("model.attention", "model.vocab_size", "model.layers", "model.mixes_examples")
ADAPTERS = tuple(f"optim.{name}" for name in ("train", "lora_rank", "lora_targets"))
ARRAYS = (
    "optim",
    "optim.momentum",
    "run.dtype",
    *ADAPTERS,
)  # besides the model's: what decides which arrays a checkpoint has


class Change(NamedTuple):
    """A setting, or the choice of a part, that is another one now."""

    name: str
    before: Any
    now: Any

    @property
    def part(self) -> str:
        """The part of the config that it belongs to."""
        return self.name.split(".")[0]

    @property
    def text(self) -> str:
        """The change in words, as in `optim.lr: 0.002 then, 0.1 now`."""
        separator = ": " if "." in self.name else "="
        return f"{self.name}{separator}{_text(self.before)} then, {_text(self.now)} now"

    @property
    def arrow(self) -> str:
        """The change as in `optim.lr 0.002 -> 0.1`."""
        return f"{self.name} {_text(self.before)} -> {_text(self.now)}"

    @property
    def is_of_function(self) -> bool:
        """Whether the model computes something else for the same parameters."""
        return self.name == "optim.lora_alpha" or (self.part == "model" and self.name not in SAME_FUNCTION)

    @property
    def is_of_arrays(self) -> bool:
        """Whether a checkpoint may hold other arrays."""
        return self.part == "model" or self.name in ARRAYS


def changes(before: Mapping[str, Any], config: Config) -> list[Change]:
    """Return the settings of a config that are others than in `before`, the settings of an earlier start as they are
    stored. One that the earlier start did not know had its default. Those that change nothing that a run computes or
    records are left out.
    """
    found: list[Change] = []
    for part in fields(config):
        stored: Any
        stored, now = before.get(part.name), getattr(config, part.name)
        if part.name in FREE_PARTS or not _are_settings(stored):
            continue
        if stored.get("name") != getattr(now, "name", None) and part.name != "run":
            found.append(Change(part.name, stored.get("name"), now.name))
            continue
        found += _differing(part.name, {**asdict(type(now)()), **stored}, asdict(now))
    return [change for change in found if not _is_default(change, before, config)]


def _is_default(change: Change, before: Mapping[str, Any], config: Config) -> bool:
    """Return whether one of two numbers is null and the other is what null stands for."""
    if change.name == "run.eval_batches":  # where fewer are held out, nothing was trained with so many
        return {change.before, change.now} == {None, Run.EVAL_BATCHES}
    if change.name != "model.num_kv_heads":
        return False
    heads = before["model"].get("num_heads"), asdict(config.model)["num_heads"]
    return (change.before or heads[0]) == (change.now or heads[1])


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


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
