"""The options in conf/ and recipes/, the settings in config/, and messages for unknown ones.

New options and settings are found without a change in this file. It needs only the standard
library, so `ppctl --help` loads no Hydra.
"""

import dataclasses
import difflib
import functools
import inspect
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import PurePath
from typing import Any, NamedTuple

from ppctl.config import Config, Costs, Inspect, Launch, Mesh, Plan, Run, Tune, Verify, groups
from ppctl.config.changed_settings import value_text
from ppctl.config.config_dirs import ROOT
from ppctl.config.field_checks import Settings
from ppctl.config.groups.command_settings import Combinations, Search, SideBySide, SubmititSlurm
from ppctl.config.groups.model_settings import lacking
from ppctl.errors import nearest, suggested
from ppctl.schedule.families.registry import also_called
from ppctl.schedule.mesh_axes import AXES, TEXT_AXES, mesh_text

# parts of the config with one settings class each
PLAIN = {cls.__name__.lower(): cls for cls in (Run, Launch, Verify, Plan, Tune, Inspect, Costs)}
# parts of the config with several options, chosen by name
PARTS = tuple(f.name for f in dataclasses.fields(Config) if f.name not in PLAIN)
DESCRIPTIONS = tuple(f.name for f in dataclasses.fields(Config) if "describes" in f.metadata)
GROUPS = (*PARTS, "recipes")
DRAWN = ("mesh", "schedule", "costs")  # parts that `ppctl schedule` reads
MESH_TEXT = f"DPxPP, DPxPPxFSDP or {'x'.join(map(str.upper, TEXT_AXES))}"
FILES = {  # options that read files, by suffix
    "schedule": {".csv": "csv"},
    "data": {".npy": "tokens", ".bin": "tokens"}
    | dict.fromkeys((".txt", ".md", ".jsonl", ".ndjson", ".parquet", ".gz", ".zst"), "text"),
}
MESH_EXAMPLES = ("1x2", "1x4", "1x8", "2x2", "2x4", "2x4x2")  # examples in listings; any sizes work
# settings class of each option of Hydra's groups launcher and sweeper
SWEEP_PARTS: dict[str, dict[str, type]] = {
    "hydra.launcher": {"ppctl": SideBySide, "submitit_slurm": SubmititSlurm},
    "hydra.sweeper": {"ppctl": Combinations, "optuna": Search},
}
REQUIRED = "???"  # Hydra's mark of a setting without a default


class Setting(NamedTuple):
    key: str
    default: object
    about: str  # help text: the field's comment in config/, or its metadata
    describes: bool = False  # a published model, a chip or assumed costs: `DESCRIPTION`


def options(group: str) -> list[str]:
    """Return the options of `group` that ppctl ships, the default first."""
    if group in SWEEP_PARTS:
        return [*SWEEP_PARTS[group]]
    if group == "mesh":
        names = list(MESH_EXAMPLES)
    else:
        folder = ROOT / "recipes" if group == "recipes" else ROOT / "conf" / group
        names = sorted(file.stem for file in folder.glob("*.yaml"))
    return sorted(names, key=lambda name: name != default_option(group))


def default_option(group: str) -> str:
    """Return the option that conf/config.yaml names for `group`."""
    text = (ROOT / "conf/config.yaml").read_text()
    return dict(re.findall(r"^  - (\w+): (\S+)", text, re.MULTILINE))[group]


@functools.cache
def schemas() -> dict[str, type]:
    """Return the classes of settings by lower-case name, the NAME of /schema_NAME in conf/."""
    modules = (module for _, module in inspect.getmembers(groups, inspect.ismodule))
    classes = (cls for module in modules for cls in vars(module).values() if inspect.isclass(cls))
    found = (cls for cls in classes if issubclass(cls, Settings) and cls is not Settings)
    return {cls.__name__.lower(): cls for cls in found}


def schema_of(group: str, option: str) -> type:
    """Return the dataclass of `option`, an option of `group` that ppctl ships."""
    if group == "mesh":
        return Mesh
    if group in SWEEP_PARTS:
        return SWEEP_PARTS[group][option]
    text = (ROOT / f"conf/{group}/{option}.yaml").read_text()
    return schemas()[re.findall(r"/schema_(\w+)@_here_", text)[0]]


