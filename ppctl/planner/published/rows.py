"""The file of published steps: a JSON list, an object for each measured step. docs/published.md describes the format.

Standard library only.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppctl.errors import ConfigError

PEAKS = {"A100": 312e12, "H100": 989.4e12}  # bfloat16, dense: the data sheets; as conf/hardware has them
SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
TEXTS = ("source", "network", "schedule", "remat", "layout", "kernel", "notes")
SIZES_OF_AXES = ("tp", "pp", "fsdp", "cp", "ep")


@dataclass(frozen=True)
class Model:
    """The sizes of a decoder-only transformer."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    gated: bool
    tied: bool

    def flops_of_token(self, seq: int, *, causal: bool) -> float:
        """Return the FLOPs of a token forward and back, nothing recomputed; causal: pairs that are masked do not count.

        6 for each weight of a matrix that multiplies it, and for attention 12 * layers * hidden * seq, or half of it.

        >>> round(Model(32, 4096, 32, 8, 14336, 128256, True, False).flops_of_token(8192, causal=False) / 1e9, 1)
        57.9
        """
        kv = self.hidden // self.heads * self.kv_heads
        layer = 2 * self.hidden * (self.hidden + kv) + (3 if self.gated else 2) * self.hidden * self.ffn
        pairs = 12 * self.layers * self.hidden * seq * (0.5 if causal else 1.0)
        return 6 * (self.layers * layer + self.hidden * self.vocab) + pairs


@dataclass(frozen=True)
class Row:
    """A measured step as its source states it; what the source does not say is None."""

    id: str
    system: str
    source: str
    gpu: str  # in the source's words
    gpu_short: str  # H100 | A100
    network: str
    precision: str
    model: Model | None  # None: `why_no_model` says why
    why_no_model: str
    seq: int
    gpus: int
    tp: int
    pp: int
    dp: int | None
    fsdp: int
    cp: int
    ep: int
    chunks: int | None  # stages a rank
    micro_batch: int | None
    global_batch: int
    num_microbatches: int | None
    schedule: str
    remat: str
    layout: str
    layers_on_last_rank: int | None
    kernel: str
    sequence_parallel: bool | None
    step_s: float | None
    tflops: float | None  # of a GPU
    convention: str  # how the source counts FLOPs
    outcome: str | None  # ok, or why it did not run
    memory_gib: float | None
    notes: str

    @property
    def has_pipeline(self) -> bool:
        return self.pp > 1

    @property
    def device_gib(self) -> float:
        """The memory of a device: what CUDA states of one of 80 GB, or as the source's words have it."""
        found = re.search(r"(\d+)\s?GB", self.gpu)
        return 0.99 * int(found[1]) if found else 79.1

    @property
    def counts_recomputing(self) -> bool:
        """Whether published TFLOP/s have the recomputed forward in them."""
        return "HARDWARE" in self.convention

    @property
    def counts_causal(self) -> bool:
        return "causal" in self.convention

    def step_flops(self, *, causal: bool) -> float | None:
        if self.model is None:
            return None
        return self.model.flops_of_token(self.seq, causal=causal) * self.seq * self.global_batch

    @property
    def published_s(self) -> float | None:
        """The seconds of the step: as stated, else as they follow from the TFLOP/s of a GPU."""
        flops = self.step_flops(causal=self.counts_causal)
        if self.step_s is not None or self.tflops is None or flops is None:
            return self.step_s
        return flops * (4 / 3 if self.counts_recomputing else 1) / (self.tflops * 1e12 * self.gpus)


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file. ConfigError where it is not of the format."""
    name = f"--published {path}"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}.") from None
    except ValueError as error:
        raise ConfigError(f"{name} is not JSON: {error}.") from None
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise ConfigError(f"{name} is not a list of objects, one for each published step (docs/published.md).")
    rows = [_row(row, name, i) for i, row in enumerate(found)]
    seen = set[str]()
    for row in rows:
        if row.id in seen:
            raise ConfigError(f"{name} has two rows of id {row.id}. Give each its own.")
        seen.add(row.id)
    return rows


def _row(given: dict[str, Any], name: str, number: int) -> Row:
    for key in ("id", "system", "gpu_short", "precision", "model", "seq", "gpus", "global_batch", "tp", "pp"):
        if given.get(key) is None:
            raise ConfigError(f"{name}: row {given.get('id', number)} has no {key} (docs/published.md).")
    model, why = _model(given["model"])
    text = {
        key: str(given.get(key) or "")
        for key in ("source", "network", "schedule", "remat", "layout", "kernel", "notes")
    }
    tp, pp, fsdp, cp, ep = (1 if given.get(key) is None else int(given[key]) for key in SIZES_OF_AXES)
    divides = given.get("sequence_parallel")
    return Row(
        id=str(given["id"]),
        system=str(given["system"]),
        gpu=str(given.get("gpu") or given["gpu_short"]),
        gpu_short=str(given["gpu_short"]),
        precision=str(given["precision"]),
        model=model,
        why_no_model=why,
        seq=int(given["seq"]),
        gpus=int(given["gpus"]),
        dp=given.get("dp"),
        tp=tp,
        pp=pp,
        fsdp=fsdp,
        cp=cp,
        ep=ep,
        **text,
        chunks=given.get("vp"),
        micro_batch=given.get("micro_batch"),
        global_batch=int(given["global_batch"]),
        num_microbatches=given.get("num_microbatches"),
        layers_on_last_rank=given.get("layers_on_last_rank"),
        sequence_parallel=None if divides in (None, "None") else str(divides) == "True",
        step_s=given.get("step_time_s"),
        tflops=given.get("tflops_per_gpu"),
        convention=str(given.get("mfu_convention") or ""),
        outcome=given.get("outcome"),
        memory_gib=_gib(given.get("memory_gib")),
    )


def _model(given: dict[str, Any]) -> tuple[Model | None, str]:
    """Return the sizes of a model, or why it cannot be expressed."""
    if given.get("experts"):
        return None, "a mixture of experts, which ppctl does not have"
    missing = [key for key in SIZES if not given.get(key)]
    if missing:
        return None, f"the row has no model.{missing[0]}"
    sizes = {key: int(given[key]) for key in SIZES}
    return Model(**sizes, gated=bool(given.get("gated")), tied=bool(given.get("tied"))), ""


def _gib(value: Any) -> float | None:
    """Return a size in GiB, stated as a number or as 29GB, as tools print GiB; None where there is none."""
    text = str(value).upper().removesuffix("GIB").removesuffix("GB").strip()
    try:
        return float(text)
    except ValueError:
        return None
