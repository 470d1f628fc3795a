"""Executors, optimizer, data sets, and the run itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from ppctl.config.checks import at_least, choice, dotted, fraction
from ppctl.errors import ConfigError
from ppctl.schedule.remat import Remat

DTYPES = ("float32", "bfloat16", "float64")


@dataclass
class Reference:
    """The un-pipelined model: gradient accumulation over the microbatches in one program, on one device."""

    name: str = "reference"
    remat: str = "none"  # none | layer | full: what the backward recomputes
    unroll: int = 16  # layers of a device unrolled in the program up to this many, scanned above

    IS_PIPELINED: ClassVar[bool] = False
    IN_TICKS: ClassVar[bool] = False  # ranks run in lockstep, in one program
    DISPATCHES_TASKS: ClassVar[bool] = False  # each task is a program of its own
    REMAT: ClassVar[tuple[str, ...]] = tuple(map(str, Remat))

    def check(self) -> None:
        choice("executor.remat", self.remat, self.REMAT)
        at_least("executor.unroll", self.unroll, 0)


@dataclass
class Spmd(Reference):
    """One XLA program: a scan over ticks, one ring permute each way a tick."""

    name: str = "spmd"
    idle: str = "skip"  # what a rank without a task does in a tick: skip | compute (and mask the result)
    gather: str = "step"  # when parameters are gathered over fsdp: once a step | each tick (less memory, more traffic)

    IS_PIPELINED: ClassVar[bool] = True
    IN_TICKS: ClassVar[bool] = True
    IDLE: ClassVar[tuple[str, ...]] = ("skip", "compute")
    GATHER: ClassVar[tuple[str, ...]] = ("step", "tick")

    def check(self) -> None:
        super().check()
        choice("executor.idle", self.idle, self.IDLE)
        choice("executor.gather", self.gather, self.GATHER)


@dataclass
class Mpmd(Reference):
    """One compiled function for each stage and kind of task, dispatched by the host in the order of the schedule."""

    name: str = "mpmd"
    post_validation: bool = False  # a rank updates before the global norm is known, and again if that was wrong

    IS_PIPELINED: ClassVar[bool] = True
    DISPATCHES_TASKS: ClassVar[bool] = True


@dataclass
class Optim:
    """What every optimizer has: global-norm clipping over all stages, warm-up and cosine lr_schedule.

    warmup_steps=0 min_lr_fraction=1 is a rate that stays.
    """

    name: str = "???"
    lr: float = 2e-3  # peak
    min_lr_fraction: float = 0.1  # of the peak, where the cosine ends, at run.num_steps
    warmup_steps: int = 20  # of linear growth to the peak
    clip_norm: float | None = 1.0  # None: no clipping

    def check(self) -> None:
        for key in ("lr", "warmup_steps", "clip_norm"):
            at_least(f"optim.{key}", getattr(self, key), 0)
        fraction("optim.min_lr_fraction", self.min_lr_fraction)
        if self.clip_norm == 0:
            raise ConfigError("optim.clip_norm=0 would erase every gradient. Use null for no clipping.")


@dataclass
class AdamW(Optim):
    """AdamW, without decay on norms and biases."""

    name: str = "adamw"
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8

    def check(self) -> None:
        super().check()
        for key in ("weight_decay", "eps"):
            at_least(f"optim.{key}", getattr(self, key), 0)
        fraction("optim.b1", self.b1, below_one=True)
        fraction("optim.b2", self.b2, below_one=True)


@dataclass
class SGD(Optim):
    """Stochastic gradient descent: w <- w - lr*g, or of g summed up with momentum."""

    name: str = "sgd"
    lr: float = 1e-2  # peak
    momentum: float | None = None  # v <- momentum*v + g takes the place of g; None: no v is kept

    def check(self) -> None:
        super().check()
        if self.momentum is not None:
            fraction("optim.momentum", self.momentum, below_one=True)
        if self.momentum == 0:
            raise ConfigError("optim.momentum=0 would keep sums that are nothing but gradients. Use null for none.")


@dataclass
class Data:
    """What every data set has."""

    name: str = "???"
    batch_size: int = 32  # global, sequences (or rows) a step
    eval_fraction: float = 0.05  # held out for evaluation

    def check(self) -> None:
        at_least("data.batch_size", self.batch_size, 1)
        fraction("data.eval_fraction", self.eval_fraction, below_one=True)


@dataclass
class Stdlib(Data):
    """Byte-level text of the Python standard library's own sources: on every machine, no download."""

    name: str = "stdlib"
    cache_dir: str = "~/.cache/ppctl"  # where the tokenized memmap is kept


