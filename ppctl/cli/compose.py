"""Compose overrides with Hydra into a checked `Config`.

Added to Hydra: `mesh=AxB` with any sizes, the group `recipes`, and the schemas of settings. Hydra
only composes: `ppctl.cli.multirun` reads `hydra/launcher` and `hydra/sweeper` as settings.
"""

import dataclasses
import functools
import re
import typing
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import yaml
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from ppctl import config as settings
from ppctl.cli import fault_messages as faults
from ppctl.cli.choices import DRAWN, MESH_EXAMPLES, PARTS, SWEEP_PARTS, default_option, schemas
from ppctl.cli.text_settings import TextSource, as_typed
from ppctl.config import Config, Costs, Mesh, ScheduleConfig
from ppctl.config.config_dirs import ROOT
from ppctl.config.schedule_from_config import settled
from ppctl.errors import ConfigError
from ppctl.schedule.mesh_axes import AXES, TEXT_AXES

CONFIG = "config"  # conf/config.yaml, where every composition starts
USUAL_RANKS = int(default_option("mesh").split("x")[TEXT_AXES.index("pp")])


class Composed(NamedTuple):
    """A composed config."""

    config: DictConfig  # settings without the node `hydra`
    choices: dict[str, Any]  # option of each group
    stated: Set[str]  # keys of the overrides as typed


def compose(overrides: list[str], config_dir: str | None = None) -> Config:
    """Return the checked config of a request. ConfigError for any fault."""
    with composing(overrides, config_dir) as loader:
        return checked(_composed(loader, overrides))


def compose_drawing(overrides: list[str], config_dir: str | None = None) -> ScheduleConfig:
    """Return the checked config of a request of `ppctl schedule`. ConfigError for any fault.

    Only mesh, schedule and costs are converted and checked: a recipe may leave other parts
    incomplete.
    """
    with composing(overrides, config_dir, drawing=True) as loader:
        config = ScheduleConfig(**_parts(_composed(loader, overrides), DRAWN))
    config.check()
    return config


def _composed(loader: ConfigLoader, overrides: list[str]) -> Composed:
    words = [*map(as_typed, overrides)]
    return without_hydra(loader.load_configuration(CONFIG, words, RunMode.RUN))


def checked(composed: Composed) -> Config:
    """Return a composed config as checked dataclasses. ConfigError for any fault."""
    parts = _parts(composed, composed.config)
    if dataclasses.replace(parts["costs"], expert_imbalance=1.0) != Costs():
        raise ConfigError(f"costs of a recipe: {faults.ASSUMED}")
    config = Config(**parts)
    settings.check(config)
    if config.run.start_from is not None:
        from ppctl.training.run.kept_tokenizer import with_start_tokenizer  # imports JAX

        config.data = with_start_tokenizer(config.run.start_from, config.data)
    return config


def _parts(composed: Composed, names: Iterable[Any]) -> dict[str, Any]:
    faults.check_keys(composed.config)
    faults.check_names(composed.config, composed.choices)
    parts: dict[str, Any] = {n: OmegaConf.to_object(composed.config[n]) for n in names}
    mesh, stated = parts["mesh"], composed.stated
    if mesh.ranks and "mesh" not in stated:  # the sizes of a recipe, or of mesh=2x4
        sizes = dict.fromkeys(AXES, 1) | {"pp": len(mesh.by_rank)}
        for axis in (axis for axis in AXES if f"mesh.{axis}" not in stated):
            setattr(mesh, axis, sizes[axis])
    is_free = not stated & {"mesh", "mesh.pp"} and not mesh.ranks and mesh.pp == USUAL_RANKS
    parts["schedule"], parts["mesh"] = settled(parts["schedule"], mesh, is_free=is_free)
    return parts


def without_hydra(composed: DictConfig) -> Composed:
    """Return a composed config without the node `hydra`, with the option of each group."""
    choices = dict(composed.hydra.runtime.choices)
    words = OmegaConf.to_container(composed.hydra.overrides.task)  # overrides as typed
    keys = {str(word).lstrip("+").partition("=")[0] for word in words or ()}
    with read_write(composed), open_dict(composed):
        del composed["hydra"]
    return Composed(composed, choices, keys)


