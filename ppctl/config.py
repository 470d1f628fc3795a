"""Every setting of ppctl: field, default, unit and one-field check. Standard library only.

The YAML files under `conf/` only name choices and what differs from these defaults. The classes are not frozen because
Hydra's structured configs must not be. `check` holds what involves more than one field.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

from ppctl.errors import ConfigError

DTYPES = ("float32", "bfloat16", "float64")


def _choice(key: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"{key}={value} is not one of {', '.join(choices)}.")


def _at_least(key: str, value: float | None, least: float) -> None:
    if value is not None and not least <= value < math.inf:  # written so that NaN fails
        raise ConfigError(f"{key}={value} must be a finite number of at least {least}.")


def _fraction(key: str, value: float, *, below_one: bool = False) -> None:
    if not (0 <= value < 1 if below_one else 0 <= value <= 1):
        raise ConfigError(f"{key}={value} must lie in [0, 1{')' if below_one else ']'}.")


@dataclass
class Transformer:
    """Decoder-only transformer: pre-norm, RMSNorm, rotary positions, grouped-query attention."""

    name: str = "transformer"
    num_layers: int = 8  # blocks, divided over the stages
    d_model: int = 128  # width of the residual stream
    num_heads: int = 4
    num_kv_heads: int | None = None  # None: as many as num_heads
    mlp_ratio: float = 4.0  # hidden width of the MLP over d_model
    activation: str = "gelu"  # gelu | swiglu (three matrices instead of two)
    vocab_size: int | None = None  # None: the data set's
    seq_len: int = 128  # tokens a sequence
    tied: bool = False  # head shares the embedding's weights
    rope_theta: float = 10000.0

    ACTIVATIONS: ClassVar[tuple[str, ...]] = ("gelu", "swiglu")

    def check(self) -> None:
        for key in ("num_layers", "d_model", "num_heads", "num_kv_heads", "vocab_size", "seq_len"):
            _at_least(f"model.{key}", getattr(self, key), 1)
        _choice("model.activation", self.activation, self.ACTIVATIONS)
        _at_least("model.rope_theta", self.rope_theta, 1.0)
        if self.d_model % self.num_heads:
            raise ConfigError(
                f"model.d_model={self.d_model} is not a multiple of model.num_heads={self.num_heads}. "
                f"Use d_model={math.ceil(self.d_model / self.num_heads) * self.num_heads} or another num_heads."
            )
        if self.d_model // self.num_heads % 2:
            raise ConfigError(
                f"model.d_model/model.num_heads = {self.d_model}/{self.num_heads} = {self.d_model // self.num_heads} "
                "is odd, and rotary positions turn pairs. Use an even width of a head."
            )
        kv = self.num_kv_heads or self.num_heads
        if self.num_heads % kv:
            raise ConfigError(
                f"model.num_heads={self.num_heads} is not a multiple of model.num_kv_heads={kv}. "
                f"Use a divisor of {self.num_heads}."
            )
        hidden = self.mlp_ratio * self.d_model
        if not 1 <= hidden < math.inf or hidden != int(hidden):  # written so that NaN fails
            raise ConfigError(
                f"model.mlp_ratio*model.d_model = {self.mlp_ratio}*{self.d_model} = {hidden} is not a whole positive "
                "width. Choose a ratio that makes it one."
            )


@dataclass
class MLP:
    """Linear embedding, equal layers of the same width, linear head, mean squared error."""

    name: str = "mlp"
    num_layers: int = 8  # divided over the stages
    d_model: int = 64  # width of a layer
    activation: str = "relu"  # relu | tanh | gelu

    ACTIVATIONS: ClassVar[tuple[str, ...]] = ("relu", "tanh", "gelu")

    def check(self) -> None:
        _at_least("model.num_layers", self.num_layers, 1)
        _at_least("model.d_model", self.d_model, 1)
        _choice("model.activation", self.activation, self.ACTIVATIONS)


@dataclass
class Mesh:
    """Devices along each axis: data-parallel rows, pipeline ranks, parameter shards. `mesh=2x4x2` is dp x pp x fsdp."""

    dp: int = 1  # data-parallel rows
    pp: int = 1  # pipeline ranks
    fsdp: int = 1  # shards of the parameters

    @property
    def num_devices(self) -> int:
        return self.dp * self.pp * self.fsdp

    @property
    def text(self) -> str:
        return f"{self.dp}x{self.pp}" + (f"x{self.fsdp}" if self.fsdp > 1 else "")

    def check(self) -> None:
        for axis in ("dp", "pp", "fsdp"):
            _at_least(f"mesh.{axis}", getattr(self, axis), 1)


@dataclass
class Schedule:
    """A schedule family without knobs of its own (gpipe, 1f1b, zb_h1, zb_h2, zb_v, v_half, v_min, dualpipe_v)."""

    name: str = "gpipe"
    num_microbatches: int = 8  # microbatches a step, on each data-parallel row

    def check(self) -> None:
        _at_least("schedule.num_microbatches", self.num_microbatches, 1)

    def knobs(self) -> dict[str, Any]:
        """The family's own keyword arguments."""
        return {}