@dataclass
class Text(Stdlib):
    """Byte-level text of a file, or of every text file below a directory."""

    name: str = "text"
    path: str = "???"  # a file, or a directory


@dataclass
class Tokens(Data):
    """Token ids in a flat memory-mapped file: `.npy` (one dimension, integers), or raw `.bin` of `dtype`."""

    name: str = "tokens"
    path: str = "???"
    dtype: str = "uint16"  # of a raw .bin file: uint8 | uint16 | int32 | uint32
    vocab_size: int | None = None  # None: largest id in the file plus one

    DTYPE: ClassVar[tuple[str, ...]] = ("uint8", "uint16", "int32", "uint32")

    def check(self) -> None:
        super().check()
        choice("data.dtype", self.dtype, self.DTYPE)
        at_least("data.vocab_size", self.vocab_size, 1)


@dataclass
class CustomData(Data):
    """Data of one's own: a function (batch_size, seed, eval_fraction, **options) that returns a ppctl.data.DataSet."""

    name: str = "custom"
    target: str = "???"  # the function: package.module.function, looked for in the current directory first
    options: dict[str, Any] = field(default_factory=dict)  # its other arguments: +data.options.NAME=VALUE

    def check(self) -> None:
        super().check()
        dotted("data.target", self.target)


@dataclass
class Synthetic(Data):
    """Random token sequences with a learnable rule; every batch is a function of the seed and the step."""

    name: str = "synthetic"
    vocab_size: int = 256
    num_sequences: int = 65536

    def check(self) -> None:
        super().check()
        at_least("data.vocab_size", self.vocab_size, 2)
        at_least("data.num_sequences", self.num_sequences, 1)


@dataclass
class Regression(Data):
    """Rows of a fixed random teacher network with noise: inputs [num_features], targets [num_targets]."""

    name: str = "regression"
    num_features: int = 32
    num_targets: int = 8
    num_rows: int = 65536
    noise: float = 0.01  # standard deviation added to the targets

    def check(self) -> None:
        super().check()
        for key in ("num_features", "num_targets", "num_rows"):
            at_least(f"data.{key}", getattr(self, key), 1)
        at_least("data.noise", self.noise, 0)


@dataclass
class Checkpoint:
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
    """One training run and what it leaves behind."""

    name: str = "default"
    dir: str = "runs/${run.name}"  # metrics and checkpoints
    num_steps: int = 200  # optimizer steps
    seed: int = 0  # of initial weights and data order
    dtype: str | None = None  # of compute: float32 | bfloat16 | float64; None: float64 to verify, else float32
    platform: str | None = None  # cpu | cuda | tpu; None: what JAX finds
    resume: str = "auto"  # auto: go on if a checkpoint is there | must: fail if none | never: fail if one is there
    log_every: int = 10  # steps between lines on the terminal; metrics.jsonl has every step
    eval_every: int | None = 100  # steps; None: no evaluation
    eval_batches: int = 4  # of data.batch_size each
    tensorboard: bool = True
    show_placement: bool = False  # say where each parameter lies before the first step: layer, rank, devices, sharding
    timeline: bool = False  # measure when each task of one step runs (executor=mpmd): run.dir/timeline/
    distributed: str = (
        "off"  # off: one process | explicit: of several, by the three settings below | auto: by Slurm, ...
    )
    coordinator: str | None = None  # HOST:PORT where process 0 listens and all others find it
    num_processes: int | None = None  # of the whole run
    process_id: int | None = None  # of this process, 0..num_processes-1; process 0 leads: it prints and records
    join_s: int = 120  # seconds in which all processes must have started
    heartbeat_s: int = 30  # seconds without a sign of life after which a process counts as lost and the run ends
    slow_after_s: float = 60.0  # seconds without progress after which the process that is behind is named
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    profile: Profile = field(default_factory=Profile)

    RESUME: ClassVar[tuple[str, ...]] = ("auto", "must", "never")
    PLATFORMS: ClassVar[tuple[str, ...]] = ("cpu", "cuda", "tpu")
    DISTRIBUTED: ClassVar[tuple[str, ...]] = ("off", "auto", "explicit")

    def check(self) -> None:
        for key in ("num_steps", "log_every", "eval_every", "eval_batches"):
            at_least(f"run.{key}", getattr(self, key), 1)
        at_least("run.seed", self.seed, 0)
        if self.dtype is not None:
            choice("run.dtype", self.dtype, DTYPES)
        choice("run.resume", self.resume, self.RESUME)
        if self.platform is not None:
            choice("run.platform", self.platform, self.PLATFORMS)
        self._check_processes()
        self.checkpoint.check()
        self.profile.check()

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
