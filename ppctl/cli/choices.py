"""The options and settings of `conf/`, `recipes/` and `config/`, and messages on wrong ones.

A new option or setting needs no line here. Standard library only: `ppctl --help` loads no Hydra.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import re
import typing
from collections.abc import Iterable, Mapping
from types import UnionType
from typing import Any, NamedTuple

from ppctl import config
from ppctl.config import Config, Costs, Inspect, Launch, Mesh, Plan, Run, Tune, Verify
from ppctl.config.changed_settings import shown
from ppctl.config.config_dirs import ROOT
from ppctl.schedule.families.registry import also_called
from ppctl.schedule.mesh_axes import AXES, TEXT_AXES

# the parts with one class each
PLAIN = {cls.__name__.lower(): cls for cls in (Run, Launch, Verify, Plan, Tune, Inspect, Costs)}
# the parts that are chosen by name
PARTS = tuple(f.name for f in dataclasses.fields(Config) if f.name not in PLAIN)
GROUPS = (*PARTS, "recipes")
DRAWN = ("mesh", "schedule", "costs")  # the parts that `ppctl schedule` depends on
MESH_EXAMPLES = ("1x2", "1x4", "1x8", "2x2", "2x4", "2x4x2")  # for listings, of any sizes
KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
    dict: "values by name",
    type(None): "null",
}
# text without quotes in Hydra
PLAIN_TEXT = re.compile(r"(?!(true|false|null|nan|inf)$)[A-Za-z_/][\w./-]*", re.IGNORECASE)
REQUIRED = "???"  # as Hydra writes that a setting has no default


class Setting(NamedTuple):
    key: str
    kind: Any  # type of its values
    default: object
    about: str  # its comment in config/, or the metadata of its field


def options(group: str) -> list[str]:
    """Return the options of `group` that ppctl ships, the default first."""
    if group == "mesh":
        names = list(MESH_EXAMPLES)
    else:
        folder = ROOT / "recipes" if group == "recipes" else ROOT / "conf" / group
        names = sorted(file.stem for file in folder.glob("*.yaml"))
    return sorted(names, key=lambda name: name != default_option(group))


def default_option(group: str) -> str:
    """Return the option that conf/config.yaml names for `group`.

    >>> default_option("mesh")
    '2x4'
    """
    text = (ROOT / "conf/config.yaml").read_text()
    return dict(re.findall(r"^  - (\w+): (\S+)", text, re.MULTILINE))[group]


def schemas() -> dict[str, type]:
    """Return the dataclasses of config/ by the name that files in conf/ give them."""
    classes = (cls for _, cls in inspect.getmembers(config, inspect.isclass) if cls is not Config)
    return {cls.__name__.lower(): cls for cls in classes if dataclasses.is_dataclass(cls)}


def schema_of(group: str, option: str) -> type:
    """Return the dataclass behind a shipped option of a part.

    >>> schema_of("schedule", "1f1b").__name__
    'Schedule'
    """
    if group == "mesh":
        return Mesh
    text = (ROOT / f"conf/{group}/{option}.yaml").read_text()
    return schemas()[re.findall(r"/schema_(\w+)@_here_", text)[0]]


def settings_of(prefix: str, cls: type) -> dict[str, Setting]:
    """Return the settings of a part, nested ones included, except `name`, which its choice sets.

    >>> settings_of("mesh", Mesh)["mesh.pp"].default
    1
    """
    found: dict[str, Setting] = {}
    comments = _comments(cls)
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        key = f"{prefix}.{field.name}"
        if dataclasses.is_dataclass(hints[field.name]):
            found |= settings_of(key, hints[field.name])
        elif field.name != "name" or cls is Run:
            made = field.default_factory
            default = field.default if made is dataclasses.MISSING else made()
            default = REQUIRED if default is dataclasses.MISSING else default
            about = field.metadata.get("about") or comments.get(field.name, "")
            found[key] = Setting(key, hints[field.name], default, about)
    return found


@functools.cache  # getsource reads the whole file again for each class
def _comments(cls: type) -> dict[str, str]:
    """Return the comment of each field: at the end of its line, or on the lines right above it."""
    classes = (c for c in reversed(cls.__mro__) if dataclasses.is_dataclass(c))
    found: dict[str, str] = {}
    above: list[str] = []
    for line in "".join(map(_source, classes)).split("\n"):
        if line.startswith("    # "):
            above.append(line.removeprefix("    # "))
            continue
        if field := re.match(r"    (\w+): ", line):
            found[field[1]] = line.partition("  # ")[2] or " ".join(above)
        above = []
    return found


def _source(cls: type) -> str:
    """Return the source of a class, "" of one that `make_dataclass` made."""
    try:
        return inspect.getsource(cls)
    except OSError:
        return ""


def all_settings() -> dict[str, Setting]:
    """Return every setting of every shipped option; of a shared key the default option's."""
    found: dict[str, Setting] = {}
    for part, cls in PLAIN.items():
        found |= settings_of(part, cls)
    for part in PARTS:
        for option in reversed(options(part)):
            found |= settings_of(part, schema_of(part, option))
    return found


