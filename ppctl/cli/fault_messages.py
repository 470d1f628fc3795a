"""One-line messages for faulty requests: refused overrides, and Hydra's errors reworded."""

import dataclasses
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, errors as omegaconf_errors
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from ppctl.cli import choices
from ppctl.cli.choices import GROUPS, PARTS, SWEEP_PARTS, options, part_of, wrong_option
from ppctl.cli.text_settings import as_typed
from ppctl.config import Costs, Mesh
from ppctl.config.changed_settings import shown
from ppctl.config.groups.command_settings import HostGroup
from ppctl.config.groups.data_settings import Part
from ppctl.config.groups.layout_settings import RankAxes
from ppctl.errors import ConfigError, suggested
from ppctl.schedule.mesh_axes import mesh_text
from ppctl.user_files import check_text

UNKNOWN_KEY = (omegaconf_errors.ConfigKeyError, omegaconf_errors.ConfigAttributeError)
# errors from the user's files: malformed, unreadable, recursive
OF_FILES = (ValueError, OSError, RecursionError)
ASSUMED = "only `ppctl schedule` reads these costs. Leave them out."
# classes of the entries of lists: (the list, its value in a remedy)
ENTRIES = {
    Part: ("data.parts", "[{path: PATH, weight: 0.7}, {path: PATH}]"),
    RankAxes: ("mesh.ranks", "[{fsdp: 4}, {dp: 2, tp: 2}]"),
    HostGroup: ("tune.cluster", "[{hosts: 4, hardware: h100}, {hosts: 4, hardware: a100}]"),
}
OF_MODELS = f"costs.{Costs.OF_MODELS}"


def parse_override(text: str) -> Override:
    """Return one override, parsed by Hydra; ConfigError if that fails."""
    try:
        check_text(text)
    except ValueError as error:  # overrides are stored in UTF-8 files
        raise ConfigError(
            f"{text} is not UTF-8 text. Rename it, or use a UTF-8 locale: LANG=C.UTF-8."
        ) from error
    try:
        override = OverridesParser.create().parse_override(as_typed(text))
        override.input_line = text
    except HydraException as error:
        key, equals, _ = text.partition("=")
        if not equals:
            found = [f"{group}={text}" for group in GROUPS if text in options(group)]
            if text in GROUPS:
                found.append(f"{text}={choices.default_option(text)}")
            raise ConfigError(f"{text!r} is not KEY=VALUE.{suggested(found[:1])}") from error
        why = str(error).partition(" expecting")[0]
        raise ConfigError(
            f"{text} cannot be read ({why}). A value with spaces, commas, quotes, brackets or '=' "
            f"needs quotes that reach ppctl: '{key}=\"...\"'."
        ) from error
    if not override.key_or_group:
        raise ConfigError(f"{text!r} is not KEY=VALUE.")
    return override


def refuse(override: Override, *, multirun: bool, drawing: bool) -> None:
    """Raise ConfigError for an override that ppctl does not support, or that Hydra explains poorly.

    multirun: whether --multirun is given. drawing: whether the command is `ppctl schedule`.
    """
    key, line = override.key_or_group, str(override.input_line)
    group, is_swept = key.split(".")[0], override.is_sweep_override()
    # 1. keys of other commands
    parts = (*choices.DRAWN, "recipes")
    if drawing and group not in parts and not group.startswith("hydra"):
        what = f"no schedule depends on {group}. Leave it out"
        if group not in (*PARTS, *choices.PLAIN):
            what = f"{group} is not a part of a drawing.{choices.did_you_mean(group, parts)}"
        raise ConfigError(f"{line}: {what} (parts: {', '.join(parts)}).")
    if group == "costs" and not drawing and key != OF_MODELS:
        raise ConfigError(f"{line}: {ASSUMED}")
    if key == OF_MODELS and drawing:
        raise ConfigError(f"{line}: `ppctl schedule` has no model with experts. Leave it out.")
    # 2. values that Hydra accepts and ppctl does not
    if override.is_delete():
        raise ConfigError(f"{line}: settings cannot be removed. Give {key} another value instead.")
    if is_swept and (drawing or not multirun):
        many = "Add --multirun to run each, put brackets around them if they are a list, or quotes "
        many += f"if they are one value: '{key}=\"a,b\"'."
        many = "`ppctl schedule compare` shows schedules together." if drawing else many
        raise ConfigError(f"{line} gives several values. {many}")
    if key in GROUPS and not is_swept and not isinstance(override.value(), str | dict):
        raise ConfigError(wrong_option(key, shown(override.value()), options(key)))
    # 3. Hydra's settings: ppctl reads only those of a sweep
    if group.partition("/")[0] != "hydra":
        return
    part = key.replace("/", ".")
    if part_of(part, SWEEP_PARTS) is None:
        raise ConfigError(
            f"{line}: ppctl does not read this setting of Hydra's. Leave it out: a run writes to "
            "run.dir and does not change the current directory."
        )
    if is_swept:
        raise ConfigError(f"{line}: this setting cannot be swept. Give {part} one value.")
    if part in SWEEP_PARTS and str(override.value()) not in SWEEP_PARTS[part]:
        raise ConfigError(wrong_option(key, shown(override.value()), options(part)))
    if not multirun:
        raise ConfigError(f"{line} is for the jobs of a sweep. Add --multirun, or leave it out.")