@dataclass
class Eager1F1B(Schedule):
    """1F1B with a longer warm-up: `warmup_hops` forwards for each rank behind this one."""

    name: str = "eager_1f1b"
    warmup_hops: float = 2.0  # 1: fewest activations (1F1B) .. 2: hides transfers

    def check(self) -> None:
        super().check()
        _hops(self.warmup_hops)

    def knobs(self) -> dict[str, Any]:
        return {"warmup_hops": self.warmup_hops}


@dataclass
class Chunked(Schedule):
    """A family whose ranks hold `num_chunks` stages each (looped_bfs, interleaved_zb)."""

    name: str = "looped_bfs"
    num_chunks: int = 2  # stages a rank

    def check(self) -> None:
        super().check()
        _at_least("schedule.num_chunks", self.num_chunks, 1)

    def knobs(self) -> dict[str, Any]:
        return {"num_chunks": self.num_chunks}


@dataclass
class Interleaved(Chunked):
    """Megatron-LM's interleaved 1F1B: each rank holds `num_chunks` stages."""

    name: str = "interleaved"
    warmup_hops: float = 2.0  # 1: fewest activations .. 2: hides transfers
    group_size: int | None = None  # microbatches through a chunk before the next one; None: mesh.pp, the fewest

    def check(self) -> None:
        super().check()
        _hops(self.warmup_hops)
        _at_least("schedule.group_size", self.group_size, 1)

    def knobs(self) -> dict[str, Any]:
        return super().knobs() | {"warmup_hops": self.warmup_hops, "group_size": self.group_size}


@dataclass
class Gis(Chunked):
    """PipeOffload's group-interleaved schedule."""

    name: str = "gis"
    group_size: int | None = None  # microbatches through a chunk before the next one; None: half of mesh.pp, the fewest

    def check(self) -> None:
        super().check()
        _at_least("schedule.group_size", self.group_size, 1)

    def knobs(self) -> dict[str, Any]:
        return super().knobs() | {"group_size": self.group_size}


@dataclass
class Hanayo(Schedule):
    """Hanayo: each rank holds two stages a wave."""

    name: str = "hanayo"
    num_waves: int = 1  # times down the ranks and back up

    def check(self) -> None:
        super().check()
        _at_least("schedule.num_waves", self.num_waves, 1)

    def knobs(self) -> dict[str, Any]:
        return {"num_waves": self.num_waves}


def _hops(warmup_hops: float) -> None:
    if not 1 <= warmup_hops <= 2:  # written so that NaN fails
        raise ConfigError(f"schedule.warmup_hops={warmup_hops} must lie in [1, 2].")


