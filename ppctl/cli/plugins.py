"""What is added to Hydra: `mesh=AxB` of any sizes, `recipes/` as a group, and sweeps that are only composed by it."""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys
import types
from collections.abc import Callable
from typing import Any

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict, read_write

from ppctl.cli.choices import MESH_EXAMPLES, PARTS, schemas
from ppctl.cli.launchers import LAUNCHERS
from ppctl.config import Config, Mesh
from ppctl.config.files import ROOT
from ppctl.config.sweep import Search
from ppctl.errors import ConfigError
from ppctl.launch.sweep.jobs import Choices, Span

MESH_CHOICE = re.compile(r"mesh/[1-9]\d*x[1-9]\d*(x[1-9]\d*)?")


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


@dataclasses.dataclass
class Asked:
    """One combination of a sweep's values, composed."""

    overrides: list[str]  # all of them
    swept: list[Override]  # those that the sweep varies, with the value of this combination
    composed: DictConfig
    choices: dict[str, Any]


@dataclasses.dataclass
class Searched:
    """What a search chooses from."""

    space: dict[str, Choices | Span]
    fixed: list[str]  # overrides that all its jobs share
    search: Search
    compose: Callable[[list[str]], Asked]  # of all overrides of a job


@dataclasses.dataclass
class Request:
    """Hydra's task function. It only takes the composed config: the command runs outside Hydra, after all checks."""

    composed: DictConfig | None = None
    choices: dict[str, Any] = dataclasses.field(default_factory=dict)
    sweep: DictConfig | None = None  # what all jobs of a sweep share, Hydra's own settings included
    jobs: list[Asked] = dataclasses.field(default_factory=list)
    searched: Searched | None = None  # jobs are chosen one after another

    def __call__(self, cfg: DictConfig) -> None:
        self.composed, self.choices = cfg, dict(HydraConfig.get().runtime.choices)


class Composer(Sweeper):
    """Composes jobs of a sweep, and like a command runs none: nothing is written before all checks are done."""

    def __init__(self, params: dict[str, str] | None = None) -> None:
        self.params = params or {}  # as overrides, for a file that describes a sweep

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        assert isinstance(task_function, Request)
        self.request, self.loader = task_function, hydra_context.config_loader
        self.request.sweep = self.common = config

    def parse(self, arguments: list[str]) -> dict[str, Override]:
        """The last override of each key; ConfigError where none has several values."""
        self.parser = OverridesParser.create(config_loader=self.loader)
        said = [f"{key}={value}" for key, value in self.params.items()] + arguments
        by_key = {override.get_key_element(): override for override in self.parser.parse_overrides(said)}
        self.varied = {key for key, override in by_key.items() if override.is_sweep_override()}
        if not self.varied:
            raise ConfigError(
                "--multirun runs every combination of KEY=A,B,..., but nothing here has several values. "
                "Give some, or leave it out."
            )
        return by_key

    def compose(self, overrides: list[str]) -> Asked:
        composed = self.loader.load_sweep_config(self.common, overrides)
        choices = dict(composed.hydra.runtime.choices)
        with read_write(composed), open_dict(composed):
            del composed["hydra"]
        parsed = self.parser.parse_overrides(overrides)
        swept = [one for one in parsed if one.get_key_element() in self.varied]
        return Asked(overrides, swept, composed, choices)


class Combinations(Composer):
    """hydra/sweeper=ppctl: a job for every combination of values."""

    def sweep(self, arguments: list[str]) -> None:
        by_key = self.parse(arguments)
        for words in itertools.product(*(_each(key, override) for key, override in by_key.items())):
            self.request.jobs.append(self.compose(list(words)))


class Trials(Composer):
    """hydra/sweeper=optuna: jobs whose values are chosen one after another."""

    def __init__(self, params: dict[str, str] | None = None, **settings: Any) -> None:
        super().__init__(params)
        self.search = Search(**settings)

    def sweep(self, arguments: list[str]) -> None:
        by_key = self.parse(arguments)
        fixed = [_one(key, override) for key, override in by_key.items() if key not in self.varied]
        space = {key: _range(by_key[key]) for key in by_key if key in self.varied}
        self.request.searched = Searched(space, fixed, self.search, self.compose)


def _each(key: str, override: Override) -> list[str]:
    """The override for each of its values."""
    if not override.is_sweep_override():
        return [_one(key, override)]
    if not override.is_discrete_sweep():
        raise ConfigError(
            f"{override.input_line}: a sweep over {key} needs a list of values: {key}=a,b. Or let values be chosen: "
            "hydra/sweeper=optuna."
        )
    return [f"{key}={value}" for value in override.sweep_string_iterator()]


def _one(key: str, override: Override) -> str:
    return f"{key}={override.get_value_element_as_str()}"


def _range(override: Override) -> Choices | Span:
    """The values of `a,b`, `choice(a,b)`, `range(1,9)`, `interval(0,1)` and `tag(log,interval(0.1,1))`."""
    values = override.value()
    if isinstance(values, IntervalSweep):
        assert values.start is not None
        assert values.end is not None
        return Span(values.start, values.end, is_log="log" in values.tags)
    texts = tuple(override.sweep_string_iterator())
    if not isinstance(values, RangeSweep) or len(texts) < 2:
        return Choices(texts)
    kind = int if all(isinstance(each, int) for each in (values.start, values.step)) else float
    return Span(kind(texts[0]), kind(texts[-1]), step=kind(values.step), is_log="log" in values.tags)


@dataclasses.dataclass
class _Optuna(Search):
    _target_: str = "hydra_plugins.ppctl.Trials"


def register() -> None:
    """Makes schemas, source, search path and launcher known to Hydra. Twice is once."""
    store = ConfigStore.instance()
    for name, cls in schemas().items():
        store.store(name=f"schema_{name}", node=cls, provider="ppctl")
    # The parts are missing rather than config's defaults, so that a group that was not chosen cannot hide.
    missing: dict[str, Any] = dict.fromkeys(PARTS, MISSING)
    store.store(name="schema_config", node=Config(**missing), provider="ppctl")
    plugins = Plugins.instance()  # imports the hydra_plugins package if some other plugin brought it
    # Hydra takes sweepers from importable modules of the hydra_plugins package only.
    package = sys.modules.setdefault("hydra_plugins", types.ModuleType("hydra_plugins"))
    package.__path__ = getattr(package, "__path__", [])
    sys.modules["hydra_plugins.ppctl"] = package.ppctl = sys.modules[__name__]  # type: ignore[attr-defined]
    for sweeper in (Combinations, Trials):
        sweeper.__module__ = "hydra_plugins.ppctl"
    target = {"_target_": "hydra_plugins.ppctl.Combinations", "params": None}
    store.store(group="hydra/sweeper", name="ppctl", node=target, provider="ppctl")
    store.store(group="hydra/sweeper", name="optuna", node=_Optuna, provider="ppctl")
    for name, launcher in LAUNCHERS.items():
        store.store(group="hydra/launcher", name=name, node=launcher, provider="ppctl")
    for plugin in (PpctlSource, PpctlSearchPath, Combinations, Trials):
        plugins.register(plugin)
