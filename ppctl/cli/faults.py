"""Faults of a request, in one line each: overrides that are refused, and Hydra's errors in ppctl's words."""

from __future__ import annotations

import dataclasses
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    GrammarParseError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from ppctl.cli.choices import (
    DRAWN,
    GROUPS,
    PARTS,
    PLAIN,
    all_settings,
    default_option,
    did_you_mean,
    options,
    settings_of,
    shown,
    unknown_key,
    wrong_option,
    wrong_value,
)
from ppctl.cli.launchers import refuse_sweep_setting, sweep_group_of, wrong_sweep_setting
from ppctl.config import Costs, Measure, Mesh
from ppctl.errors import ConfigError


def parse_override(text: str) -> Override:
    """Return one override as Hydra reads it; ConfigError if it cannot."""
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        key, equals, _ = text.partition("=")
        if not equals:
            found = [f"{group}={text}" for group in GROUPS if text in options(group)]
            found += [f"{text}={option}" for option in (options(text) if text in GROUPS else [])]
            hint = f" Did you mean {found[0]}?" if found else ""
            raise ConfigError(f"{text!r} is not KEY=VALUE.{hint}") from error
        why = str(error).partition(" expecting")[0]
        raise ConfigError(
            f"{text} cannot be read ({why}). A value with spaces, commas, quotes, brackets or '=' needs quotes that "
            f"reach ppctl: '{key}=\"...\"'."
        ) from error
    if not override.key_or_group:
        raise ConfigError(f"{text!r} is not KEY=VALUE.")
    return override


SWEEP_DIR = "hydra.sweep.dir"  # of --multirun: Hydra's word for run.dir


def refuse(override: Override, *, multirun: bool, drawing: bool) -> None:
    """Raise ConfigError for an override that Hydra would take, but that ppctl cannot serve or can explain better.

    drawing: the request is one of `ppctl schedule`.
    """
    key, line = override.key_or_group, str(override.input_line)
    group = key.split(".")[0]
    if drawing:
        _refuse_for_drawing(group, line)
    if key in settings_of("costs", Measure if drawing else Costs):
        raise ConfigError(_wrong_costs(line, drawing=drawing))
    if override.is_delete():
        raise ConfigError(f"{line}: nothing can be removed. Give {key} another value instead.")
    if line.startswith("+") and (key in GROUPS or key in all_settings()):
        raise ConfigError(f"{line}: {key} is there already. Drop the +: {line.lstrip('+')}")
    if override.is_sweep_override() and drawing:
        raise ConfigError(f"{line} gives several values. `ppctl schedule compare` shows schedules together.")
    if override.is_sweep_override() and not multirun:
        raise ConfigError(
            f"{line} gives several values. Add --multirun for a run of each, or quote the value if it is one: "
            f"'{key}=\"a,b\"'."
        )
    if key in GROUPS and (not override.is_sweep_override() or override.is_discrete_sweep()):
        for value in _values(override):
            if not isinstance(value, str) and not (isinstance(value, dict) and key != "recipes"):
                raise ConfigError(wrong_option(key, shown(value), options(key)))
    if group in PARTS and key == f"{group}.name":
        raise ConfigError(f"{line}: the choice of {group} sets its name. Use {line.replace('.name', '', 1)}.")
    if key == "hydra.mode":
        raise ConfigError(f"{line}: add --multirun for a sweep, or leave it out.")
    if key in ("hydra.run.dir", "hydra.sweep.subdir") or (key == SWEEP_DIR and not multirun):
        raise ConfigError(f"{line}: what a run leaves is in run.dir. Use run.dir=PATH.")
    if key == "hydra.job.chdir":
        raise ConfigError(f"{line}: a run stays in the directory that it is started in. Leave it out.")
    is_swept = override.is_sweep_override()
    refuse_sweep_setting(key, None if is_swept else override.value(), line, is_swept=is_swept, multirun=multirun)


def _refuse_for_drawing(group: str, line: str) -> None:
    """Raise ConfigError for an override of what no schedule depends on, and which would be ignored."""
    parts = (*DRAWN, "recipes")
    if group in (*PARTS, *PLAIN) and group not in parts:
        raise ConfigError(f"{line}: no schedule depends on {group}. Leave it out (parts: {', '.join(parts)}).")
    if group not in parts and not group.startswith("hydra"):
        raise ConfigError(f"{group} is not a part of a drawing.{did_you_mean(group, parts)} ({', '.join(parts)})")


def _values(override: Override) -> list[Any]:
    """Return the value, or each value of a sweep that lists them."""
    if not override.is_sweep_override():
        return [override.value()]
    if override.value_type == ValueType.GLOB_CHOICE_SWEEP:
        return []  # names options that there are
    return [parse_override(f"{override.key_or_group}={text}").value() for text in override.sweep_string_iterator()]


