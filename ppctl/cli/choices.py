"""The options and settings that there are, and messages on a name or value that is none of them.

Read from `conf/`, `recipes/` and the dataclasses of `config/`, so that a new option or setting needs no line here.
Standard library only: `ppctl --help` loads no Hydra.
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
from ppctl.config import Config, Inspect, Launch, Mesh, Plan, Rehearse, Run, ScheduleConfig, Tune, Verify
from ppctl.config.files import ROOT
from ppctl.schedule.families.registry import also_called

# the parts of which there is one
PLAIN: dict[str, type] = {
    "run": Run,
    "launch": Launch,
    "verify": Verify,
    "plan": Plan,
    "rehearse": Rehearse,
    "tune": Tune,
    "inspect": Inspect,
}
PARTS = tuple(f.name for f in dataclasses.fields(Config) if f.name not in PLAIN)  # the parts that are chosen by name
GROUPS = (*PARTS, "recipes")
DRAWN = ("mesh", "schedule", "costs")  # the parts that `ppctl schedule` depends on
DRAWN_COSTS = "unit"  # what it chooses of costs
MESH_EXAMPLES = ("1x2", "1x4", "1x8", "2x2", "2x4", "2x4x2")  # any sizes will do; these are for listings
KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
    dict: "values by name",
    type(None): "null",
}
PLAIN_TEXT = re.compile(r"(?!(true|false|null|nan|inf)$)[A-Za-z_/][\w./-]*", re.IGNORECASE)  # needs no quotes in Hydra
REQUIRED = "???"  # as Hydra writes that a setting has no default


class Setting(NamedTuple):
    key: str
    kind: Any  # type of its values
    default: object
    about: str  # its comment in config/


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
    found = re.search(rf"^  - {group}: (\S+)", (ROOT / "conf/config.yaml").read_text(), re.MULTILINE)
    assert found is not None, group
    return found[1]


def schemas() -> dict[str, type]:
    """Return the dataclasses of config/ by the name that files in conf/ give them."""
    classes = inspect.getmembers(config, lambda cls: inspect.isclass(cls) and dataclasses.is_dataclass(cls))
    return {name.lower(): cls for name, cls in classes if cls not in (Config, ScheduleConfig)}


def schema_of(group: str, option: str) -> type:
    """Return the dataclass behind a shipped option of a part.

    >>> schema_of("schedule", "1f1b").__name__
    'Schedule'
    """
    if group == "mesh":
        return Mesh
    found = re.search(r"/schema_(\w+)@_here_", (ROOT / f"conf/{group}/{option}.yaml").read_text())
    assert found is not None, f"conf/{group}/{option}.yaml names no schema"
    return schemas()[found[1]]


def settings_of(prefix: str, cls: type) -> dict[str, Setting]:
    """Return the settings of a part, nested parts included. `name` is left out: the choice of the part sets it.

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
            found[key] = Setting(key, hints[field.name], default, comments.get(field.name, ""))
    return found


@functools.cache  # getsource reads the whole file again for each class
def _comments(cls: type) -> dict[str, str]:
    source = "".join(inspect.getsource(c) for c in reversed(cls.__mro__) if dataclasses.is_dataclass(c))
    return dict(re.findall(r"^    (\w+): .*?  # (.+)$", source, re.MULTILINE))


def all_settings() -> dict[str, Setting]:
    """Return every setting of every shipped option; where options share a key, the default option's."""
    found: dict[str, Setting] = {}
    for part, cls in PLAIN.items():
        found |= settings_of(part, cls)
    for part in PARTS:
        for option in reversed(options(part)):
            found |= settings_of(part, schema_of(part, option))
    return found


# --- messages --------------------------------------------------------------------------------------------------------


def nearest(word: str, names: Iterable[str], cutoff: float = 0.5) -> list[str]:
    """Return those of `names` that look like `word`, nearest first.

    >>> nearest("layrs", ["num_layers", "d_model"])
    ['num_layers']
    """
    return difflib.get_close_matches(word, list(names), n=3, cutoff=cutoff)


