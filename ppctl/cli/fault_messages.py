"""Faults of a request in one line each: refused overrides, and Hydra's errors reworded."""

from __future__ import annotations

import dataclasses
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf import errors as omegaconf_errors
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from ppctl.cli import choices
from ppctl.cli.choices import GROUPS, PARTS, options, unknown_key, wrong_option, wrong_value
from ppctl.cli.sweep_options import refuse_sweep_setting, sweep_group_of, wrong_sweep_setting
from ppctl.config import Mesh
from ppctl.config.changed_settings import shown
from ppctl.errors import ConfigError
from ppctl.schedule.mesh_axes import mesh_text

UNKNOWN_KEY = (omegaconf_errors.ConfigKeyError, omegaconf_errors.ConfigAttributeError)
WRONG_TEXT = (omegaconf_errors.InterpolationResolutionError, omegaconf_errors.GrammarParseError)
ASSUMED = "such costs are assumed by `ppctl schedule` alone. Leave them out."
SWEEP_DIR = "hydra.sweep.dir"  # of --multirun: Hydra's word for run.dir


def parse_override(text: str) -> Override:
    """Return one override as Hydra reads it; ConfigError if it cannot."""
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        key, equals, _ = text.partition("=")
        if not equals:
            found = [f"{group}={text}" for group in GROUPS if text in options(group)]
            if text in GROUPS:
                found.append(f"{text}={choices.default_option(text)}")
            hint = f" Did you mean {found[0]}?" if found else ""
            raise ConfigError(f"{text!r} is not KEY=VALUE.{hint}") from error
        why = str(error).partition(" expecting")[0]
        raise ConfigError(
            f"{text} cannot be read ({why}). A value with spaces, commas, quotes, brackets or '=' "
            f"needs quotes that reach ppctl: '{key}=\"...\"'."
        ) from error
    if not override.key_or_group:
        raise ConfigError(f"{text!r} is not KEY=VALUE.")
    return override


def refuse(override: Override, *, multirun: bool, drawing: bool) -> None:
    """Raise ConfigError for an override that ppctl cannot serve, or explains better than Hydra.

    drawing: the request is one of `ppctl schedule`.
    """
    key, line = override.key_or_group, str(override.input_line)
    group, is_swept = key.split(".")[0], override.is_sweep_override()
    # 1. keys of other commands
    if drawing:
        _refuse_for_drawing(group, line)
    elif group == "costs":
        raise ConfigError(f"{line}: {ASSUMED}")
    # 2. + and ~
    if override.is_delete():
        raise ConfigError(f"{line}: nothing can be removed. Give {key} another value instead.")
    if line.startswith("+") and (key in GROUPS or key in choices.all_settings()):
        raise ConfigError(f"{line}: {key} is there already. Drop the +: {line.lstrip('+')}")
    # 3. several values
    if is_swept and drawing:
        remedy = "`ppctl schedule compare` shows schedules together."
        raise ConfigError(f"{line} gives several values. {remedy}")
    if is_swept and not multirun:
        raise ConfigError(
            f"{line} gives several values. Add --multirun for a run of each, or quote the value "
            f"if it is one: '{key}=\"a,b\"'."
        )
    # 4. the choice of a part
    if key in GROUPS and (not is_swept or override.is_discrete_sweep()):
        for value in _values(override):
            if not isinstance(value, str) and not (isinstance(value, dict) and key != "recipes"):
                raise ConfigError(wrong_option(key, shown(value), options(key)))
    if group in PARTS and key == f"{group}.name":
        choice = line.replace(".name", "", 1)
        raise ConfigError(f"{line}: the choice of {group} sets its name. Use {choice}.")
    # 5. Hydra's own settings
    if key == "hydra.mode":
        raise ConfigError(f"{line}: add --multirun for a sweep, or leave it out.")
    if key in ("hydra.run.dir", "hydra.sweep.subdir") or (key == SWEEP_DIR and not multirun):
        raise ConfigError(f"{line}: the files of a run are in run.dir. Use run.dir=PATH.")
    if key == "hydra.job.chdir":
        raise ConfigError(f"{line}: a run stays in the directory of its start. Leave it out.")
    value = None if is_swept else override.value()
    refuse_sweep_setting(key, value, line, is_swept=is_swept, multirun=multirun)


def _refuse_for_drawing(group: str, line: str) -> None:
    """Raise ConfigError for an override that no schedule depends on."""
    parts = (*choices.DRAWN, "recipes")
    if group in parts or group.startswith("hydra"):
        return
    shown_parts = ", ".join(parts)
    if group in (*PARTS, *choices.PLAIN):
        message = f"{line}: no schedule depends on {group}. Leave it out (parts: {shown_parts})."
        raise ConfigError(message)
    near = choices.did_you_mean(group, parts)
    raise ConfigError(f"{group} is not a part of a drawing.{near} ({shown_parts})")