def check_keys(cfg: DictConfig) -> None:
    """Raise ConfigError for a key that its part does not have; Hydra lets `+key=1` slip through."""

    def walk(node: DictConfig, prefix: str) -> None:
        cls = OmegaConf.get_type(node)
        if not dataclasses.is_dataclass(cls):
            if "." in prefix:
                return  # the value of a setting of type Any, which has a check of its own
            raise ConfigError(
                f"{prefix}: the file chosen states no schema. Start it with one of ppctl's options, "
                f"`defaults: [{default_option(prefix)}]`."
            )
        names = [f.name for f in dataclasses.fields(cls)]
        for key in node:
            path = f"{prefix}.{key}".lstrip(".")
            if key not in names:
                raise ConfigError(unknown_key(path, _chosen(cfg)))
            if not OmegaConf.is_missing(node, key) and isinstance(node[key], DictConfig):
                walk(node[key], path)

    walk(cfg, "")


def check_names(cfg: DictConfig, choices: dict[str, Any]) -> None:
    """Raise ConfigError when a file sets a part's `name`, which would ask for one option with another's settings."""
    for part in PARTS:
        option, name = choices[part], cfg[part].get("name")
        if name not in (option, None) and option in options(part):
            raise ConfigError(
                f"{part}.name={name}, but the choice is {part}={option}. Use {part}={name}, or in a recipe's defaults "
                f"`override /{part}: {name}`."
            )


def check_costs(costs: Any, *, drawing: bool) -> None:
    """Raise ConfigError for costs of `ppctl schedule` in another command, and the other way round."""
    if isinstance(costs, Costs) != drawing:
        raise ConfigError(_wrong_costs(f"costs={costs.name}", drawing=drawing))


def _wrong_costs(choice: str, *, drawing: bool) -> str:
    if drawing:
        return f"{choice}: `ppctl schedule` assumes costs, for it knows no model. Use costs=unit and its settings."
    return f"{choice}: such costs are assumed by `ppctl schedule` alone. Use costs=analytic, or leave it out."


def _chosen(cfg: Any) -> dict[str, tuple[str, type]]:
    """Return the option and dataclass of each part of a composed config, as far as it got."""
    found: dict[str, tuple[str, type]] = {part: ("", cls) for part, cls in PLAIN.items()}
    for part in PARTS:
        node = None if part not in cfg or OmegaConf.is_missing(cfg, part) else cfg.get(part)
        if isinstance(node, DictConfig) and dataclasses.is_dataclass(cls := OmegaConf.get_type(node)):
            option = "x".join(str(size) for size in node.values()) if cls is Mesh else str(node.get("name"))
            found[part] = (option, cls)
    return found


def explain(error: Exception, parsed: list[Override]) -> str:
    """Return what is wrong in one line: from the exception's fields where it has them, else from its text."""
    if isinstance(error, MissingConfigException) and "/" in str(error.missing_cfg_file):
        group, _, option = str(error.missing_cfg_file).rpartition("/")
        return wrong_option(group, option, error.options or ()) + _origin(group, parsed)
    for link in (error, error.__cause__, error.__context__):
        if isinstance(link, OmegaConfBaseException) and link.full_key:
            return _explain_key(link, str(link.full_key), parsed)
    text = str(error).strip()
    if isinstance(error, yaml.YAMLError):  # names the file and the line
        return " ".join(text.split())
    return text.partition("\n")[0] + (_origin("", parsed) if isinstance(error, (ValueError, OSError)) else "")


def _explain_key(error: OmegaConfBaseException, key: str, parsed: list[Override]) -> str:
    """Return what is wrong with a setting: there is none such, it has no value, or one of a wrong type."""
    chosen = _chosen(error.parent_node._get_root()) if error.parent_node is not None else {}
    override = _override_of(key, parsed)
    line = str(override.input_line) if override else None
    reason = str(error.msg).partition("\n")[0]
    if (group := sweep_group_of(key)) is not None:
        option = next((str(one.value()) for one in reversed(parsed) if one.key_or_group == group), "ppctl")
        return wrong_sweep_setting(key, line, option)
    if isinstance(error, MissingMandatoryValue):
        part = key.split(".")[0]
        return f"{key} has no value. {part}={chosen[part][0]} needs one: add {key}=..."
    if isinstance(error, (ConfigKeyError, ConfigAttributeError)):
        return unknown_key(key, chosen) + _origin(key, parsed)
    if isinstance(error, (InterpolationResolutionError, GrammarParseError)):
        return f"{line or key}: {reason}."
    if override and override.key_or_group == key:
        return wrong_value(key, line)
    below = next((o.key_or_group for o in parsed if o.key_or_group.startswith(f"{key}.")), None)
    return unknown_key(below, chosen) if below else f"{wrong_value(key)} {reason}.{_origin(key, parsed)}"


def _origin(key: str, parsed: list[Override]) -> str:
    """Return ' (in recipes=x)' if no override on the command line set `key` and a recipe may have, else nothing."""
    recipe = _override_of("recipes", parsed)
    return f" (in {recipe.input_line})" if recipe and not _override_of(key, parsed) else ""


def _override_of(key: str, parsed: list[Override]) -> Override | None:
    """Return the last override of `key` or of what it lies in."""
    return next((o for o in reversed(parsed) if f"{key}.".startswith(f"{o.key_or_group}.")), None)
