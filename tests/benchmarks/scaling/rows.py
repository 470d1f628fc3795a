"""The requests of `make bench-scale`: models, and layouts of 8 to 16,384 devices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

IN_HOST = 8  # devices along tp or ep, which stay inside a host
MOST_RANKS = 16  # pipeline ranks of planned layouts; further devices are replicas
MOST_FSDP = 8
TPU_SHAPES = {32: "4x4x2", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8", 512: "8x8x8"}  # v5p
COMMON = (
    "run.platform=cpu",
    "run.dtype=bfloat16",
    "run.eval_every=null",
    "data=synthetic",
    "data.eval_fraction=0",
    "executor.remat=layer",
)


@dataclass(frozen=True)
class Model:
    """A model, and the axis of a mesh that divides its layers inside a host."""

    name: str
    axis: str  # tp | ep
    settings: tuple[str, ...]


# 405 B parameters
DENSE = Model("405B", "tp", ("model=llama3_405b", "data.vocab_size=128256"))
# sizes of Kimi K2's config.json, with grouped-query instead of latent attention: 1.03 T parameters
MIXTURE = Model(
    "mixture",
    "ep",
    (
        "model=transformer",
        "model.family=glm4p5",
        "model.num_layers=61",
        "model.d_model=7168",
        "model.num_heads=64",
        "model.num_kv_heads=8",
        "model.head_dim=128",
        "model.mlp_width=18432",
        "model.activation=swiglu",
        "model.seq_len=4096",
        "model.vocab_size=163840",
        "data.vocab_size=163840",
        "model.moe.num_experts=384",
        "model.moe.top_k=8",
        "model.moe.width=2048",
        "model.moe.score=sigmoid",
        "model.moe.scale=2.5",
        "model.moe.choice_bias=true",
        "model.moe.shared_width=2048",
        "model.moe.first_dense=1",
    ),
)
MODELS = {model.name: model for model in (DENSE, MIXTURE)}


@dataclass(frozen=True)
class Row:
    """A request: planned, or compiled too."""

    series: str  # line of the figure: whole | deep | ranks | replicas | microbatches
    model: str  # name of one of MODELS
    target: str  # h100 | v5p
    ranks: int  # pipeline ranks
    copies: int  # replicas of the pipeline, along dp and fsdp
    num_microbatches: int
    compiles: bool
    layers: int | None = None  # None: all layers of the model
    fsdp: int = 1  # part of `copies`
    executor: str = "spmd"
    schedule: str = "1f1b"
    settings: tuple[str, ...] = ()  # further settings

    @property
    def devices(self) -> int:
        return self.ranks * self.copies * IN_HOST

    @property
    def name(self) -> str:
        """Return a text that tells the row from all others."""
        verb = "compile" if self.compiles else "plan"
        layers = "" if self.layers is None else f", {self.layers} layers"
        return (
            f"{verb} {self.model}{layers}, {self.devices} x {self.target}, {self.series}: "
            f"pp={self.ranks} fsdp={self.fsdp}, {self.executor} {self.schedule}, "
            f"{self.num_microbatches} microbatches"
        )

    @property
    def topology(self) -> str:
        """Return the setting plan.topology."""
        if self.target == "v5p":
            return f"v5p:{TPU_SHAPES[self.devices]}"
        return f"{self.target}:{self.devices // IN_HOST}x{IN_HOST}"

    @property
    def overrides(self) -> tuple[str, ...]:
        """Return the settings of the request; each replica gets a sequence a microbatch."""
        model = MODELS[self.model]
        sizes = {"dp": self.copies // self.fsdp, "pp": self.ranks, "fsdp": self.fsdp}
        sizes[model.axis] = IN_HOST
        sequences = self.num_microbatches * self.copies * (IN_HOST if model.axis == "ep" else 1)
        return (
            *COMMON,
            *model.settings,
            *(() if self.layers is None else (f"model.num_layers={self.layers}",)),
            *(f"mesh.{axis}={size}" for axis, size in sizes.items()),
            f"executor={self.executor}",
            f"schedule={self.schedule}",
            f"schedule.num_microbatches={self.num_microbatches}",
            f"data.batch_size={sequences}",
            f"data.num_sequences={sequences}",
            f"plan.topology={self.topology}",
            f"plan.compile={str(self.compiles).lower()}",
            *self.settings,
        )


def whole(model: str, devices: int, *, compiles: bool, num_microbatches: int = 32) -> Row:
    """Return a row of a whole model: ranks first, then fsdp, then dp.

    >>> whole("405B", 16384, compiles=False).topology
    'h100:2048x8'
    """
    ranks = min(MOST_RANKS, devices // IN_HOST)
    copies = devices // IN_HOST // ranks
    how: dict[str, Any] = {"fsdp": min(MOST_FSDP, copies), "compiles": compiles}
    return Row("whole", model, "h100", ranks, copies, num_microbatches, **how)


def planned_rows() -> list[Row]:
    """Return the rows that are only planned."""
    sizes = [8 * 2**k for k in range(12)]
    rows = [whole(model, devices, compiles=False) for model in MODELS for devices in sizes]
    # a schedule of 98,304 tasks, which executor=mpmd walks one by one
    deep: dict[str, Any] = {"compiles": False, "layers": 128, "executor": "mpmd", "fsdp": 8}
    return [*rows, Row("deep", "405B", "h100", 64, 32, 256, schedule="zb_v", **deep)]


@dataclass(frozen=True)
class Line:
    """Requests that are compiled: from 32 devices to more, and from 64 microbatches to fewer."""

    target: str
    model: str
    layers: int  # layers of a rank
    devices: tuple[int, ...]  # sizes above 32
    microbatches: tuple[int, ...]  # numbers below 64
    schedule: str = "1f1b"
    executor: str = "spmd"

    def rows(self) -> list[Row]:
        """Return the requests of the line, the one of 32 devices and 64 microbatches first.

        ranks: a pipeline of more ranks, with as many layers on each. replicas: more copies of a
        pipeline of four ranks.
        """

        def row(series: str, ranks: int, copies: int, number: int = 64) -> Row:
            how: dict[str, Any] = {"layers": self.layers * ranks, "compiles": True}
            how |= {"schedule": self.schedule, "executor": self.executor}
            return Row(series, self.model, self.target, ranks, copies, number, **how)

        groups = [devices // IN_HOST for devices in self.devices]
        return [
            row("ranks", 4, 1),
            *(row("ranks", number, 1) for number in groups),
            *(row("replicas", 4, number // 4) for number in groups),
            *(row("microbatches", 4, 1, number) for number in self.microbatches),
        ]


LINES = (
    Line("h100", "405B", 2, (64, 128, 256, 512), (8, 16, 32)),
    Line("h100", "405B", 2, (), (8,), "interleaved"),
    Line("h100", "405B", 2, (), (8,), "zb_h1"),
    Line("h100", "405B", 2, (512,), (8,), "1f1b", "mpmd"),
    Line("v5p", "405B", 2, (512,), (8,)),
    Line("h100", "mixture", 1, (512,), (8,)),
)


def compiled_rows() -> list[Row]:
    """Return the rows that are compiled: those of LINES, and the whole dense model."""
    rows = [row for line in LINES for row in line.rows()]
    return rows + [whole("405B", devices, compiles=True) for devices in (32, 64, 128, 256, 512)]
