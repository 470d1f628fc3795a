"""A published row as a request: mesh, schedule, stages, microbatches and remat, and what had to be
assumed for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from benchmarks.published.rows import Model, Row
from benchmarks.published.systems import System, system_of
from ppctl.config import Hardware, Interleaved
from ppctl.errors import ConfigError
from ppctl.schedule.families.registry import BASELINE, FAMILIES
from ppctl.training.pipeline.known_hardware import known

HOST_DEVICES = 8  # devices of each machine in the rows
GBIT_BYTES = 1e9 / 8
DTYPE = "bfloat16"
SLOWER_LINKS = {"A800": ("a100", 200e9), "H800": ("h100", 200e9)}  # data sheets: 400 GB/s both ways
MOST_CHUNKS = 12  # stages a rank that are tried where the source does not say how many
QUARTERS = (
    0.0,
    0.25,
    0.5,
    0.75,
    1.0,
)  # share of a rank's recomputed layers, where the source does not state it
MICRO_BATCHES = 1, 2, 4  # sizes tried where the source does not state one
# share of a layer's forward that FSDP trainers run again: every other product, or every other layer
SELECTIVE = 0.5


@dataclass(frozen=True)
class Request:
    """A row that the planner can count."""

    row: Row
    model: Model
    system: System
    hardware: Hardware  # with the network of the row
    family: str
    num_chunks: int
    sizes: tuple[int, ...]  # layers of each stage
    dp: int
    fsdp: int
    ep: int  # replicas but for experts, which they divide together with tp
    micro_batch: int
    num_microbatches: float  # no whole number where the source rounds its batch
    redone: float  # 0..1: of a layer's forward that the backward runs again
    divides_vocabulary: bool  # over the ranks of the pipeline
    assumed: tuple[str, ...]

    @property
    def replicas(self) -> int:
        return self.dp * self.ep * self.row.cp

    @property
    def expert_replicas(self) -> int:
        return self.dp * self.row.cp

    @property
    def device_gib(self) -> float:
        """The memory of a device: as the source's words have it, else what conf/hardware has,
        before XLA takes 3/4.
        """
        found = re.search(r"(\d+)\s?GB\b(?!/s)", self.row.gpu)
        if found is not None:
            return 0.99 * int(found[1])
        assert self.hardware.memory_gib is not None, "GPUs have memory of their own"
        return self.hardware.memory_gib * 4 / 3

    @property
    def rank_layers(self) -> int:
        pp = self.row.pp
        return max(sum(self.sizes[rank::pp]) for rank in range(pp))


def requests_of(row: Row) -> list[Request]:
    """Return the requests of a row, several if its source leaves stages or recomputing open.

    ConfigError if it has no request, with the reason.
    """
    if row.model is None:
        raise ConfigError(row.why_none)
    if row.ep > 1 and row.model.experts is None:
        raise ConfigError(f"ep={row.ep} divides experts, and the model has no expert")
    precision = row.precision.lower()
    if not re.search("bf16|fp16|float16|half|fp8|float8", precision) or re.search(
        "fp4|int8", precision
    ):
        raise ConfigError(f"{row.precision}: only bfloat16, float16 and fp8 are predicted")
    model, assumed = row.model, list[str]()
    if model.head_dim is None and model.hidden % model.heads:
        raise ConfigError(f"hidden={model.hidden} is not a multiple of heads={model.heads}")
    hardware, how = hardware_of(row)
    if row.is_fp8 and "fp8" not in hardware.peak_flops:
        raise ConfigError(f"{row.precision}: {hardware.name} has no products of 8-bit floats")
    assumed += how
    dp, fsdp, ep = _replicas(row)
    if dp * fsdp * ep * row.pp * row.tp * row.cp != row.gpus:
        raise ConfigError(
            f"dp*fsdp*pp*tp*cp = {dp}*{fsdp}*{row.pp}*{row.tp}*{row.cp} is not gpus={row.gpus}"
        )
    micro, number = row.micro_batch, row.num_microbatches
    if micro is not None and _is_apart(row) and micro % ep == 0:
        micro //= ep
    examples = row.global_batch / (dp * fsdp * ep)
    if model.experts is not None:
        assumed.append("experts loaded evenly")
    if micro is None and fsdp == 1 and number is not None and examples % number == 0:
        micro = int(examples // number)
    if examples < (micro or 1):
        raise ConfigError(
            f"global_batch={row.global_batch} is less than dp*fsdp*micro_batch = "
            f"{dp}*{fsdp}*{micro or 1}"
        )
    if fsdp == 1 and micro and number and abs(examples / micro - number) >= 1:  # sources round
        raise ConfigError(
            f"global_batch/(dp*micro_batch) = {row.global_batch}/({dp}*{micro}) = "
            f"{examples / micro:g} is not num_microbatches={number}"
        )
    if micro is None:
        assumed.append("the fastest microbatch size that fits the memory")
    redone, is_stated = _redone(row)
    if not is_stated:
        assumed.append("the least recomputation that fits the memory, in quarters of the layers")
    elif 0 < redone < 1:
        assumed.append("half of the forward recomputed")
    family, layouts = _schedule(row, model)
    if row.has_pipeline and row.chunks is None and family != BASELINE:
        assumed.append("the fastest number of stages a rank that fits the memory")
    return [
        Request(
            row,
            model,
            system_of(row),
            hardware,
            family if chunks > 1 or not FAMILIES[family].knobs_for(1) else BASELINE,
            chunks,
            sizes,
            dp,
            fsdp,
            ep,
            examples_each,
            examples / examples_each,
            share,
            "+" in row.schedule,
            tuple(assumed),
        )
        for chunks, sizes in layouts
        for share in ([redone] if is_stated else QUARTERS)
        for examples_each in ([micro] if micro else _micro_batches(examples, fsdp))
    ]


def _micro_batches(examples: float, fsdp: int) -> list[int]:
    """Return the sizes of microbatches to try where the source does not say; of FSDP all of a
    replica's examples first.

    >>> _micro_batches(12, fsdp=8), _micro_batches(12, fsdp=1)
    ([12, 6, 3, 1], [1, 2, 4])
    """
    if fsdp == 1 or examples != int(examples):
        return [size for size in MICRO_BATCHES if examples % size == 0] or [1]
    found = [int(examples)]
    while found[-1] % 2 == 0:
        found.append(found[-1] // 2)
    return list(dict.fromkeys([*found, 1]))


def hardware_of(row: Row) -> tuple[Hardware, list[str]]:
    """Return the GPU of a row with its network, and the assumptions about it."""
    name, assumed = _described(row), list[str]()
    hardware = known().get(name)
    if hardware is None:
        raise ConfigError(f"gpu_short={row.gpu_short}: conf/hardware has no {name}")
    if hardware.hosts is None or DTYPE not in hardware.peak_flops:
        raise ConfigError(f"gpu_short={row.gpu_short}: published steps are of GPUs in hosts")
    if row.gpu_short.upper() in SLOWER_LINKS:
        hardware = replace(hardware, link_bytes_per_s=SLOWER_LINKS[row.gpu_short.upper()][1])
    if "2.4 TB/s" in row.gpu and "500 W" in row.gpu:  # Meta's H100 with HBM2e
        share = (500 / 700) ** (1 / 2)
        hardware = replace(
            hardware,
            memory_bytes_per_s=2.4e12,
            reached=hardware.reached | {"flops": hardware.reached["flops"] * share},
            power_w=500,
        )
        assumed.append("speed of products as the square root of the power, 500 of 700 W")
    rate = _network_bytes_per_s(row.network)
    if rate is None and row.gpus > HOST_DEVICES:
        assumed.append(f"network as in conf/hardware/{name}.yaml")
    elif rate is not None:
        hardware = replace(hardware, network=hardware.network | {"bytes_per_s": rate})
    return hardware, assumed


def _described(row: Row) -> str:
    """Return the name in conf/hardware of a row's GPU."""
    name = row.gpu_short.strip().upper()
    name = (SLOWER_LINKS[name][0] if name in SLOWER_LINKS else name).lower()
    for word in ("pcie", "40gb"):
        if (
            word in row.gpu.lower().replace(" ", "")
            and word not in name
            and f"{name}_{word}" in known()
        ):
            name += f"_{word}"
    return name


