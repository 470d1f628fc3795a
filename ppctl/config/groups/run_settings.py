"""The run itself: its length, directory, checkpoints and processes."""

import re
import shlex
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from ppctl.config import field_checks as checks
from ppctl.config.field_checks import Count, FromOne, Natural, PathCheck, Settings, SomePath
from ppctl.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float64")


def _resume(key: str, value: str) -> None:
    if not re.fullmatch(r"[1-9]\d{0,11}", value):
        checks.one_of("auto", "must", "never", "STEP")(key, value)


def _command(key: str, value: str) -> None:
    """Raise ConfigError if a command has no program, or cannot be split into words."""
    try:
        words, why = shlex.split(value), "names no program"
    except ValueError as error:  # an open quote, or a backslash at the end
        words, why = [], f"cannot be split into words: {str(error).lower()}"
    if "\0" in value:
        words, why = [], "contains a character 0"
    if not any(words[:1]):
        use = f"Write a program and its arguments, such as {key}='python tell.py', or {key}=null"
        raise ConfigError(f"{key}={value!r} {why}. {use}.")


@dataclass
class Checkpoint:
    enabled: bool = True  # false: save nothing, as for a benchmark
    every: Count | None = 50  # steps between saves; None: only at the end and on interruption
    keep: Count = 3  # newest checkpoints kept
    keep_every: Count | None = None  # steps between permanent checkpoints; None: no permanent ones
    # action at a failed save: stop training | continue, and try again at the next save
    on_failure: Annotated[str, checks.one_of("stop", "continue")] = "stop"


@dataclass
class Run(Settings):
    """One training run: its steps, its directory and its processes."""

    name: str = "default"
    dir: str = "runs/${run.name}"  # directory of metrics and checkpoints
    num_steps: Count = 200  # optimizer steps
    seed: Natural = 0  # seed of initial weights and data order
    # dtype of compute: float32 | bfloat16 | float64; None: by the devices, float64 to verify
    dtype: Annotated[str, checks.one_of(*DTYPES)] | None = None
    # devices: cpu | cuda | tpu; None: JAX chooses
    platform: Annotated[str, checks.one_of("cpu", "cuda", "tpu")] | None = None
    # share of a GPU's memory that JAX preallocates; None: JAX's default, 0.75
    memory_fraction: checks.SomeShare | None = None
    # directory of compiled programs; auto: ~/.cache/ppctl; None: not kept
    compilation_cache: Annotated[str, PathCheck("auto")] | None = "auto"
    # auto: resume from any checkpoint | must: fail without one | never: fail with one | STEP
    resume: Annotated[str, _resume] = "auto"
    # run directory with the initial parameters, such as the output of `ppctl import`
    start_from: SomePath | None = None
    # same: fail if the checkpoint's model is another function | changed: resume anyway
    resume_with: Annotated[str, checks.one_of("same", "changed")] = "same"
    # action at gradients that are not finite: stop | skip (no update; names the examples)
    on_nonfinite: Annotated[str, checks.one_of("stop", "skip")] = "stop"
    # skipped steps in a row after which on_nonfinite=skip saves and stops
    max_skipped: Count = 10
    log_every: Count = 10  # steps between lines on the terminal; metrics.jsonl has every step
    eval_every: Count | None = 100  # steps between evaluations; None: no evaluation
    eval_at_start: bool = False  # evaluate a new run before its first step too
    # batches of an evaluation; None: 4, or all that are held out
    eval_batches: Count | None = None
    # trackers of metrics: tensorboard, wandb, mlflow
    trackers: list[Annotated[str, checks.one_of("tensorboard", "wandb", "mlflow")]] = field(
        default_factory=lambda: ["tensorboard"]
    )
    profile: str | None = None  # traced steps: N (and the next one), or FIRST-LAST
    timeline: bool = False  # measure the tasks of one step (executor=mpmd): run.dir/timeline/
    # off: one process | explicit: several, by the settings below | auto: by Slurm, ...
    distributed: Annotated[str, checks.one_of("off", "auto", "explicit")] = "off"
    coordinator: str | None = None  # HOST:PORT where process 0 listens and all others find it
    num_processes: Count | None = None  # processes of the whole run
    process_id: Natural | None = None  # 0..num_processes-1; process 0 prints and records
    # command that gets each event of the run as a line of JSON on its standard input
    on_event: Annotated[str, _command] | None = None
    heartbeat_s: Count = 30  # seconds of silence after which a process is lost and the run ends
    # seconds without progress before the slow process is named
    slow_after_s: FromOne = 60.0
    checkpoint: Checkpoint = field(default_factory=Checkpoint)

    EVAL_BATCHES: ClassVar[int] = 4  # evaluation batches by default, if enough are held out

    def check(self) -> None:
        super().check()
        once = list(dict.fromkeys(self.trackers))
        if once != self.trackers:
            text, remedy = (", ".join(names) for names in (self.trackers, once))
            raise ConfigError(f"run.trackers=[{text}] starts one twice. Use [{remedy}].")
        self._check_profile()
        self._check_checkpoints()
        self._check_directory()
        self._check_processes()

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

    @property
    def resume_step(self) -> int | None:
        """The step to resume from, if run.resume is a number."""
        return int(self.resume) if self.resume.isdecimal() else None

    def _check_checkpoints(self) -> None:
        if self.eval_at_start and self.eval_every is None:
            raise ConfigError(
                "run.eval_at_start=true needs evaluations, but run.eval_every=null has none. Use "
                "run.eval_every=100 or the like."
            )
        often, kept = self.checkpoint.every, self.checkpoint.keep_every
        if kept is not None and (often is None or kept % often):
            remedy = "run.checkpoint.every=N" if often is None else f"{-(-kept // often) * often}"
            raise ConfigError(
                f"run.checkpoint.keep_every={kept} is not a multiple of run.checkpoint.every="
                f"{'null' if often is None else often}, so no checkpoint has such a step. Use "
                f"{remedy}."
            )
        back = self.resume_step
        if back is not None and back >= self.num_steps:
            raise ConfigError(
                f"run.resume={back} goes back to a step that is not before run.num_steps="
                f"{self.num_steps}. Use an earlier one, or a larger run.num_steps."
            )

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

    def _check_directory(self) -> None:
        parts = {part.strip() for part in self.name.split("/")}
        if not self.name.isprintable() or parts & {"", ".", ".."}:
            raise ConfigError(
                f"run.name={self.name!r} names no directory below runs/. Use letters and digits, "
                "as in run.name=first, or run.dir=PATH for one elsewhere."
            )
        if not self.dir.strip() or not self.dir.isprintable():
            remedy = "Use a path, as in run.dir=runs/first."
            raise ConfigError(f"run.dir={self.dir!r} is not a directory. {remedy}")

    def _check_processes(self) -> None:
        # 1. settings that run.distributed does not use, or misses
        keys = ("coordinator", "num_processes", "process_id")
        given = [key for key in keys if getattr(self, key) is not None]
        if self.distributed == "off" and given:
            raise ConfigError(
                f"run.{given[0]}={getattr(self, given[0])} needs a run of several processes, but "
                "run.distributed=off. Leave it out, or set run.distributed=explicit and all of "
                "run.coordinator=HOST:PORT run.num_processes=N run.process_id=I."
            )
        missing = [f"run.{key}=..." for key in keys if key not in given]
        if self.distributed == "explicit" and missing:
            raise ConfigError(
                f"run.distributed=explicit needs {' '.join(missing)} too (HOST:PORT of process "
                "0, the number of processes, and the index of this one)."
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
