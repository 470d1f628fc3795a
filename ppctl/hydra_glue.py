"""Hydra's side of the command line: overrides in, a checked `Config` out, and its errors as one line each.

The only importer of hydra and omegaconf. It adds three things to Hydra: `mesh=AxB` of any sizes,
`recipes/` as a group, and sweeps whose jobs are processes, because JAX fixes the number of simulated devices when it
starts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, ValueType
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.errors import HydraException, MissingConfigException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import HydraContext, TaskFunction
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigAttributeError,
    ConfigKeyError,
    GrammarParseError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
)

from ppctl import config as settings
from ppctl.choices import (
    GROUPS,
    MESH_EXAMPLES,
    PARTS,
    ROOT,
    all_settings,
    default_option,
    options,
    schemas,
    shown,
    unknown_key,
    wrong_option,
    wrong_value,
)
from ppctl.config import Config, Mesh
from ppctl.errors import ConfigError

MESH_CHOICE = re.compile(r"mesh/[1-9]\d*x[1-9]\d*(x[1-9]\d*)?")


# --- what is added to Hydra ------------------------------------------------------------------------------------------


class PpctlSource(ConfigSource):
    """The groups `mesh` (any sizes, made when asked for) and `recipes` (the files of the top-level folder)."""

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider, path)
        self.files = FileConfigSource(provider, f"file://{ROOT}")

    @staticmethod
    def scheme() -> str:
        return "ppctl"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path in ("", "mesh") or (_is_recipe(config_path) and self.files.is_group(config_path))

    def is_config(self, config_path: str) -> bool:
        if _is_recipe(config_path):
            return self.files.is_config(config_path)
        return MESH_CHOICE.fullmatch(config_path) is not None

    def load_config(self, config_path: str) -> ConfigResult:
        if _is_recipe(config_path):
            return self.files.load_config(config_path)
        sizes = map(int, config_path.removeprefix("mesh/").split("x"))
        return ConfigResult(self.provider, self.full_path(), OmegaConf.structured(Mesh(*sizes)), {"package": None})

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if _is_recipe(config_path):
            return self.files.list(config_path, results_filter)
        if config_path == "mesh":
            return [] if results_filter == ObjectType.GROUP else [*MESH_EXAMPLES]
        return [] if results_filter == ObjectType.CONFIG else ["mesh", "recipes"]


def _is_recipe(config_path: str) -> bool:
    return config_path.split("/")[0] == "recipes"


class PpctlSearchPath(SearchPathPlugin):
    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("ppctl", "ppctl://")


class ProcessLauncher(Launcher):
    """Runs the jobs of a sweep one after another, each as a process with its own run.dir; a failing one stops none."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        assert isinstance(task_function, Request)
        self.request, self.config = task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        fixed = self._fixed()
        results = []
        for idx, overrides in enumerate(job_overrides, initial_job_idx):
            swept = [o for o in overrides if o not in fixed]
            where = [] if any(o.startswith("run.dir=") for o in swept) else [self._run_dir(swept)]
            print(f"ppctl: job {idx}: {' '.join(swept + where)}", file=sys.stderr, flush=True)
            start = time.monotonic()
            code = run_process([sys.executable, "-m", "ppctl.cli", *self.request.words, *overrides, *where])
            self.request.jobs.append((f"{idx}: {' '.join(swept)}", code, time.monotonic() - start))
            results.append(JobReturn(list(overrides), status=JobStatus.COMPLETED, _return_value=code))
            if code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
                raise SystemExit(code)
        return results

    def _fixed(self) -> set[str]:
        """The overrides that all jobs share, in the words a sweeper uses for them."""
        parsed = OverridesParser.create().parse_overrides(list(self.config.hydra.overrides.task))
        return {f"{o.get_key_element()}={o.get_value_element_as_str()}" for o in parsed if not o.is_sweep_override()}

    def _run_dir(self, swept: list[str]) -> str:
        """The override that puts a job below the sweep's run.dir; odd or long names get a hash."""
        job = ",".join(swept)
        name = re.sub(r"[^\w=.,+-]", "_", job)[:150]
        if name != job:
            name += "-" + hashlib.sha256(job.encode()).hexdigest()[:8]
        return "run.dir='{}'".format(str(Path(self.config.run.dir) / name).replace("'", "\\'"))


