"""Random requests for `tests/fuzz.py`: mostly valid, functions of only the seed and the number."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from support.all_families import knob_choices, num_chunks, takes
from support.fuzz_transformers import Axes, transformer
from support.networks import NETWORKS
from support.sizes import random_program

from ppctl.schedule.families.registry import FAMILIES
from ppctl.schedule.mesh_axes import mesh_text
from ppctl.schedule.schedule_text import to_csv

NUM_STEPS = 5
MOST_DEVICES = 8
BROKEN = 0.12  # share of requests that get one mistake on purpose
LAYERS_OF_TEXT = 4  # most stages of most transformers, whose layers take seconds to compile
DTYPES = ("float64", "float64", "float64", "float32", "float32", "bfloat16")
REMAT = ("none", "layer", "full")
NETWORK_DATA = {
    "widths": "data=regression data.num_features=6 data.num_targets=3",
    "deep": "data=regression data.num_features=6 data.num_targets=3",
    "images": "data=custom data.target=tests.support.fuzz_models.pictures",
    "tokens": "data=synthetic data.vocab_size=50 data.num_sequences=512 model.seq_len=5",
}


@dataclass
class Request:
    """A request in words."""

    number: int
    model: list[str]  # with its data
    layout: list[str] = field(default_factory=list)  # mesh, schedule, partition, executor
    training: list[str] = field(default_factory=list)  # optimizer and run
    processes: int = 1
    mistake: str | None = None

    @property
    def words(self) -> list[str]:
        return [*self.model, *self.layout, *self.training]


class Sizes:
    """Sizes that the parts of a request share."""

    def __init__(self, rng: random.Random):
        self.dp, self.pp, self.fsdp = _mesh(rng)
        self.axes = Axes()
        self.fuses = False
        self.chunks = 1
        self.num_microbatches = 1
        self.num_layers = 1
        self.num_stages = 1

    @property
    def mesh(self) -> dict[str, int]:
        return {"dp": self.dp, "pp": self.pp, "fsdp": self.fsdp, **self.axes.sizes}


def request(seed: int, number: int, directory: Path) -> Request:
    """Return request `number` of a seed; its files are written to `directory`."""
    rng = random.Random(f"{seed} {number}")
    sizes, executor = Sizes(rng), rng.choices(("spmd", "mpmd", "reference"), (5, 4, 1))[0]
    if executor == "reference":
        sizes.dp = sizes.pp = sizes.fsdp = 1
    network = rng.choice(list(NETWORKS)) if rng.random() < 0.2 else None
    auto = network is not None and rng.random() < 0.4
    limit = None if network is None else NETWORKS[network][1 + auto]
    is_mlp = rng.random() < 0.3
    if network is None and not is_mlp and rng.random() < 0.8:
        limit = LAYERS_OF_TEXT
    if limit is not None:
        sizes.pp = min(sizes.pp, limit)
    sizes.fuses = executor == "mpmd" and rng.random() < 0.5
    schedule = _schedule(rng, sizes, limit, directory)
    sizes.num_stages = sizes.pp * sizes.chunks
    sizes.num_layers = sizes.num_stages + rng.choice((0, 0, 0, 1, 2))
    if network is not None:
        sizes.num_layers = (
            rng.randint(min(limit, max(1, sizes.num_stages)), limit) if auto else limit
        )
    model, adapters = _model(rng, sizes, network, auto, executor, is_mlp=is_mlp)
    dtype = rng.choice(_dtypes(sizes.axes))
    made = Request(number, model)
    examples = math.prod((sizes.num_microbatches, sizes.dp, sizes.fsdp, sizes.axes.ep))
    batch = examples * rng.choice((1, 1, 2, 3))
    made.model += [f"data.batch_size={batch}", "data.eval_fraction=0.3"]
    made.layout = [f"mesh={mesh_text(sizes.mesh)}", *schedule, *_partition(rng, sizes, executor)]
    made.layout += _executor(rng, sizes, executor)
    made.training = [*_optimizer(rng), *adapters, *_run(rng, sizes, executor, dtype)]
    if math.prod(sizes.mesh.values()) % 2 == 0 and rng.random() < 0.02:
        made.processes = 2
    if rng.random() < BROKEN:
        _break(rng, made, sizes)
    elif executor == "mpmd" and "schedule.vocab=parallel" not in schedule:
        _resize_ranks(random.Random(f"{seed} {number} ranks"), made, sizes)
    return made


def _resize_ranks(rng: random.Random, made: Request, sizes: Sizes) -> None:
    """Draw separate sizes for each rank, in a third of the requests; they divide the same batch."""
    if rng.random() > 1 / 3 or any(word.startswith("mesh=") for word in made.training):
        return
    replicas, axes, ranks = sizes.dp * sizes.fsdp, sizes.axes, []
    for _ in range(sizes.pp):
        number = rng.choice([n for n in range(1, replicas + 1) if replicas % n == 0])
        rank = {rng.choice(("dp", "fsdp")): number, "cp": axes.cp}
        rank |= {"tp": rng.choice((1, axes.tp)), "ep": rng.choice((1, axes.ep))}
        ranks.append(",".join(f"{axis}:{n}" for axis, n in rank.items()))
    made.layout[0] = f"mesh.ranks=[{{{'},{'.join(ranks)}}}]"


def _mesh(rng: random.Random) -> tuple[int, int, int]:
    while True:
        dp, pp, fsdp = (
            rng.choice((1, 1, 1, 2, 3, 4)),
            rng.choice((1, 2, 2, 2, 2, 2, 3, 4)),
            rng.choice((1, 1, 1, 2, 4)),
        )
        pp = 8 if rng.random() < 0.02 else pp
        if dp * pp * fsdp <= MOST_DEVICES:
            return dp, pp, fsdp


def _schedule(rng: random.Random, sizes: Sizes, limit: int | None, directory: Path) -> list[str]:
    """Return the words of a schedule that fits the ranks, and note its chunks and microbatches."""
    most = (3 if sizes.pp <= 2 else 2) if limit is None else max(1, limit // sizes.pp)  # chunks
    p = sizes.pp
    m = sizes.num_microbatches = rng.choice((1, 2, 3, p, p, 2 * p, p + 1))
    # 1. an order of tasks that is found, or in a file
    name = rng.choice([*FAMILIES, "auto", "csv"])
    if name == "csv":
        sizes.chunks = rng.randint(1, min(2, most))
        m = sizes.num_microbatches = min(m, 6)
        program = random_program(
            rng.randrange(10**6),
            num_ranks=p,
            num_chunks=sizes.chunks,
            num_microbatches=m,
            split=rng.random() < 0.5,
        )
        path = directory / "schedule.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_csv(program.ranks))
        return ["schedule=csv", f"schedule.path={path}"]
    if name == "auto":
        m = sizes.num_microbatches = min(m, 8)
        words = [f"schedule.max_chunks={rng.randint(1, min(2, most))}"]
        words += [f"schedule.max_activations={rng.choice((p, 1.5 * p))}"] * (rng.random() < 0.3)
        return ["schedule=auto", *words, f"schedule.num_microbatches={m}"]
    # 2. a family, and knobs with few enough chunks
    fitting = {
        each: [knobs for knobs in knob_choices(each) if num_chunks(each, knobs) <= most]
        for each in FAMILIES
    }
    if not fitting[name]:
        name = rng.choice([each for each in FAMILIES if fitting[each]])
    knobs = rng.choice(fitting[name])
    sizes.chunks = num_chunks(name, knobs)
    if sizes.fuses:
        m = max(m, 2 * p)  # fewer have no neighbours to fuse
    if not takes(name, p, m):
        m = p * rng.choice((1, 2))
    sizes.num_microbatches = m
    words = [f"schedule.{knob}={value}" for knob, value in knobs.items()]
    return [f"schedule={name}", *words, f"schedule.num_microbatches={m}"]


def _dtypes(axes: Axes) -> tuple[str, ...]:
    """Return the dtypes that make layouts comparable, repeated by their weight."""
    if axes.is_rounded:
        return ("float64",)
    return tuple(name for name in DTYPES if name != "bfloat16" or not axes.chooses)


def _model(
    rng: random.Random,
    sizes: Sizes,
    network: str | None,
    auto: bool,
    executor: str,
    *,
    is_mlp: bool,
) -> tuple[list[str], list[str]]:
    """Return the words of a model with its data, and those of its adapters."""
    words = [f"model.num_layers={sizes.num_layers}"]
    if network is not None:
        words += [
            "model=custom",
            "model.target=tests.support.fuzz_models.network",
            f"+model.options.name={network}",
        ]
        words += [
            f"model.layers={'auto' if auto else 'marks'}",
            f"+model.options.marked={str(not auto).lower()}",
        ]
        rows = ["data.num_rows=512"] * NETWORK_DATA[network].startswith("data=regression")
        return [*words, *NETWORK_DATA[network].split(), *rows], []
    if is_mlp:
        words += ["model=mlp", f"model.d_model={rng.choice((4, 5, 6, 7, 8, 12))}"]
        words.append(f"model.activation={rng.choice(('relu', 'tanh', 'gelu'))}")
        words += ["model.dropout=0.2"] * (rng.random() < 0.5)
        features, targets = rng.randint(1, 8), rng.randint(1, 5)
        words += ["data=regression", "data.num_rows=512", f"data.num_features={features}"]
        return [*words, f"data.num_targets={targets}"], []
    if sizes.dp * sizes.pp * sizes.fsdp > MOST_DEVICES // 2 and rng.random() < 0.5:
        sizes.dp = sizes.fsdp = 1  # room for axes of a stage
    room = MOST_DEVICES // (sizes.dp * sizes.pp * sizes.fsdp) if executor != "reference" else 1
    found, adapters, sizes.axes = transformer(rng, room)
    return [*words, *found], adapters


def _partition(rng: random.Random, sizes: Sizes, executor: str) -> list[str]:
    kind = rng.choice(("uniform", "uniform", "balanced", "explicit"))
    if executor == "reference" or kind == "uniform":
        return []
    if kind == "balanced" or rng.random() < 0.02:
        return ["partition=balanced"]
    # the first and the last stage may be empty
    S, least = (
        sizes.num_stages,
        [min(1, s, sizes.num_stages - 1 - s) for s in range(sizes.num_stages)],
    )
    counts, where = list(least), list(range(S))
    for _ in range(sizes.num_layers - sum(least)):
        counts[rng.choice(where)] += 1
    if rng.random() < 0.5:
        return ["partition=explicit", f"partition.layers=[{','.join(map(str, counts))}]"]
    stages = ["E" * (s == 0) + "t" * n + "L" * (s == S - 1) for s, n in enumerate(counts)]
    return ["partition=explicit", f"partition.layers='{'|'.join(stages)}'"]


def _executor(rng: random.Random, sizes: Sizes, executor: str) -> list[str]:
    words = [f"executor={executor}", f"executor.remat={rng.choice(REMAT)}"]
    words += [f"executor.unroll={rng.choice((0, 1, 2))}"] * (
        executor != "reference" and not sizes.fuses and rng.random() < 0.5
    )
    if executor == "spmd":
        words += ["executor.gather=layer"] * (rng.random() < 0.3)
    if executor == "mpmd":
        words += ["executor.post_validation=true"] * (rng.random() < 0.4)
        words += ["executor.fuse=fb"] * sizes.fuses
        words += ["executor.context=ring"] * (sizes.axes.cp > 1 and rng.random() < 0.5)
    return words


def _optimizer(rng: random.Random) -> list[str]:
    words = [
        f"optim.clip_norm={rng.choice(('null', 1, 0.05))}",
        f"optim.warmup_steps={rng.choice((0, 2, 20))}",
    ]
    words.append(f"optim.min_lr_fraction={rng.choice((0, 0.1, 1))}")
    if rng.random() < 0.5:
        return [
            *words,
            "optim=adamw",
            f"optim.weight_decay={rng.choice((0, 0.1))}",
            "optim.lr=0.002",
        ]
    return [*words, "optim=sgd", "optim.lr=0.01", f"optim.momentum={rng.choice(('null', 0.9))}"]


def _run(rng: random.Random, sizes: Sizes, executor: str, dtype: str) -> list[str]:
    words = [
        f"run.num_steps={NUM_STEPS}",
        f"run.seed={rng.choice((0, 1, 2**31 - 1))}",
        f"run.dtype={dtype}",
    ]
    words += [
        "run.platform=cpu",
        "run.eval_batches=1",
        f"run.eval_every={rng.choice(('null', 'null', 2, 5))}",
    ]
    words += ["run.trackers=[]"] * (rng.random() < 0.9)
    words += ["run.checkpoint.enabled=false"] * (rng.random() < 0.75)
    has_timeline = executor == "mpmd" and not sizes.fuses and rng.random() < 0.05
    words += ["run.timeline=true"] * has_timeline
    return words


# --- mistakes -----------------------------------------------------------------------------------


def _break(rng: random.Random, made: Request, sizes: Sizes) -> None:
    """Put one mistake into a request."""
    name, change = rng.choice(list(MISTAKES.items()))
    made.mistake = name
    made.training = [*made.training, *change(sizes)]


MISTAKES: dict[str, Callable[[Sizes], list[str]]] = {  # words that come last, and so count
    "a batch that cannot be divided": lambda s: [
        f"data.batch_size={s.num_microbatches * s.dp * s.fsdp * s.axes.ep + 1}"
    ],
    "fewer layers than stages": lambda s: ["model.num_layers=1"],
    "layers for another number of stages": lambda s: [
        "partition=explicit",
        f"partition.layers={[1] * 17}",
    ],
    "layers that are not all": lambda s: [
        "partition=explicit",
        f"partition.layers={[9] * s.num_stages}",
    ],
    "an empty stage in the middle": lambda s: ["partition=explicit", "partition.layers=[1,0,1]"],
    "text that is no partition": lambda s: ["partition=explicit", "partition.layers=Et*x"],
    "groups of microbatches not filled": lambda s: [
        "schedule=interleaved",
        f"schedule.num_microbatches={s.pp + 1}",
        f"data.batch_size={(s.pp + 1) * s.dp * s.fsdp}",
    ],
    "hops out of range": lambda s: ["schedule=eager_1f1b", "schedule.warmup_hops=3"],
    "a knob of another family": lambda s: ["schedule=gpipe", "schedule.num_chunks=2"],
    "no waves": lambda s: ["schedule=hanayo", "schedule.num_waves=0"],
    "the reference on several devices": lambda s: ["executor=reference", "mesh=2x1"],
    "post-validation of one program": lambda s: ["executor=spmd", "executor.post_validation=true"],
    "a timeline of one program": lambda s: ["executor=spmd", "run.timeline=true"],
    "a cap that nothing keeps": lambda s: ["schedule=auto", "schedule.max_activations=0.01"],
    "nothing held out": lambda s: ["data.eval_fraction=0", "run.eval_every=1"],
    "too few held out": lambda s: ["run.eval_every=1", "run.eval_batches=9999"],
    "no such dtype": lambda s: ["run.dtype=float16"],
    "a profile past the end": lambda s: ["run.profile=4"],
    "data of another kind": lambda s: ["model=transformer", "data=regression"],
    "heads that do not divide": lambda s: [
        "model=transformer",
        "data=synthetic",
        "model.num_heads=5",
    ],
    "no file": lambda s: ["schedule=csv", "schedule.path=/nowhere/at/all.csv"],
}