# --- messages -----------------------------------------------------------------------------------


def nearest(word: str, names: Iterable[str], cutoff: float = 0.5) -> list[str]:
    """Return those of `names` that look like `word`, nearest first.

    >>> nearest("layrs", ["num_layers", "d_model"])
    ['num_layers']
    """
    return difflib.get_close_matches(word, list(names), n=3, cutoff=cutoff)


def did_you_mean(word: str, names: Iterable[str], before: str = "") -> str:
    """Return ' Did you mean ...?' with the names also called `word`, or the nearest, or nothing.

    >>> did_you_mean("trian", ["train", "verify"])
    ' Did you mean train?'
    """
    names = list(names)
    found = [name for name in also_called(word) if name in names] or nearest(word, names)[:1]
    return f" Did you mean {' or '.join(before + name for name in found)}?" if found else ""


def wrong_option(group: str, option: str, names: Iterable[str]) -> str:
    """Return the message on an option that `group` does not have; `names` are those it has.

    >>> wrong_option("optim", "adam", ["adamw"])
    'optim=adam is not an option of optim. Did you mean optim=adamw? (optim: adamw)'
    """
    if group == "mesh":
        axes = [f"mesh.{axis}" for axis in AXES]
        return (
            f"mesh={option} is not a mesh. Write DPxPP, DPxPPxFSDP or "
            f"{'x'.join(map(str.upper, TEXT_AXES))} with sizes of at least 1, for example "
            f"mesh=2x4 or mesh=2x4x2, or set {', '.join(axes[:-1])} and {axes[-1]}."
        )
    near = nearest(option, names := list(names))
    ordered = near + [name for name in names if name not in near]
    return (
        f"{group}={option} is not an option of {group}.{did_you_mean(option, names, f'{group}=')} "
        f"({group}: {', '.join(ordered) or 'none'})"
    )