def check_keys(cfg: DictConfig) -> None:
    """Raise ConfigError for an unknown key: Hydra would accept it when written `+key=1`."""

    def walk(node: DictConfig, prefix: str) -> None:
        cls = OmegaConf.get_type(node)
        if not dataclasses.is_dataclass(cls):
            if "." in prefix:
                return  # inside a setting of type Any: the part's class checks the value
            remedy = f"one of ppctl's options, `defaults: [{choices.default_option(prefix)}]`."
            raise ConfigError(f"{prefix}: the chosen file has no schema. Start it with {remedy}")
        names = [f.name for f in dataclasses.fields(cls)]
        for key in node:
            path = f"{prefix}.{key}".lstrip(".")
            if key not in names:
                raise ConfigError(choices.unknown_key(path, _chosen(cfg)))
            if not OmegaConf.is_missing(node, key) and isinstance(node[key], DictConfig):
                walk(node[key], path)

    walk(cfg, "")


def check_names(cfg: DictConfig, chosen: dict[str, Any]) -> None:
    """Raise ConfigError if a file sets a part's `name` to an option that is not the chosen one."""
    for part in PARTS:
        option, name = chosen[part], cfg[part].get("name")
        if name not in (option, None) and option in options(part):
            raise ConfigError(
                f"{part}.name={name}, but the choice is {part}={option}. Use {part}={name}, or "
                f"in a recipe's defaults `override /{part}: {name}`."
            )


def _chosen(cfg: Any) -> dict[str, tuple[str, type]]:
    """Return (option, dataclass) of each part of a config, which may be partly composed."""
    found: dict[str, tuple[str, type]] = {part: ("", cls) for part, cls in choices.PLAIN.items()}
    for part in (*PARTS, *SWEEP_PARTS):
        node = OmegaConf.select(cfg, part)
        cls = OmegaConf.get_type(node) if isinstance(node, DictConfig) else None
        if not dataclasses.is_dataclass(cls):
            continue
        option = str(node.get("name"))
        if cls is Mesh:
            option = mesh_text({str(axis): size for axis, size in node.items()})
        if part in SWEEP_PARTS:
            option = next(name for name, each in SWEEP_PARTS[part].items() if each is cls)
        found[part] = (option, cls)
    return found


def explain(error: Exception, parsed: list[Override]) -> str:
    """Return a one-line message from the exception's fields, or if it has none, from its text."""
    if isinstance(error, MissingConfigException) and "/" in str(error.missing_cfg_file):
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        return wrong_option(group, option, error.options or ()) + _origin(group, parsed)
    for link in (error, error.__cause__, error.__context__):
        if isinstance(link, OmegaConfBaseException) and link.full_key:
            return _explain_key(link, str(link.full_key), parsed)
    text = str(error).strip()
    if isinstance(error, yaml.YAMLError):  # the text names file and line
        return " ".join(text.split())
    origin = _origin("", parsed) if isinstance(error, OF_FILES) else ""
    return text.partition("\n")[0] + origin


def _explain_key(error: OmegaConfBaseException, key: str, parsed: list[Override]) -> str:
    """Return the message for a setting: unknown, without a value, or of a wrong type."""
    for entry in ENTRIES:
        if error.object_type is entry:
            return _explain_entry(error, key, entry) + _origin(ENTRIES[entry][0], parsed)
    chosen = _chosen(error.parent_node._get_root()) if error.parent_node is not None else {}
    if isinstance(error, UNKNOWN_KEY):
        return choices.unknown_key(key, chosen) + _origin(key, parsed)
    if isinstance(error, MissingMandatoryValue):
        part = key.split(".")[0]
        return f"{key} has no value. {part}={chosen[part][0]} needs one: add {key}=..."
    override = _override_of(key, parsed)
    if "is not a ListConfig" in str(error.msg) and override is not None:
        is_swept = override.is_discrete_sweep()
        values = override.sweep_string_iterator() if is_swept else [override.value()]
        lists = ",".join(f"[{value}]" for value in values)
        return f"{override.input_line} is not a list. Use {override.key_or_group}={lists}."
    return f"{override.input_line if override else key}: {_reason(error)}{_origin(key, parsed)}"


def _explain_entry(
    error: OmegaConfBaseException, key: str, entry: type[Part | RankAxes | HostGroup]
) -> str:
    """Return the message for a setting of an entry of a list. `key` may lack the entry's index."""
    (part, example), name = ENTRIES[entry], key.rpartition(".")[2]
    names = [field.name for field in dataclasses.fields(entry)]
    if isinstance(error, UNKNOWN_KEY):
        hint = choices.did_you_mean(name, names)
        return f"{part}: {name} is not a setting of an entry.{hint} (settings: {', '.join(names)})"
    if isinstance(error, MissingMandatoryValue):
        return f"{key} has no value. Use {part}={example}."
    return f"{part}: {name}: {_reason(error)}"


def _reason(error: OmegaConfBaseException) -> str:
    """Return the first line of OmegaConf's message as a sentence."""
    return str(error.msg).partition("\n")[0].rstrip(".") + "."


def _origin(key: str, parsed: list[Override]) -> str:
    """Return ' (in recipes=x)' if a recipe is chosen and no override sets `key`, else ''."""
    recipe = _override_of("recipes", parsed)
    return f" (in {recipe.input_line})" if recipe and not _override_of(key, parsed) else ""


def _override_of(key: str, parsed: list[Override]) -> Override | None:
    """Return the last override of `key` or of a part that contains it, else None."""
    key = key.replace("[", ".")  # so that data.parts[0] counts as below data.parts
    return next((o for o in reversed(parsed) if part_of(key, [o.key_or_group])), None)