@dataclass
class Reference:
    """The un-pipelined model: gradient accumulation over the microbatches in one program, on one device."""

    name: str = "reference"
    remat: str = "none"  # none | layer | full: what the backward recomputes
    unroll: int = 16  # layers of a device unrolled in the program up to this many, scanned above

    REMAT: ClassVar[tuple[str, ...]] = ("none", "layer", "full")

    def check(self) -> None:
        _choice("executor.remat", self.remat, self.REMAT)
        _at_least("executor.unroll", self.unroll, 0)


@dataclass
class Spmd(Reference):
    """One XLA program: a scan over ticks, one ring permute each way a tick."""

    name: str = "spmd"
    idle: str = "skip"  # what a rank without a task does in a tick: skip | compute (and mask the result)
    gather: str = "step"  # when parameters are gathered over fsdp: once a step | each tick (less memory, more traffic)

    IDLE: ClassVar[tuple[str, ...]] = ("skip", "compute")
    GATHER: ClassVar[tuple[str, ...]] = ("step", "tick")

    def check(self) -> None:
        super().check()
        _choice("executor.idle", self.idle, self.IDLE)
        _choice("executor.gather", self.gather, self.GATHER)


@dataclass
class Optim:
    """AdamW (no decay on norms and biases), global-norm clipping over all stages, warm-up and cosine lr_schedule."""

    name: str = "adamw"
    lr: float = 2e-3  # peak
    min_lr_fraction: float = 0.1  # of the peak, where the cosine ends, at run.num_steps
    warmup_steps: int = 20  # of linear growth to the peak
    weight_decay: float = 0.1
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    clip_norm: float | None = 1.0  # None: no clipping

    def check(self) -> None:
        for key in ("lr", "warmup_steps", "weight_decay", "eps", "clip_norm"):
            _at_least(f"optim.{key}", getattr(self, key), 0)
        _fraction("optim.min_lr_fraction", self.min_lr_fraction)
        _fraction("optim.b1", self.b1, below_one=True)
        _fraction("optim.b2", self.b2, below_one=True)
        if self.clip_norm == 0:
            raise ConfigError("optim.clip_norm=0 would erase every gradient. Use null for no clipping.")


@dataclass
class Data:
    """What every data set has."""

    name: str = "???"
    batch_size: int = 32  # global, sequences (or rows) a step
    eval_fraction: float = 0.05  # held out for evaluation

    def check(self) -> None:
        _at_least("data.batch_size", self.batch_size, 1)
        _fraction("data.eval_fraction", self.eval_fraction, below_one=True)


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
        _choice("data.dtype", self.dtype, self.DTYPE)
        _at_least("data.vocab_size", self.vocab_size, 1)


@dataclass
class Synthetic(Data):
    """Random token sequences with a learnable rule; every batch is a function of the seed and the step."""

    name: str = "synthetic"
    vocab_size: int = 256
    num_sequences: int = 65536

    def check(self) -> None:
        super().check()
        _at_least("data.vocab_size", self.vocab_size, 2)
        _at_least("data.num_sequences", self.num_sequences, 1)


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
            _at_least(f"data.{key}", getattr(self, key), 1)
        _at_least("data.noise", self.noise, 0)


@dataclass
class Checkpoint:
    every: int | None = 50  # steps; None: only at the end and on interruption
    keep: int = 3  # newest checkpoints kept

    def check(self) -> None:
        _at_least("run.checkpoint.every", self.every, 1)
        _at_least("run.checkpoint.keep", self.keep, 1)


@dataclass
class Profile:
    start: int | None = None  # first step traced; None: no trace
    num_steps: int = 2

    def check(self) -> None:
        _at_least("run.profile.start", self.start, 0)
        _at_least("run.profile.num_steps", self.num_steps, 1)


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
    peak_flops: float | None = None  # FLOP/s of one device, for MFU; None: the table in costs.py
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    profile: Profile = field(default_factory=Profile)

    RESUME: ClassVar[tuple[str, ...]] = ("auto", "must", "never")
    PLATFORMS: ClassVar[tuple[str, ...]] = ("cpu", "cuda", "tpu")

    def check(self) -> None:
        for key in ("num_steps", "log_every", "eval_every", "eval_batches"):
            _at_least(f"run.{key}", getattr(self, key), 1)
        _at_least("run.seed", self.seed, 0)
        if self.dtype is not None:
            _choice("run.dtype", self.dtype, DTYPES)
        _choice("run.resume", self.resume, self.RESUME)
        if self.platform is not None:
            _choice("run.platform", self.platform, self.PLATFORMS)
        self.checkpoint.check()
        self.profile.check()