def settings_of(prefix: str, cls: type, *, describes: bool = False) -> dict[str, Setting]:
    """Return the settings of a part of the config by key, nested ones included.

    `name` is left out: PART=OPTION sets it. describes: whether all settings are descriptions.

    >>> settings_of("mesh", Mesh)["mesh.pp"].default
    1
    """
    found: dict[str, Setting] = {}
    comments = _comments(cls)
    hints = typing.get_type_hints(cls)
    describes = describes or prefix in DESCRIPTIONS
    for field in dataclasses.fields(cls):
        key, is_marked = f"{prefix}.{field.name}", describes or "describes" in field.metadata
        if dataclasses.is_dataclass(hints[field.name]):
            found |= settings_of(key, hints[field.name], describes=is_marked)
        elif field.name != "name" or cls is Run:
            made = field.default_factory
            default = field.default if made is dataclasses.MISSING else made()
            default = REQUIRED if default is dataclasses.MISSING else default
            about = field.metadata.get("about") or comments.get(field.name, "")
            found[key] = Setting(key, default, about, is_marked)
    return found


@functools.cache  # getsource reads the whole file again for each class
def _comments(cls: type) -> dict[str, str]:
    """Return the comment of each field: at the end of its line, or on the lines right above it."""
    source = ""
    for each in reversed(cls.__mro__):
        with suppress(OSError, TypeError):  # no source: `object`, classes made by functions
            source += inspect.getsource(each)
    found: dict[str, str] = {}
    above: list[str] = []
    for line in source.split("\n"):
        if line.startswith("    # "):
            above.append(line.removeprefix("    # "))
            continue
        if field := re.match(r"    (\w+): ", line):
            found[field[1]] = line.partition("  # ")[2] or " ".join(above)
        above = []
    return found


def all_settings() -> dict[str, Setting]:
    """Return the settings of all shipped options, by key.

    If several options have a key, the first one's setting is returned. The default option is
    first.
    """
    classes = [*PLAIN.items()]
    for part in PARTS:
        classes += ((part, schema_of(part, option)) for option in reversed(options(part)))
    return {key: each for part in classes for key, each in settings_of(*part).items()}


# --- messages -----------------------------------------------------------------------------------


def did_you_mean(word: str, names: Iterable[str], before: str = "") -> str:
    """Return ' Did you mean ...?' for `word`, or '' if none of `names` is similar.

    The suggestions are schedule families that papers or other tools call `word`, else the nearest
    name. before: prefix of each suggested name.

    >>> did_you_mean("trian", ["train", "verify"])
    ' Did you mean train?'
    """
    names = list(names)
    found = [name for name in also_called(word) if name in names]
    return suggested([before + name for name in found or nearest(word, names, 0.5)[:1]])


def wrong_option(group: str, option: str, names: Iterable[str]) -> str:
    """Return the message for an unknown option of `group`, whose options are `names`.

    >>> wrong_option("optim", "adam", ["adamw"])
    'optim=adam is not an option of optim. Did you mean optim=adamw? (optim: adamw)'
    >>> wrong_option("schedule/mine", "a.csv", ["csv"])
    'schedule=mine/a.csv names a file. Use schedule=csv schedule.path=mine/a.csv.'
    """
    if not group.startswith("hydra"):  # Hydra takes a path's folders for subgroups
        group, _, folders = group.partition("/")
        option = f"{folders}/{option}" if folders else option
    reader = FILES.get(group, {}).get(PurePath(option).suffix)
    if reader is not None:
        return f"{group}={option} names a file. Use {group}={reader} {group}.path={option}."
    if group == "mesh":
        axes = [f"mesh.{axis}" for axis in AXES]
        return (
            f"mesh={option} is not a mesh. Write {MESH_TEXT} with sizes of at least 1, for example "
            f"mesh=2x4 or mesh=2x4x2, or set {', '.join(axes[:-1])} and {axes[-1]}."
        )
    near = nearest(option, names := list(names), 0.5)
    lacks = lacking(option) if group == "model" else None
    if lacks is not None:
        return f"model={option}: ppctl's transformer has no {lacks}. Use another model."
    ordered = near + [name for name in names if name not in near]
    mistyped = [name for name in names if name in also_called(option) or _is_typo(option, name)]
    return (
        f"{group}={option} is not an option of {group}."
        f"{did_you_mean(option, mistyped, f'{group}=')} ({group}: {', '.join(ordered) or 'none'})"
    )


def _is_typo(word: str, name: str) -> bool:
    """Return whether `word` is a misspelling or prefix of `name`.

    >>> _is_typo("mistral", "mistral_7b"), _is_typo("mixtral_8x7b", "mistral_7b")
    (True, False)
    """
    alike = difflib.SequenceMatcher(None, word, name).ratio() >= 0.75
    version = re.match(r"\D*\d+", word)  # up to the first number: gemma4 is not gemma3
    is_same = version is None or name.startswith(version[0])
    return name.startswith(word) or (alike and is_same)