def _values(override: Override) -> list[Any]:
    """Return the value, or each value of a sweep that lists them."""
    if not override.is_sweep_override():
        return [override.value()]
    if override.value_type == ValueType.GLOB_CHOICE_SWEEP:
        return []  # of existing options
    texts = override.sweep_string_iterator()
    return [parse_override(f"{override.key_or_group}={text}").value() for text in texts]


def check_keys(cfg: DictConfig) -> None:
    """Raise ConfigError for a key that its part does not have; Hydra lets `+key=1` slip through."""

    def walk(node: DictConfig, prefix: str) -> None:
        cls = OmegaConf.get_type(node)
        if not dataclasses.is_dataclass(cls):
            if "." in prefix:
                return  # the value of a setting of type Any, which its class checks
            remedy = f"one of ppctl's options, `defaults: [{choices.default_option(prefix)}]`."
            raise ConfigError(f"{prefix}: the file chosen states no schema. Start it with {remedy}")
        names = [f.name for f in dataclasses.fields(cls)]
        for key in node:
            path = f"{prefix}.{key}".lstrip(".")
            if key not in names:
                raise ConfigError(unknown_key(path, _chosen(cfg)))
            if not OmegaConf.is_missing(node, key) and isinstance(node[key], DictConfig):
                walk(node[key], path)

    walk(cfg, "")


def check_names(cfg: DictConfig, chosen: dict[str, Any]) -> None:
    """Raise ConfigError where a file sets a part's `name` to another option than the chosen."""
    for part in PARTS:
        option, name = chosen[part], cfg[part].get("name")
        if name not in (option, None) and option in options(part):
            raise ConfigError(
                f"{part}.name={name}, but the choice is {part}={option}. Use {part}={name}, or "
                f"in a recipe's defaults `override /{part}: {name}`."
            )


def _chosen(cfg: Any) -> dict[str, tuple[str, type]]:
    """Return the option and dataclass of each part of a composed config, as far as it got."""
    found: dict[str, tuple[str, type]] = {part: ("", cls) for part, cls in choices.PLAIN.items()}
    for part in PARTS:
        node = None if part not in cfg or OmegaConf.is_missing(cfg, part) else cfg.get(part)
        if not isinstance(node, DictConfig):
            continue
        cls = OmegaConf.get_type(node)
        if dataclasses.is_dataclass(cls):
            option = str(node.get("name"))
            if cls is Mesh:
                option = mesh_text({str(axis): size for axis, size in node.items()})
            found[part] = (option, cls)
    return found


def explain(error: Exception, parsed: list[Override]) -> str:
    """Return the fault in one line: from the exception's fields if it has them, else its text."""
    if isinstance(error, MissingConfigException) and "/" in str(error.missing_cfg_file):
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        return wrong_option(group, option, error.options or ()) + _origin(group, parsed)
    for link in (error, error.__cause__, error.__context__):
        if isinstance(link, OmegaConfBaseException) and link.full_key:
            return _explain_key(link, str(link.full_key), parsed)
    text = str(error).strip()
    if isinstance(error, yaml.YAMLError):  # names the file and the line
        return " ".join(text.split())
    origin = _origin("", parsed) if isinstance(error, (ValueError, OSError)) else ""
    return text.partition("\n")[0] + origin


def _explain_key(error: OmegaConfBaseException, key: str, parsed: list[Override]) -> str:
    """Return the fault of a setting: an unknown one, without a value, or of a wrong type."""
    chosen = _chosen(error.parent_node._get_root()) if error.parent_node is not None else {}
    override = _override_of(key, parsed)
    line = str(override.input_line) if override else None
    reason = str(error.msg).partition("\n")[0]
    if (group := sweep_group_of(key)) is not None:
        chosen = [str(one.value()) for one in parsed if one.key_or_group == group]
        named = [str(each.value()) for each in parsed if each.key_or_group == group]
        return wrong_sweep_setting(key, line, (named or ["ppctl"])[-1])
    if isinstance(error, MissingMandatoryValue):
        part = key.split(".")[0]
        return f"{key} has no value. {part}={chosen[part][0]} needs one: add {key}=..."
    if isinstance(error, UNKNOWN_KEY):
        return unknown_key(key, chosen) + _origin(key, parsed)
    if isinstance(error, WRONG_TEXT):
        return f"{line or key}: {reason}."
    if override and override.key_or_group == key:
        return wrong_value(key, line)
    below = next((o.key_or_group for o in parsed if o.key_or_group.startswith(f"{key}.")), None)
    if below:
        return unknown_key(below, chosen)
    return f"{wrong_value(key)} {reason}.{_origin(key, parsed)}"


def _origin(key: str, parsed: list[Override]) -> str:
    """Return ' (in recipes=x)' if no override sets `key` and a recipe may, else nothing."""
    recipe = _override_of("recipes", parsed)
    return f" (in {recipe.input_line})" if recipe and not _override_of(key, parsed) else ""


def _override_of(key: str, parsed: list[Override]) -> Override | None:
    """Return the last override of `key` or of what it lies in."""
    return next((o for o in reversed(parsed) if f"{key}.".startswith(f"{o.key_or_group}.")), None)