def _network_bytes_per_s(text: str) -> float | None:
    """Return the bytes a second of a GPU's way to other hosts, from words such as 4x100 Gbit/s a
    node.

    >>> _network_bytes_per_s("8 GPUs a node, 4x100 Gbit/s Omni-Path"), _network_bytes_per_s("400 Gb/s RoCE a GPU")
    (6250000000.0, 50000000000.0)
    """
    found = re.search(r"(?:(\d+)\s*x\s*)?(\d+(?:\.\d+)?)\s*([GT])b(?:it)?(?:/s|ps)", text)
    if found is None:
        return None
    rate = float(found[2]) * GBIT_BYTES * (1000 if found[3] == "T" else 1)
    is_of_host = (
        found[1] is not None or re.search(r"\b(a|per) (node|host|machine)", text) is not None
    )
    return int(found[1] or 1) * rate / HOST_DEVICES if is_of_host else rate


def _is_apart(row: Row) -> bool:
    """Return whether ep multiplies the devices; otherwise it lies in dp, fsdp and tp."""
    return (row.dp or 1) * row.fsdp * row.pp * row.tp * row.cp * row.ep == row.gpus


def _replicas(row: Row) -> tuple[int, int, int]:
    """Return (dp, fsdp, ep); some sources state replicas that FSDP makes among them as dp.

    Experts are divided over tp too. The rest of ep is taken out of fsdp, or else out of dp.
    """
    dp, fsdp = row.dp or 1, row.fsdp
    if _is_apart(row):
        return dp, fsdp, row.ep
    if dp * fsdp * row.pp * row.tp * row.cp != row.gpus and dp % fsdp == 0:
        dp //= fsdp
    ep, left = divmod(row.ep, row.tp)
    if row.ep == 1 or left:
        ep = row.ep
    if fsdp % ep == 0:
        return dp, fsdp // ep, ep
    if dp % ep:
        raise ConfigError(f"ep={row.ep} divides neither dp*tp = {dp}*{row.tp} nor fsdp={fsdp}")
    return dp // ep, fsdp, ep


