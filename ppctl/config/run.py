"""The run itself: its length, directory, checkpoints and processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

from ppctl.config.checks import above_zero, at_least, choice, fraction
from ppctl.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float64")


@dataclass
class Checkpoint:
    enabled: bool = True  # false: nothing is ever saved, not at the end either, as a benchmark wants it
    every: int | None = 50  # steps; None: only at the end and on interruption
    keep: int = 3  # newest checkpoints kept
    on_failure: str = "stop"  # of a save: stop training | continue, and try again at the next save
    timeout_s: int = 300  # after which a save has failed; where one process cannot write, the others wait so long

    ON_FAILURE: ClassVar[tuple[str, ...]] = ("stop", "continue")

    def check(self) -> None:
        choice("run.checkpoint.on_failure", self.on_failure, self.ON_FAILURE)
        at_least("run.checkpoint.timeout_s", self.timeout_s, 1)
        at_least("run.checkpoint.every", self.every, 1)
        at_least("run.checkpoint.keep", self.keep, 1)


@dataclass
class Profile:
    start: int | None = None  # first step traced; None: no trace
    num_steps: int = 2

    def check(self) -> None:
        at_least("run.profile.start", self.start, 0)
        at_least("run.profile.num_steps", self.num_steps, 1)


@dataclass
class Run:
    """One training run: its steps, its directory and its processes."""

    name: str = "default"
    dir: str = "runs/${run.name}"  # metrics and checkpoints
    num_steps: int = 200  # optimizer steps
    seed: int = 0  # of initial weights and data order
    dtype: str | None = None  # of compute: float32 | bfloat16 | float64; None: float64 to verify, else float32
    platform: str | None = None  # cpu | cuda | tpu; None: JAX chooses
    memory_fraction: float | None = None  # of a GPU's memory that JAX takes when it starts; None: JAX's default, 0.75
    compilation_cache: str | None = "auto"  # DIR where compiled programs are kept; auto: ~/.cache/ppctl; None: nowhere
    resume: str = "auto"  # auto: go on if a checkpoint is there | must: fail if none | never: fail if one is there
    start_from: str | None = None  # a run directory, as `ppctl import` writes one: start with its parameters
    resume_with: str = "same"  # model: same (fail if the checkpoint's computes something else) | changed: go on anyway
    log_every: int = 10  # steps between lines on the terminal; metrics.jsonl has every step
    eval_every: int | None = 100  # steps; None: no evaluation
    eval_batches: int | None = None  # of data.batch_size each; None: 4, or as many as are held out
    trackers: Any = field(default_factory=lambda: ["tensorboard"])  # where metrics go too: tensorboard, wandb, mlflow
    tensorboard: bool = True  # false: TensorBoard is left out of run.trackers
    show_placement: bool = False  # print where each parameter lies before step 1: layer, rank, devices, sharding
    timeline: bool = False  # measure when each task of one step runs (executor=mpmd): run.dir/timeline/
    distributed: str = "off"  # off: one process | explicit: several, by the settings below | auto: by Slurm, ...
    coordinator: str | None = None  # HOST:PORT where process 0 listens and all others find it
    num_processes: int | None = None  # of the whole run
    process_id: int | None = None  # of this process, 0..num_processes-1; process 0 leads: it prints and records
    join_s: int = 120  # seconds in which all processes must have started
    heartbeat_s: int = 30  # seconds without a sign of life after which a process counts as lost and the run ends
    slow_after_s: float = 60.0  # seconds without progress after which the process that is behind is named
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    profile: Profile = field(default_factory=Profile)

    EVAL_BATCHES: ClassVar[int] = 4  # of eval_batches=None, where so many are held out
    RESUME: ClassVar[tuple[str, ...]] = ("auto", "must", "never")
    RESUME_WITH: ClassVar[tuple[str, ...]] = ("same", "changed")
    PLATFORMS: ClassVar[tuple[str, ...]] = ("cpu", "cuda", "tpu")
    TRACKERS: ClassVar[tuple[str, ...]] = ("tensorboard", "wandb", "mlflow")
    DISTRIBUTED: ClassVar[tuple[str, ...]] = ("off", "auto", "explicit")

    def check(self) -> None:
        for key in ("num_steps", "log_every", "eval_every", "eval_batches"):
            at_least(f"run.{key}", getattr(self, key), 1)
        at_least("run.seed", self.seed, 0)
        if self.dtype is not None:
            choice("run.dtype", self.dtype, DTYPES)
        choice("run.resume", self.resume, self.RESUME)
        choice("run.resume_with", self.resume_with, self.RESUME_WITH)
        if self.platform is not None:
            choice("run.platform", self.platform, self.PLATFORMS)
        if self.memory_fraction is not None:
            above_zero("run.memory_fraction", self.memory_fraction)
            fraction("run.memory_fraction", self.memory_fraction)
        self._check_trackers()
        self._check_directory()
        self._check_processes()
        self.checkpoint.check()
        self.profile.check()

    @property
    def other_trackers(self) -> tuple[str, ...]:
        """Those besides TensorBoard."""
        return tuple(name for name in self.trackers if name != "tensorboard")

    @property
    def writes_tensorboard(self) -> bool:
        return self.tensorboard and "tensorboard" in self.trackers

    def _check_trackers(self) -> None:
        trackers: Any = self.trackers
        names = cast("list[object]", trackers) if isinstance(trackers, list) else [trackers]
        if not isinstance(trackers, list) or any(name not in self.TRACKERS for name in names):
            raise ConfigError(
                f"run.trackers={trackers} is not a list of {', '.join(self.TRACKERS)}. Use "
                "run.trackers=[tensorboard,wandb], or run.trackers=[] for none."
            )
        if len(set(names)) < len(names):
            raise ConfigError(f"run.trackers={trackers} names one twice. Name each once.")

    def _check_directory(self) -> None:
        parts = self.name.split("/")
        if not self.name.isprintable() or not {"", ".", ".."}.isdisjoint(part.strip() for part in parts):
            raise ConfigError(
                f"run.name={self.name!r} names no directory below runs/. Use letters and digits, as in run.name=first, "
                "or run.dir=PATH for one elsewhere."
            )
        if not self.dir.strip() or not self.dir.isprintable():
            raise ConfigError(f"run.dir={self.dir!r} is no directory. Use a path, as in run.dir=runs/first.")

    def _check_processes(self) -> None:
        choice("run.distributed", self.distributed, self.DISTRIBUTED)
        at_least("run.num_processes", self.num_processes, 1)
        at_least("run.process_id", self.process_id, 0)
        for key in ("join_s", "heartbeat_s", "slow_after_s"):
            at_least(f"run.{key}", getattr(self, key), 1)
        keys = ("coordinator", "num_processes", "process_id")
        given = [key for key in keys if getattr(self, key) is not None]
        if self.distributed == "off" and given:
            raise ConfigError(
                f"run.{given[0]}={getattr(self, given[0])} is of a run of several processes, but run.distributed=off. "
                "Use run.distributed=explicit, or leave it out."
            )
        missing = [f"run.{key}=..." for key in keys if key not in given]
        if self.distributed == "explicit" and missing:
            raise ConfigError(
                f"run.distributed=explicit needs {' '.join(missing)} too (HOST:PORT of process 0, the number of "
                "processes, and which of them this is)."
            )
        if self.num_processes is not None and self.process_id is not None and self.process_id >= self.num_processes:
            raise ConfigError(
                f"run.process_id={self.process_id} is not one of the {self.num_processes} processes of "
                f"run.num_processes={self.num_processes}. Use 0 to {self.num_processes - 1}."
            )
        if self.coordinator is not None:
            host, _, port = self.coordinator.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise ConfigError(
                    f"run.coordinator={self.coordinator} is not HOST:PORT, as in run.coordinator=10.0.0.1:8476."
                )
