"""What is added to Hydra: `mesh=AxB` of any sizes, `recipes/` as a group, and sweeps whose jobs are processes.

Processes, because JAX fixes the number of simulated devices when it starts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
import signal
import subprocess
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import HydraContext, TaskFunction
from omegaconf import MISSING, DictConfig, OmegaConf

from ppctl.cli.choices import MESH_EXAMPLES, PARTS, schemas
from ppctl.config import Config, Mesh
from ppctl.config.files import ROOT

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
class Request:
    """Hydra's task function. It only takes the composed config: the command runs outside Hydra, after all checks."""

    words: list[str]  # a sweep's job is these, then its overrides
    composed: DictConfig | None = None
    choices: dict[str, Any] = dataclasses.field(default_factory=dict)
    jobs: list[tuple[str, int, float]] = dataclasses.field(default_factory=list)  # of a sweep: job, exit code, seconds

    def __call__(self, cfg: DictConfig) -> None:
        self.composed, self.choices = cfg, dict(HydraConfig.get().runtime.choices)


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


def register() -> None:
    """Makes schemas, source, search path and launcher known to Hydra. Twice is once."""
    store = ConfigStore.instance()
    for name, cls in schemas().items():
        store.store(name=f"schema_{name}", node=cls, provider="ppctl")
    # The parts are missing rather than config's defaults, so that a group that was not chosen cannot hide.
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