def did_you_mean(word: str, names: Iterable[str], before: str = "") -> str:
    """Return ' Did you mean ...?' with those of `names` that are also called `word`, or the nearest, or nothing.

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
        return (
            f"mesh={option} is not a mesh. Write DPxPP, DPxPPxFSDP or DPxPPxFSDPxTPxCP with sizes of at least 1, for "
            "example mesh=2x4 or mesh=2x4x2, or set mesh.dp, mesh.pp, mesh.fsdp, mesh.tp and mesh.cp."
        )
    near = nearest(option, names := list(names))
    ordered = near + [name for name in names if name not in near]
    return (
        f"{group}={option} is not an option of {group}.{did_you_mean(option, names, f'{group}=')} "
        f"({group}: {', '.join(ordered) or 'none'})"
    )


def unknown_key(key: str, chosen: Mapping[str, tuple[str, type]]) -> str:
    """Return the message on a key that no chosen part has; `chosen` maps a part to its option and dataclass.

    >>> unknown_key("mesh.ppp", {"mesh": ("2x4", Mesh)})
    'mesh.ppp is not a setting of mesh=2x4. Did you mean mesh.pp? (settings: dp, pp, fsdp, tp, cp, order)'
    """
    part = key.split(".")[0]
    if part == "hydra":
        return f"{key} is not a setting of Hydra's. `--cfg hydra` shows those."
    if part == "recipes":
        return "recipes has no settings: recipes=NAME chooses a file, and the file starts with `# @package _global_`."
    if part not in chosen:
        hint = did_you_mean(part, [*GROUPS, *PLAIN]) or _like_elsewhere(key)
        return f"{part} is not a part of the config.{hint} (parts: {', '.join([*GROUPS, *PLAIN])})"
    option, cls = chosen[part]
    own = settings_of(part, cls)
    label = f"{part}={option}" if part in PARTS else part
    for above in own:
        if key.startswith(f"{above}."):
            if typing.get_origin(own[above].kind) is dict:
                return f"{key}: {above} has no {key.removeprefix(f'{above}.')} yet. Add it with a +: +{key}=..."
            return f"{key}: {above} is one value, with nothing below it."
    home = (
        [f"{part}={name}" for name in options(part) if key in settings_of(part, schema_of(part, name))]
        if option
        else []
    )
    if home and not own:
        return f"{key}: {label} has no settings of its own. Choose {_either(home)}, and set it there."
    bad, elsewhere = key.split(".")[-1], _like_elsewhere(key)
    if home:
        hint = f" It is a setting of {' and '.join(home)}."
    elif nearest(bad, _last_words(own)) and not elsewhere.endswith(f".{bad}?"):
        hint = did_you_mean(key, own)
    else:
        hint = elsewhere
    names = ", ".join(name.removeprefix(f"{part}.") for name in own) or "none"
    return f"{key} is not a setting of {label}.{hint} (settings: {names})"


def _either(names: list[str]) -> str:
    """Return the first of many names, or all of a few.

    >>> _either(["a", "b"]), _either(["a", "b", "c", "d"])
    ('a or b', 'a or one of 3 others')
    """
    return " or ".join(names) if len(names) < 4 else f"{names[0]} or one of {len(names) - 1} others"


def _like_elsewhere(key: str) -> str:
    """Return ' Did you mean ...?' with the setting of any part whose last word is much like the key's, or nothing."""
    words = _last_words(all_settings())
    found = nearest(key.split(".")[-1], words, cutoff=0.75)
    return f" Did you mean {words[found[0]]}?" if found else ""


def _last_words(keys: Iterable[str]) -> dict[str, str]:
    """Return the key of each last word: of several the last one, but rather none of costs."""
    by_relevance = sorted(keys, key=lambda key: not key.startswith("costs."))
    return {key.split(".")[-1]: key for key in by_relevance}


def wrong_value(key: str, line: str | None = None, known: Mapping[str, Setting] | None = None) -> str:
    """Return the message on a value that the type of `key` does not take; `line` is `key=value` if the user typed that.

    >>> wrong_value("mesh.pp", "mesh.pp=null")
    'mesh.pp=null: mesh.pp takes a whole number (default 1).'
    """
    known = all_settings() if known is None else known
    before = f"{line}: " if line else ""
    if key not in known:
        below = [name.removeprefix(f"{key}.") for name in known if name.startswith(f"{key}.")]
        if not below:
            return f"{before}{key} does not take such a value."
        return (
            f"{before}{key} is a part. Set what is in it, for example {key}.{below[0]} (settings: {', '.join(below)})"
        )
    setting = known[key]
    members = typing.get_args(setting.kind) if typing.get_origin(setting.kind) is UnionType else (setting.kind,)
    kinds = " or ".join(KINDS[typing.get_origin(kind) or kind] for kind in members)
    default = "no default" if setting.default == REQUIRED else f"default {shown(setting.default)}"
    return f"{before}{key} takes {kinds} ({default})."


def shown(value: object) -> str:
    """Return a value as one types it.

    >>> shown(None), shown(True), shown(0.5)
    ('null', 'true', '0.5')
    """
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def value_text(value: object) -> str:
    """Return a value in Hydra's grammar.

    >>> value_text(None), value_text("a b"), value_text([1, "x"]), value_text("3"), value_text(1e-05)
    ('null', '"a b"', '[1,x]', '"3"', '1e-05')
    """
    if value is None or isinstance(value, bool):
        return shown(value)
    if isinstance(value, list):
        return f"[{','.join(map(value_text, value))}]"
    if not isinstance(value, str) or PLAIN_TEXT.fullmatch(value):
        return str(value)
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', value)  # only before a quote is a backslash special
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
    return '"' + escaped.replace("${", r"\${") + '"'
