"""Settings of runs: their names, their values as typed, and differences between runs.

A composed config is the nested dict of all settings, as in config.yaml. A choice is the named
variant of a group of settings, such as optim=sgd; the config holds it as optim.name.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from ppctl.config import Config
from ppctl.config.changed_settings import shown
from ppctl.config.field_checks import paths_in
from ppctl.schedule.mesh_axes import AXES, mesh_text

RUN_SETTINGS = ("name", "dir", "resume", "distributed", "coordinator", "process_id")
OWN = {f"run.{name}" for name in RUN_SETTINGS}  # settings of one run or start, never compared


def setting_names(composed: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the settings and choices of a composed config; the mesh's sizes count as one setting.

    >>> list(setting_names({"mesh": {"dp": 2, "order": "auto"}, "optim": {"name": "sgd", "lr": 1}}))
    ['mesh', 'mesh.order', 'optim', 'optim.lr']
    """
    for word, value in composed.items():
        name = f"{prefix}{word}"
        if name == "mesh" and isinstance(value, dict):
            yield from (name, *(f"{name}.{axis}" for axis in value if axis not in AXES))
        elif isinstance(value, dict):
            yield from setting_names(value, f"{name}.")
        else:
            yield name.removesuffix(".name") if name != "run.name" else name


def setting_value(composed: Mapping[str, Any], name: str) -> Any:
    """Return a setting or a choice of a composed config. KeyError if it is missing.

    >>> composed = {"mesh": {"dp": 2, "pp": 4, "fsdp": 1}, "optim": {"name": "sgd", "lr": 0.1}}
    >>> [setting_value(composed, name) for name in ("mesh", "mesh.pp", "optim", "optim.lr")]
    ['2x4', 4, 'sgd', 0.1]
    """
    value: Any = composed
    for part in name.split("."):
        if not isinstance(value, dict):
            raise KeyError(name)
        value = value[part]
    if isinstance(value, dict):
        return mesh_text(value) if name == "mesh" else value["name"]
    return value


@cache
def path_settings() -> Mapping[str, str | None]:
    """Return the settings that are paths, also of data.parts, each with its value for no path."""
    return dict(paths_in(Config, ""))


def with_paths(composed: Any, change: Callable[[str], str], name: str = "") -> Any:
    """Return a composed config with each path replaced by change(path).

    name: prefix of the names of settings in `composed`.

    >>> with_paths({"data": {"parts": [{"path": "a"}], "tokenizer": "bytes"}}, str.upper)
    {'data': {'parts': [{'path': 'A'}], 'tokenizer': 'bytes'}}
    """
    if isinstance(composed, Mapping):
        return {
            key: with_paths(each, change, f"{name}.{key}".lstrip("."))
            for key, each in composed.items()
        }
    if isinstance(composed, list):
        return [with_paths(each, change, name) for each in composed]
    is_path = isinstance(composed, str) and name in path_settings()
    return change(composed) if is_path and composed != path_settings()[name] else composed


def recorded_paths(composed: Mapping[str, Any]) -> list[str]:
    """Return the paths of a composed config, of files to read and of caches."""
    found: list[str] = []
    with_paths(composed, lambda path: found.append(path) or path)
    return found


def setting_text(composed: Mapping[str, Any], name: str) -> str | None:
    """Return a setting or a choice of a composed config as typed; None if it is missing."""
    try:
        return shown(setting_value(composed, name))
    except KeyError:
        return None


def differing_settings(
    configs: Sequence[Mapping[str, Any]], requests: Sequence[Sequence[str]]
) -> dict[str, list[str | None]]:
    """Return the settings that differ between runs, each with its value in each run.

    Compares settings that all runs have, and settings that a request names. requests: the
    overrides of each run, NAME=VALUE.
    """
    if not configs:
        return {}
    names = dict.fromkeys(word.split("=", 1)[0].lstrip("+") for words in requests for word in words)
    first, *others = ([*setting_names(config)] for config in configs)
    of_all = set(first).intersection(*others)
    names |= dict.fromkeys(name for name in first if name in of_all)
    compared = [name for name in names if name not in OWN]
    values = {name: [setting_text(each, name) for each in configs] for name in compared}
    return {name: texts for name, texts in values.items() if len({*texts}) > 1}