def run_process(command: list[str]) -> int:
    """The exit code of `command`, 128 + n after signal n.

    Ctrl-C reaches it from the terminal and SIGTERM is passed on. Either way it is waited for: it may be saving.
    """
    with subprocess.Popen(command) as process:
        received: list[int] = []

        def pass_on(number: int, _frame: types.FrameType | None) -> None:
            received.append(number)
            if number == signal.SIGTERM:
                process.terminate()

        # Handlers, not SIG_IGN: a child started later would inherit an ignored signal.
        before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            code = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    if received:
        return 128 + received[0]
    return code if code >= 0 else 128 - code


def _register() -> None:
    """Makes schemas, source, search path and launcher known to Hydra. Doing it twice changes nothing."""
    store = ConfigStore.instance()
    for name, cls in schemas().items():
        store.store(name=f"schema_{name}", node=cls, provider="ppctl")
    # The parts are missing rather than config.py's defaults, so that a group that was not chosen cannot hide.
    missing: dict[str, Any] = dict.fromkeys(PARTS, MISSING)
    store.store(name="schema_config", node=Config(**missing), provider="ppctl")
    plugins = Plugins.instance()  # imports the hydra_plugins package if some other plugin brought it
    # Hydra takes launchers from importable modules of the hydra_plugins package only.
    package = sys.modules.setdefault("hydra_plugins", types.ModuleType("hydra_plugins"))
    package.__path__ = getattr(package, "__path__", [])
    sys.modules["hydra_plugins.ppctl"] = package.ppctl = sys.modules[__name__]  # type: ignore[attr-defined]
    ProcessLauncher.__module__ = "hydra_plugins.ppctl"
    target = {"_target_": "hydra_plugins.ppctl.ProcessLauncher"}
    store.store(group="hydra/launcher", name="ppctl", node=target, provider="ppctl")
    for plugin in (PpctlSource, PpctlSearchPath, ProcessLauncher):
        plugins.register(plugin)


# --- composing -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Request:
    """Hydra's task function. It only takes the composed config: the command runs outside Hydra, after all checks."""

    words: list[str]  # a sweep's job is these, then its overrides
    composed: DictConfig | None = None
    choices: dict[str, Any] = dataclasses.field(default_factory=dict)
    jobs: list[tuple[str, int, float]] = dataclasses.field(default_factory=list)  # of a sweep: job, exit code, seconds

    def __call__(self, cfg: DictConfig) -> None:
        self.composed, self.choices = cfg, dict(HydraConfig.get().runtime.choices)


def compose(overrides: list[str], flags: list[str], words: list[str]) -> Config | int:
    """The checked request, or an exit code when `flags` ask Hydra for something else (--cfg, --info, --multirun).

    `words` start a sweep's job on a command line. Raises ConfigError for whatever is wrong.
    """
    parsed = [_parse(text) for text in overrides]
    for override in parsed:
        _refuse(override, multirun="--multirun" in flags)
    _register()
    request = Request(words)
    try:
        _run_hydra(request, [*flags, *overrides])
        if request.composed is None:
            return _summary(request.jobs)
        _check_keys(request.composed)
        _check_names(request.composed, request.choices)
        config = OmegaConf.to_object(request.composed)
    except SystemExit as stop:  # a signal ended the sweep
        _summary(request.jobs)
        return int(stop.code or 0)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, OSError) as error:
        # ValueError and OSError: what Hydra raises for a malformed or unreadable file of the user's
        raise ConfigError(_explain(error, parsed)) from error
    assert isinstance(config, Config)
    settings.check(config)
    return config


def _run_hydra(request: Request, argv: list[str]) -> None:
    with _as_if_typed(argv):
        hydra.main(config_path=str(ROOT / "conf"), config_name="config", version_base="1.3")(request)()


@contextmanager
def _as_if_typed(argv: list[str]) -> Iterator[None]:
    """Hydra reads sys.argv, and hands exceptions on only when HYDRA_FULL_ERROR is set."""
    before, full = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = ["ppctl", *argv], "1"
    try:
        yield
    finally:
        sys.argv = before
        os.environ.pop("HYDRA_FULL_ERROR")
        if full is not None:
            os.environ["HYDRA_FULL_ERROR"] = full


def _summary(jobs: list[tuple[str, int, float]]) -> int:
    """1 if a job failed, else 0; prints one line for each job."""
    for job, code, seconds in jobs:
        print(
            f"ppctl: {'done' if code == 0 else f'exit code {code}':>12}  {seconds:7.1f} s  job {job}", file=sys.stderr
        )
    return int(any(code for _, code, _ in jobs))


def completions(line: str) -> None:
    """Prints for bash what may follow `line`, which starts with the program's name and has no command."""
    _register()
    os.environ["COMP_LINE"] = line
    # A half-typed line is often wrong, and the prompt is no place for an error.
    with suppress(HydraException, OmegaConfBaseException, ValueError, SystemExit):
        _run_hydra(Request([]), ["--shell-completion", "query=bash"])