@contextmanager
def composing(
    overrides: list[str], config_dir: str | None, *, multirun: bool = False, drawing: bool = False
) -> Iterator[ConfigLoader]:
    """Yield Hydra's loader for checked overrides; Hydra's errors in the body become ConfigErrors.

    The loader reads conf/, recipes/ and config_dir, the user's directory.
    """
    parsed = [faults.parse_override(text) for text in overrides]
    for override in parsed:
        faults.refuse(override, multirun=multirun, drawing=drawing)
    _register()
    TextSource.chosen = options_of(parsed)
    PpctlSearchPath.config_dir = None if config_dir is None else Path(config_dir)
    try:
        with initialize_config_dir(str(ROOT / "conf"), job_name="ppctl", version_base="1.3"):
            yield GlobalHydra.instance().config_loader()
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, *faults.OF_FILES) as error:
        raise ConfigError(faults.explain(error, parsed)) from error
    finally:
        PpctlSearchPath.config_dir, TextSource.chosen = None, {}


def options_of(parsed: Iterable[Override]) -> dict[str, str]:
    """Return the options that overrides choose, by group."""
    values = {each.key_or_group: each.value() for each in parsed if not each.is_sweep_override()}
    return {key: each for key, each in values.items() if key in PARTS and isinstance(each, str)}


# --- additions to Hydra -------------------------------------------------------------------------

MESH_CHOICE = re.compile(rf"mesh/[1-9]\d*(x[1-9]\d*){{1,{len(TEXT_AXES) - 1}}}")


class MeshSource(ConfigSource):
    """Hydra's source of the group `mesh`: makes the config of `mesh=AxB` for any sizes."""

    @staticmethod
    def scheme() -> str:
        return "ppctl"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return config_path in ("", "mesh")

    def is_config(self, config_path: str) -> bool:
        return MESH_CHOICE.fullmatch(config_path) is not None

    def load_config(self, config_path: str) -> ConfigResult:
        sizes = map(int, config_path.removeprefix("mesh/").split("x"))
        mesh = OmegaConf.structured(Mesh(**dict(zip(TEXT_AXES, sizes, strict=False))))
        return ConfigResult(self.provider, self.full_path(), mesh, {"package": None})

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if config_path == "mesh":
            return [] if results_filter == ObjectType.GROUP else [*MESH_EXAMPLES]
        return [] if results_filter == ObjectType.CONFIG else ["mesh"]


class PpctlSearchPath(SearchPathPlugin):
    """Hydra's search path: conf/, `MeshSource`, the parent of recipes/, then --config-dir."""

    config_dir: ClassVar[Path | None] = None  # set on the class: Hydra makes the instances

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("ppctl", "ppctl://")
        search_path.append("recipes", f"text://{ROOT}")
        if self.config_dir is not None:
            search_path.append("command-line", f"text://{self.config_dir.absolute()}")


@functools.cache
def _register() -> None:
    """Register schemas, sources, search path, launchers and sweepers in Hydra, once per process."""
    store = ConfigStore.instance()
    for name, cls in schemas().items():
        store.store(name=f"schema_{name}", node=cls, provider="ppctl")
    store.store(name="schema_config", node=_config_schema(), provider="ppctl")
    for part, options in SWEEP_PARTS.items():
        for name, cls in options.items():
            store.store(group=part.replace(".", "/"), name=name, node=cls, provider="ppctl")
    for plugin in (MeshSource, TextSource, PpctlSearchPath):
        Plugins.instance().register(plugin)


@functools.cache  # the same class for every registration
def _config_schema() -> type:
    """Return `Config` for OmegaConf: a part with options holds any class and has no default."""
    field = dataclasses.field
    parts = [
        (n, Any, field(default=MISSING)) if n in PARTS else (n, hint, field(default_factory=hint))
        for n, hint in typing.get_type_hints(Config).items()
    ]
    return dataclasses.make_dataclass("Config", parts)