def unknown_key(key: str, chosen: Mapping[str, tuple[str, type]]) -> str:
    """Return the message for a key that is not a setting of any chosen part.

    chosen: for each part, the chosen option and its dataclass.

    >>> unknown_key("mesh.ppp", {"mesh": ("2x4", Mesh)})
    'mesh.ppp is not a setting of mesh=2x4. Did you mean mesh.pp? (settings: dp, pp, ..., ranks)'
    """
    # 1. keys outside the parts
    head, _, bad = key.partition(".")
    if head == "recipes":
        return (
            "recipes has no settings: recipes=NAME chooses a file, and the file starts with "
            "`# @package _global_`."
        )
    part = part_of(key, chosen)
    if part is None:
        hint = did_you_mean(head, [*GROUPS, *PLAIN]) or _alike(key, {})
        return f"{head} is not a part of the config.{hint} (parts: {', '.join([*GROUPS, *PLAIN])})"
    # 2. keys nested in a setting, as in model.options.NAME
    option, cls = chosen[part]
    known, label = settings_of(part, cls), f"{part}={option}" if option else part
    if (above := part_of(key, known)) is not None:
        bad = key.removeprefix(f"{above}.")
        return f"{key}: {above} has no {bad} yet. Add it with a +: +{key}=..."
    # 3. settings of the part's other options, or with a similar name
    names = options(part) if option else []
    home = [f"{part}={n}" for n in names if key in settings_of(part, schema_of(part, n))]
    hint = f" It is a setting of {' and '.join(home[:3])}." if home else _alike(key, known)
    settings = ", ".join(name.removeprefix(f"{part}.") for name in known) or "none"
    return f"{key} is not a setting of {label}.{hint} (settings: {settings})"


def part_of(key: str, parts: Iterable[str]) -> str | None:
    """Return the part that contains `key` or equals it, else None."""
    return next((part for part in parts if f"{key}.".startswith(f"{part}.")), None)


def _alike(key: str, known: Iterable[str]) -> str:
    """Return ' Did you mean ...?' with a setting whose last word is like `key`'s, else ''."""
    bad, groups = key.rpartition(".")[2], (known, all_settings())
    own, others = ({name.rpartition(".")[2]: name for name in names} for names in groups)
    found = [bad] * (bad in others) or nearest(bad, own, 0.5) or nearest(bad, others, cutoff=0.75)
    return suggested([(own | others)[name] for name in found[:1]])


# --- the command line of a composed config -------------------------------------------------------


def request_words(composed: Mapping[str, Any]) -> list[str]:
    """Return the overrides that turn the defaults into the parts of a composed config."""
    words: list[str] = []
    for part in (*PARTS, *PLAIN):
        if part == "mesh" and part in composed:
            words[:0] = _mesh_words(composed[part])
        elif part in composed:
            words += _part_words(part, composed[part])
    return words


def _mesh_words(values: Mapping[str, Any]) -> list[str]:
    text, order = mesh_text(values), values["order"]
    if values["ranks"]:
        return [f"mesh.ranks={text}"]
    words = [] if text == default_option("mesh") else f"mesh={text}".split()
    return words if order == "auto" else [*words, f"mesh.order={order}"]


def _part_words(part: str, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield GROUP=OPTION, then SETTING=VALUE for each value that differs from its default."""
    import yaml

    # 1. the option, and the values that its file states
    cls, stated = PLAIN.get(part), dict[str, Any]()
    if cls is None:
        option = values["name"]
        if option != default_option(part):
            yield f"{part}={option}"
        if option not in options(part):
            return  # the settings of this option are in its file in --config-dir
        cls = schema_of(part, option)
        stated = yaml.safe_load((ROOT / f"conf/{part}/{option}.yaml").read_text(encoding="utf-8"))
    # 2. the values that differ from the option's file, or from the defaults
    for key, setting in settings_of(part, cls).items():
        value, usual = _below(values, key), _below(stated, key)
        usual = setting.default if usual is None else usual
        if key == "run.dir":
            usual = f"runs/{values['name']}"
        if isinstance(value, Mapping) and isinstance(usual, Mapping):
            for name, each in value.items():
                if not _is_same(each, usual.get(name)):
                    yield f"{'' if name in usual else '+'}{key}.{name}={value_text(each)}"
        elif not _is_same(value, usual):
            yield f"{key}={value_text(value)}"


def _below(values: Any, key: str) -> Any:
    for name in key.split(".")[1:]:
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


def _is_same(value: Any, usual: Any) -> bool:
    if isinstance(value, float) and isinstance(usual, str):  # YAML 1.1 reads 1e12 as text
        return value == float(usual)
    return value == usual