def completion_script() -> None:
    """Prints what bash evaluates to complete ppctl's command lines."""
    _register()
    _run_hydra(Request([]), ["--shell-completion", "install=bash"])


# --- faults, one line each -------------------------------------------------------------------------------------------


def _parse(text: str) -> Override:
    """One override as Hydra reads it; ConfigError if it cannot."""
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


def _refuse(override: Override, *, multirun: bool) -> None:
    """ConfigError for an override that Hydra would take, but that ppctl cannot serve or can explain better."""
    key, line = override.key_or_group, str(override.input_line)
    group = key.split(".")[0]
    if override.is_delete():
        raise ConfigError(f"{line}: nothing can be removed. Give {key} another value instead.")
    if line.startswith("+") and (key in GROUPS or key in all_settings()):
        raise ConfigError(f"{line}: {key} is there already. Drop the +: {line.lstrip('+')}")
    if override.is_sweep_override() and not multirun:
        raise ConfigError(
            f"{line} gives several values. Add --multirun for a run of each, or quote the value if it is one: "
            f"'{key}=\"a,b\"'."
        )
    if override.is_sweep_override() and not override.is_discrete_sweep():
        raise ConfigError(f"{line}: a sweep over {key} needs a list of values: {key}=a,b.")
    if key in GROUPS:
        for value in _values(override):
            if not isinstance(value, str) and not (isinstance(value, dict) and key in PARTS):
                raise ConfigError(wrong_option(key, shown(value), options(key)))
    if group in PARTS and key == f"{group}.name":
        raise ConfigError(f"{line}: the choice of {group} sets its name. Use {line.replace('.name', '', 1)}.")
    if key.replace("/", ".").startswith("hydra.launcher"):
        raise ConfigError(f"{line}: a sweep has one launcher, because each of its jobs must be a process of its own.")


def _values(override: Override) -> list[Any]:
    """The value, or each value of a sweep that lists them."""
    if not override.is_sweep_override():
        return [override.value()]
    if override.value_type == ValueType.GLOB_CHOICE_SWEEP:
        return []  # names options that there are
    return [_parse(f"{override.key_or_group}={text}").value() for text in override.sweep_string_iterator()]


def _check_keys(cfg: DictConfig) -> None:
    """ConfigError for a key that its part does not have; Hydra lets `+key=1` slip through."""

    def walk(node: DictConfig, prefix: str) -> None:
        cls = OmegaConf.get_type(node)
        if not dataclasses.is_dataclass(cls):
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


def _check_names(cfg: DictConfig, choices: dict[str, Any]) -> None:
    """ConfigError when a file sets a part's `name`, which would ask for one option with another's settings."""
    for part in PARTS:
        option, name = choices[part], cfg[part].get("name")
        if name not in (option, None) and option in options(part):
            raise ConfigError(
                f"{part}.name={name}, but the choice is {part}={option}. Use {part}={name}, or in a recipe's defaults "
                f"`override /{part}: {name}`."
            )


def _chosen(cfg: Any) -> dict[str, tuple[str, type]]:
    """The option and dataclass of each part of a composed config, as far as it got."""
    found: dict[str, tuple[str, type]] = {"run": ("", settings.Run)}
    for part in PARTS:
        node = None if OmegaConf.is_missing(cfg, part) else cfg.get(part)
        if isinstance(node, DictConfig) and dataclasses.is_dataclass(cls := OmegaConf.get_type(node)):
            option = "x".join(str(size) for size in node.values()) if cls is Mesh else str(node.get("name"))
            found[part] = (option, cls)
    return found


def _explain(error: Exception, parsed: list[Override]) -> str:
    """What is wrong in one line: from the exception's fields where it has them, else from its text."""
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
    """What is wrong with the setting `key`: there is none such, it has no value, or the value is of a wrong type."""
    chosen = _chosen(error.parent_node._get_root()) if error.parent_node is not None else {}
    override = _override_of(key, parsed)
    line = str(override.input_line) if override else None
    reason = str(error.msg).partition("\n")[0]
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
    """' (in recipes=x)' if no override on the command line set `key` and a recipe may have, else nothing."""
    recipe = _override_of("recipes", parsed)
    return f" (in {recipe.input_line})" if recipe and not _override_of(key, parsed) else ""


def _override_of(key: str, parsed: list[Override]) -> Override | None:
    """The last override of `key` or of what it lies in."""
    return next((o for o in reversed(parsed) if f"{key}.".startswith(f"{o.key_or_group}.")), None)