@dataclass
class Config:
    """A composed request. `model`, `schedule`, `executor` and `data` are one of the classes above each."""

    model: Any = field(default_factory=Transformer)
    mesh: Mesh = field(default_factory=Mesh)
    schedule: Any = field(default_factory=Schedule)
    executor: Any = field(default_factory=Spmd)
    optim: Optim = field(default_factory=Optim)
    data: Any = field(default_factory=Stdlib)
    run: Run = field(default_factory=Run)


@dataclass
class Costs:
    """Seconds of one microbatch through 1/p of the model, as `ppctl schedule` assumes them. A chunk costs 1/V of it."""

    name: str = "unit"
    forward_s: float = 1.0  # F
    input_grad_s: float = 1.0  # I; a full backward B is I and W
    weight_grad_s: float = 1.0  # W
    transfer_s: float = 0.0  # one activation or gradient from a rank to the next

    def check(self) -> None:
        for key in ("forward_s", "input_grad_s", "weight_grad_s", "transfer_s"):
            _at_least(f"costs.{key}", getattr(self, key), 0)
        if self.forward_s + self.input_grad_s + self.weight_grad_s == 0:
            raise ConfigError("costs.forward_s=costs.input_grad_s=costs.weight_grad_s=0: give one of them a time.")


@dataclass
class ScheduleConfig(Config):
    """A composed request of `ppctl schedule`: of a training's parts, mesh and schedule matter; costs are its own."""

    costs: Costs = field(default_factory=Costs)

    def check(self) -> None:
        for part in (self.mesh, self.schedule, self.costs):
            part.check()


def check(config: Config) -> None:
    """Nothing, or ConfigError for the first setting or combination that is impossible."""
    for part in (config.model, config.mesh, config.schedule, config.executor, config.optim, config.data, config.run):
        part.check()
    mesh, data = config.mesh, config.data
    rows = config.schedule.num_microbatches * mesh.dp * mesh.fsdp
    if data.batch_size % rows:
        least = math.ceil(data.batch_size / rows) * rows
        raise ConfigError(
            f"data.batch_size={data.batch_size} is not a multiple of schedule.num_microbatches*mesh.dp*mesh.fsdp = "
            f"{config.schedule.num_microbatches}*{mesh.dp}*{mesh.fsdp} = {rows}. "
            f"Use data.batch_size={least}, or fewer microbatches."
        )
    if config.executor.name == "reference" and mesh.num_devices > 1:
        raise ConfigError(
            f"executor=reference is the un-pipelined model on one device, but mesh={mesh.text} has {mesh.num_devices}. "
            "Use mesh=1x1 or executor=spmd."
        )
    is_mlp, is_rows = config.model.name == "mlp", data.name == "regression"
    if is_mlp != is_rows:
        raise ConfigError(
            f"model={config.model.name} cannot learn from data={data.name}. "
            f"Use {'data=regression' if is_mlp else 'data=stdlib (or text, tokens, synthetic)'}"
            f" or model={'transformer' if is_mlp else 'mlp'}."
        )
    profile = config.run.profile
    if profile.start is not None and profile.start + profile.num_steps > config.run.num_steps:
        raise ConfigError(
            f"run.profile.start+run.profile.num_steps = {profile.start}+{profile.num_steps} is past the last step "
            f"(run.num_steps={config.run.num_steps}). "
            f"Use run.profile.start={max(0, config.run.num_steps - profile.num_steps)} at most, or fewer "
            "run.profile.num_steps."
        )
