"""Random requests for `tests/fuzz.py`: mostly valid ones, each a function of the seed and its
number alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from support.networks import NETWORKS
from support.sizes import random_program

from ppctl.schedule.schedule_text import to_csv

NUM_STEPS = 5
MOST_DEVICES = 8
BROKEN = 0.12  # share of requests that get one mistake on purpose
DTYPES = ("float64", "float64", "float64", "float32", "float32", "bfloat16")
REMAT = ("none", "layer", "full")
# num_layers by marks; the most for layers=auto
NETWORK_DATA = {
    "widths": "data=regression data.num_features=6 data.num_targets=3",
    "deep": "data=regression data.num_features=6 data.num_targets=3",
    "images": "data=custom data.target=tests.support.fuzz_models.pictures",
    "tokens": "data=synthetic data.vocab_size=50 data.num_sequences=512 model.seq_len=5",
}
ANY_SIZE = (
    "gpipe",
    "1f1b",
    "zb_h1",
    "zb_h2",
    "zb_v",
    "v_half",
    "v_min",
    "dualpipe_v",
)  # families without knobs
ON_MPMD_ONLY = ("dualpipe_v",)


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
        self.chunks = 1
        self.num_microbatches = 1
        self.num_layers = 1
        self.num_stages = 1


def request(seed: int, number: int, directory: Path) -> Request:
    """Return request `number` of a seed; what it reads from a file is written to `directory`."""
    rng = random.Random(f"{seed} {number}")
    sizes, executor = Sizes(rng), rng.choices(("spmd", "mpmd", "reference"), (5, 4, 1))[0]
    if executor == "reference":
        sizes.dp = sizes.pp = sizes.fsdp = 1
    network = rng.choice(list(NETWORKS)) if rng.random() < 0.2 else None
    auto = network is not None and rng.random() < 0.4
    limit = None if network is None else NETWORKS[network][1 + auto]
    if limit is not None:
        sizes.pp = min(sizes.pp, limit)
    schedule = _schedule(rng, sizes, executor, limit, directory)
    sizes.num_stages = sizes.pp * sizes.chunks
    sizes.num_layers = sizes.num_stages + rng.choice((0, 0, 0, 1, 2))
    if limit is not None:
        sizes.num_layers = (
            rng.randint(min(limit, max(1, sizes.num_stages)), limit) if auto else limit
        )
    dtype = rng.choice(DTYPES)
    made = Request(number, _model(rng, sizes, network, auto))
    batch = sizes.num_microbatches * sizes.dp * sizes.fsdp * rng.choice((1, 1, 2))
    made.model += [f"data.batch_size={batch}", "data.eval_fraction=0.25"]
    made.layout = [
        f"mesh={sizes.dp}x{sizes.pp}x{sizes.fsdp}",
        *schedule,
        *_partition(rng, sizes, executor),
    ]
    made.layout += _executor(rng, executor)
    made.training = [*_optimizer(rng), *_run(rng, executor, dtype)]
    if sizes.dp * sizes.pp * sizes.fsdp % 2 == 0 and rng.random() < 0.02:
        made.processes = 2
    if rng.random() < BROKEN:
        _break(rng, made, sizes)
    return made


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


def _schedule(
    rng: random.Random, sizes: Sizes, executor: str, limit: int | None, directory: Path
) -> list[str]:
    """Return the words of a schedule that fits the ranks, and note its chunks and microbatches."""
    most = (3 if sizes.pp <= 2 else 2) if limit is None else max(1, limit // sizes.pp)  # chunks
    names = ["eager_1f1b", "interleaved", "interleaved_zb", "looped_bfs", "gis", "auto", "csv"]
    names += ["gpipe", "1f1b", "zb_h1", "zb_h2"]
    if most >= 2:
        names += ["zb_v", "v_half", "v_min", "hanayo"] + ["dualpipe_v"] * (executor == "mpmd")
    name = rng.choice(names)
    p, words = sizes.pp, [f"schedule={name}"]
    m = sizes.num_microbatches = rng.choice((1, 2, 3, p, p, 2 * p, p + 1))
    if name in ("zb_v", "v_half", "v_min", "dualpipe_v"):
        sizes.chunks = 2
    elif name == "hanayo":
        waves = rng.randint(1, max(1, most // 2))
        sizes.chunks = 2 * waves
        words.append(f"schedule.num_waves={waves}")
    elif name == "eager_1f1b":
        words.append(f"schedule.warmup_hops={rng.choice((1, 1.25, 1.5, 2))}")
    elif name == "csv":
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
        return [*words, f"schedule.path={path}"]
    elif name == "auto":
        words.append(f"schedule.max_chunks={rng.randint(1, min(2, most))}")
        words += [f"schedule.max_activations={rng.choice((p, 1.5 * p))}"] * (rng.random() < 0.3)
        m = sizes.num_microbatches = min(m, 8)
    elif name in ("interleaved", "interleaved_zb", "looped_bfs", "gis"):
        sizes.chunks = rng.randint(1, most)
        words.append(f"schedule.num_chunks={sizes.chunks}")
        if name in ("interleaved", "interleaved_zb") and m % p:
            m = sizes.num_microbatches = p * rng.choice((1, 2))
        if name == "interleaved" and rng.random() < 0.4:
            words.append(f"schedule.warmup_hops={rng.choice((1, 1.5))}")
    return [*words, f"schedule.num_microbatches={m}"]


def _model(rng: random.Random, sizes: Sizes, network: str | None, auto: bool) -> list[str]:
    """Return the words of a model and of data for it."""
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
        return [*words, *NETWORK_DATA[network].split(), *rows]
    if rng.random() < 0.7:
        words += ["model=mlp", f"model.d_model={rng.choice((4, 6, 8, 12))}"]
        words.append(f"model.activation={rng.choice(('relu', 'tanh', 'gelu'))}")
        features, targets = rng.randint(1, 8), rng.randint(1, 5)
        words += ["data=regression", "data.num_rows=512", f"data.num_features={features}"]
        return [*words, f"data.num_targets={targets}"]
    d_model, heads = rng.choice(((4, 1), (8, 2), (8, 4), (12, 2), (16, 4), (16, 2), (24, 6)))
    words += ["model=transformer", f"model.d_model={d_model}", f"model.num_heads={heads}"]
    words.append(
        f"model.num_kv_heads={rng.choice(['null', *(n for n in range(1, heads + 1) if heads % n == 0)])}"
    )
    words += [
        f"model.mlp_width={d_model * rng.choice((1, 2, 4))}",
        f"model.activation={rng.choice(('gelu', 'swiglu'))}",
    ]
    words += [
        f"model.tied={rng.choice(('true', 'false'))}",
        f"model.seq_len={rng.choice((1, 4, 7, 8))}",
    ]
    words.append(f"model.rope.theta={rng.choice((100, 10000, 500000))}")
    words.append(f"model.attention={rng.choice(('auto', 'auto', 'xla', 'chunked'))}")
    vocab = rng.randint(2, 32)
    words += [f"model.vocab_size={vocab + rng.randint(0, 5)}"] * (rng.random() < 0.3)
    return [*words, "data=synthetic", "data.num_sequences=512", f"data.vocab_size={vocab}"]


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


def _executor(rng: random.Random, executor: str) -> list[str]:
    words = [f"executor={executor}", f"executor.remat={rng.choice(REMAT)}"]
    words += [f"executor.unroll={rng.choice((0, 1, 2))}"] * (
        executor != "reference" and rng.random() < 0.5
    )
    if executor == "spmd":
        words += ["executor.gather=layer"] * (rng.random() < 0.3)
    if executor == "mpmd":
        words += ["executor.post_validation=true"] * (rng.random() < 0.4)
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


def _run(rng: random.Random, executor: str, dtype: str) -> list[str]:
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
    words += ["run.timeline=true"] * (executor == "mpmd" and rng.random() < 0.05)
    return words


# --- mistakes -----------------------------------------------------------------------------------


def _break(rng: random.Random, made: Request, sizes: Sizes) -> None:
    """Put one mistake into a request."""
    name, change = rng.choice(list(MISTAKES.items()))
    made.mistake = name
    made.training = [*made.training, *change(sizes)]


MISTAKES: dict[str, Callable[[Sizes], list[str]]] = {  # words that come last, and so count
    "a batch that cannot be divided": lambda s: [
        f"data.batch_size={s.num_microbatches * s.dp * s.fsdp + 1}"
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
    "a placement that is no ring": lambda s: ["executor=spmd", "schedule=dualpipe_v"],
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
