"""The run itself: its length, directory, checkpoints and processes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

from ppctl.config.field_checks import above_zero, at_least, choice, fraction
from ppctl.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float64")


@dataclass
class Checkpoint:
    enabled: bool = True  # false: nothing is saved, as for a benchmark
    every: int | None = 50  # steps; None: only at the end and on interruption
    keep: int = 3  # newest checkpoints kept
    on_failure: str = "stop"  # of a save: stop training | continue, and try again at the next save

    ON_FAILURE: ClassVar[tuple[str, ...]] = ("stop", "continue")

    def check(self) -> None:
        choice("run.checkpoint.on_failure", self.on_failure, self.ON_FAILURE)
        at_least("run.checkpoint.every", self.every, 1)
        at_least("run.checkpoint.keep", self.keep, 1)


@dataclass
class Run:
    """One training run: its steps, its directory and its processes."""

    name: str = "default"
    dir: str = "runs/${run.name}"  # metrics and checkpoints
    num_steps: int = 200  # optimizer steps
    seed: int = 0  # of initial weights and data order
    # of compute: float32 | bfloat16 | float64; None: float64 to verify, else float32
    dtype: str | None = None
    platform: str | None = None  # cpu | cuda | tpu; None: JAX chooses
    memory_fraction: float | None = None  # of a GPU, preallocated by JAX; None: its default, 0.75
    # directory of compiled programs; auto: ~/.cache/ppctl; None: not kept
    compilation_cache: str | None = "auto"
    # auto: resume if there is a checkpoint | must: fail without | never: fail with one
    resume: str = "auto"
    start_from: str | None = None  # run directory, as of `ppctl import`, with first parameters
    # same: fail if the checkpoint's model computes something else | changed: resume anyway
    resume_with: str = "same"
    log_every: int = 10  # steps between lines on the terminal; metrics.jsonl has every step
    eval_every: int | None = 100  # steps; None: no evaluation
    eval_batches: int | None = None  # of data.batch_size each; None: 4, or as many as are held out
    # of metrics: tensorboard, wandb, mlflow
    trackers: Any = field(default_factory=lambda: ["tensorboard"])
    profile: str | None = None  # traced steps: N (and the next one), or FIRST-LAST
    timeline: bool = False  # measure the tasks of one step (executor=mpmd): run.dir/timeline/
    # off: one process | explicit: several, by the settings below | auto: by Slurm, ...
    distributed: str = "off"
    coordinator: str | None = None  # HOST:PORT where process 0 listens and all others find it
    num_processes: int | None = None  # of the whole run
    process_id: int | None = None  # 0..num_processes-1; process 0 prints and records
    heartbeat_s: int = 30  # seconds of silence after which a process is lost and the run ends
    slow_after_s: float = 60.0  # seconds without progress before the slow process is named
    checkpoint: Checkpoint = field(default_factory=Checkpoint)

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
        self._check_profile()
        self._check_trackers()
        self._check_directory()
        self._check_processes()
        self.checkpoint.check()

    @property
    def profile_steps(self) -> range | None:
        """The steps that a profiler traces.

        >>> Run(profile="10").profile_steps, Run(profile="3-9").profile_steps
        (range(10, 12), range(3, 10))
        """
        if self.profile is None:
            return None
        first, _, last = self.profile.partition("-")
        return range(int(first), int(last) + 1 if last else int(first) + 2)

    def _check_profile(self) -> None:
        if self.profile is None:
            return
        if re.fullmatch(r"\d{1,9}(-\d{1,9})?", self.profile) is None or not self.profile_steps:
            remedy = "Use run.profile=10, or run.profile=10-19 for ten steps."
            raise ConfigError(f"run.profile={self.profile} names no steps. {remedy}")
        assert self.profile_steps is not None
        if self.profile_steps.stop > self.num_steps:
            raise ConfigError(
                f"run.profile={self.profile} traces steps to {self.profile_steps.stop - 1}, past "
                f"the last step (run.num_steps={self.num_steps}, the first is 0). Use earlier "
                "steps, or a larger run.num_steps."
            )

    def _check_trackers(self) -> None:
        trackers: Any = self.trackers
        names = cast("list[object]", trackers) if isinstance(trackers, list) else [None]
        if any(name not in self.TRACKERS for name in names):
            raise ConfigError(
                f"run.trackers={trackers} is not a list of {', '.join(self.TRACKERS)}. Use "
                "run.trackers=[tensorboard,wandb], or run.trackers=[] for none."
            )
        if len(set(names)) < len(names):
            raise ConfigError(f"run.trackers={trackers} names one twice. Name each once.")

    def _check_directory(self) -> None:
        parts = {part.strip() for part in self.name.split("/")}
        if not self.name.isprintable() or parts & {"", ".", ".."}:
            raise ConfigError(
                f"run.name={self.name!r} names no directory below runs/. Use letters and digits, "
                "as in run.name=first, or run.dir=PATH for one elsewhere."
            )
        if not self.dir.strip() or not self.dir.isprintable():
            remedy = "Use a path, as in run.dir=runs/first."
            raise ConfigError(f"run.dir={self.dir!r} is no directory. {remedy}")

    def _check_processes(self) -> None:
        choice("run.distributed", self.distributed, self.DISTRIBUTED)
        at_least("run.num_processes", self.num_processes, 1)
        at_least("run.process_id", self.process_id, 0)
        for key in ("heartbeat_s", "slow_after_s"):
            at_least(f"run.{key}", getattr(self, key), 1)
        # 1. settings that run.distributed does not use, or misses
        keys = ("coordinator", "num_processes", "process_id")
        given = [key for key in keys if getattr(self, key) is not None]
        if self.distributed == "off" and given:
            raise ConfigError(
                f"run.{given[0]}={getattr(self, given[0])} is of a run of several processes, but "
                "run.distributed=off. Use run.distributed=explicit, or leave it out."
            )
        missing = [f"run.{key}=..." for key in keys if key not in given]
        if self.distributed == "explicit" and missing:
            raise ConfigError(
                f"run.distributed=explicit needs {' '.join(missing)} too (HOST:PORT of process "
                "0, the number of processes, and which of them this is)."
            )
        # 2. their values
        number, own = self.num_processes, self.process_id
        if number is not None and own is not None and own >= number:
            raise ConfigError(
                f"run.process_id={own} is not one of the {number} processes of "
                f"run.num_processes={number}. Use 0 to {number - 1}."
            )
        if self.coordinator is not None:
            host, _, port = self.coordinator.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                key = f"run.coordinator={self.coordinator}"
                raise ConfigError(f"{key} is not HOST:PORT, as in run.coordinator=10.0.0.1:8476.")