def _redone(row: Row) -> tuple[float, bool]:
    """Return (share of a forward that the backward runs again, whether the source states it)."""
    word = re.split(r"[\s(]", row.remat.lower())[0]
    if word in ("full", "every_layer", "uniform", "block"):
        return 1.0, True
    if (
        word == "selective"
    ):  # Megatron's option: scores of attention, which a flash kernel does not keep anyway
        return (SELECTIVE if system_of(row).shards == "parameters" else 0.0), True
    if word in ("none", "disabled", "", "not", "see"):
        return 0.0, word in ("none", "disabled")
    raise ConfigError(f"remat={row.remat}: neither full nor selective nor none")


def _schedule(row: Row, model: Model) -> tuple[str, list[tuple[int, tuple[int, ...]]]]:
    """Return the family, and the numbers of stages a rank with the layers of each stage."""
    if not row.has_pipeline:
        return BASELINE, [(1, (model.layers,))]
    word = row.schedule.lower().split()[0] if row.schedule.strip() else ""
    if word == BASELINE and (row.chunks or 1) > 1:
        word = Interleaved().name  # Megatron calls it 1F1B too
    if word not in FAMILIES:
        raise ConfigError(f"schedule={row.schedule!r} is none of ppctl's ({', '.join(FAMILIES)})")
    known_chunks, family = row.chunks, FAMILIES[word]
    if not family.knobs_for(1):
        known_chunks = family.num_chunks
        if row.chunks not in (None, known_chunks):
            raise ConfigError(f"vp={row.chunks}: schedule={word} has {known_chunks} stages a rank")
    if known_chunks is None:
        found = [
            (c, sizes)
            for c in range(1, MOST_CHUNKS + 1)
            for sizes in _even(model.layers, row.pp * c)
        ]
    else:
        found = [(known_chunks, sizes) for sizes in _sizes(row, model, row.pp * known_chunks)]
    if any(not all(sizes[1:-1]) for _, sizes in found):
        raise ConfigError(
            f"layers={model.layers} are fewer than pp*vp = {row.pp}*{row.chunks or 1} stages"
        )
    if not found:
        raise ConfigError(
            f"{model.layers} layers divide neither over {row.pp} ranks nor over several stages "
            "of each"
        )
    return word, found


def _even(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Yield stages of as many layers, or embedding and head as a layer each (Llama 3, section
    3.3.2).
    """
    if layers % stages == 0:
        yield (layers // stages,) * stages
    elif (layers + 2) % stages == 0:
        each = (layers + 2) // stages
        yield (each - 1, *(each,) * (stages - 2), each - 1)


def _sizes(row: Row, model: Model, stages: int) -> Iterator[tuple[int, ...]]:
    last = row.layers_on_last_rank
    if last is not None and "moved" in row.layout:
        each, more = divmod(model.layers - last, stages - 1)
        yield (*(each,) * (stages - 1 - more), *(each + 1,) * more, last)
        return
    found = list(_even(model.layers, stages))
    each, more = divmod(model.layers, stages)
    yield from found or [tuple(each + (s < more) for s in range(stages))]