def unknown_key(key: str, chosen: Mapping[str, tuple[str, type]]) -> str:
    """Return the message on a key that no chosen part has.

    chosen: the option and dataclass of each part.

    >>> unknown_key("mesh.ppp", {"mesh": ("2x4", Mesh)})
    'mesh.ppp is not a setting of mesh=2x4. Did you mean mesh.pp? (settings: dp, pp, ..., order)'
    """
    # 1. parts without settings
    part = key.split(".")[0]
    if part == "hydra":
        return f"{key} is not a setting of Hydra's that ppctl has."
    if part == "recipes":
        return (
            "recipes has no settings: recipes=NAME chooses a file, and the file starts with "
            "`# @package _global_`."
        )
    if part not in chosen:
        hint = did_you_mean(part, [*GROUPS, *PLAIN]) or _like_elsewhere(key)
        return f"{part} is not a part of the config.{hint} (parts: {', '.join([*GROUPS, *PLAIN])})"
    # 2. keys below a setting
    option, cls = chosen[part]
    known, label = settings_of(part, cls), f"{part}={option}" if part in PARTS else part
    for above in known:
        if key.startswith(f"{above}."):
            if typing.get_origin(known[above].kind) is not dict:
                return f"{key}: {above} is one value, with nothing below it."
            name = key.removeprefix(f"{above}.")
            return f"{key}: {above} has no {name} yet. Add it with a +: +{key}=..."
    # 3. settings of the part's other options
    names = options(part) if option else []
    home = [f"{part}={n}" for n in names if key in settings_of(part, schema_of(part, n))]
    if home and not known:
        return (
            f"{key}: {label} has no settings of its own. Choose {_either(home)}, and set it there."
        )
    # 4. similar settings of the part, or of others
    bad, elsewhere = key.split(".")[-1], _like_elsewhere(key)
    if home:
        hint = f" It is a setting of {' and '.join(home)}."
    elif nearest(bad, _last_words(known)) and not elsewhere.endswith(f".{bad}?"):
        hint = did_you_mean(key, known)
    else:
        hint = elsewhere
    settings = ", ".join(name.removeprefix(f"{part}.") for name in known) or "none"
    return f"{key} is not a setting of {label}.{hint} (settings: {settings})"


def _either(names: list[str]) -> str:
    """Return the first of many names, or all of a few.

    >>> _either(["a", "b"]), _either(["a", "b", "c", "d"])
    ('a or b', 'a or one of 3 others')
    """
    return " or ".join(names) if len(names) < 4 else f"{names[0]} or one of {len(names) - 1} others"


def _like_elsewhere(key: str) -> str:
    """Return ' Did you mean ...?' with the setting of a very similar last word, or nothing."""
    words = _last_words(all_settings())
    found = nearest(key.split(".")[-1], words, cutoff=0.75)
    return f" Did you mean {words[found[0]]}?" if found else ""


def _last_words(keys: Iterable[str]) -> dict[str, str]:
    """Return the key of each last word: of several the last one, but rather none of costs."""
    by_relevance = sorted(keys, key=lambda key: not key.startswith("costs."))
    return {key.split(".")[-1]: key for key in by_relevance}


def wrong_value(
    key: str, line: str | None = None, known: Mapping[str, Setting] | None = None
) -> str:
    """Return the message on a value of a wrong type; line: `key=value`, if the user typed that.

    >>> wrong_value("mesh.pp", "mesh.pp=null")
    'mesh.pp=null: mesh.pp takes a whole number (default 1).'
    """
    known = all_settings() if known is None else known
    before = f"{line}: " if line else ""
    if key not in known:
        below = [name.removeprefix(f"{key}.") for name in known if name.startswith(f"{key}.")]
        if not below:
            return f"{before}{key} does not take such a value."
        example = f"Set what is in it, for example {key}.{below[0]}"
        return f"{before}{key} is a part. {example} (settings: {', '.join(below)})"
    setting = known[key]
    is_union = typing.get_origin(setting.kind) in (UnionType, typing.Union)
    members = typing.get_args(setting.kind) if is_union else (setting.kind,)
    kinds = " or ".join(KINDS[typing.get_origin(kind) or kind] for kind in members)
    default = "no default" if setting.default == REQUIRED else f"default {shown(setting.default)}"
    return f"{before}{key} takes {kinds} ({default})."


def value_text(value: object) -> str:
    """Return a value in Hydra's grammar.

    >>> value_text(None), value_text("a b"), value_text([1, "x"]), value_text("3")
    ('null', '"a b"', '[1,x]', '"3"')
    """
    if value is None or isinstance(value, bool):
        return shown(value)
    if isinstance(value, list):
        return f"[{','.join(map(value_text, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{value_text(each)}' for key, each in value.items())}}}"
    if not isinstance(value, str) or PLAIN_TEXT.fullmatch(value):
        return str(value)
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', value)  # only before a quote is a backslash special
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
    return '"' + escaped.replace("${", r"\${") + '"'
