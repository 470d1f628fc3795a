"""The file of published steps: a JSON list, an object for each measured step. docs/published.md
describes the format.

Standard library only.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.published.constants import is_fitted
from ppctl.errors import ConfigError

SIZES = "layers", "hidden", "heads", "kv_heads", "ffn", "vocab"
TEXTS = "system", "source", "network", "schedule", "remat", "layout", "kernel", "notes"
AXES = "tp", "pp", "fsdp", "cp", "ep"
RAN = (
    "ok",
    "ran",
    "success",
    "succeeded",
    "completed",
    "true",
)  # words of `outcome`; all others say that it did not run


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
    head_dim: int | None = None
    experts: int | None = None  # in every layer; ffn is then that of dense layers, if any
    top_k: int = 1
    expert_ffn: int = 0
    shared_ffn: int = 0  # width of the shared experts, together

    @property
    def head_width(self) -> int:
        return self.head_dim or self.hidden // self.heads

    def flops_of_token(self, seq: int, *, causal: bool) -> float:
        """Return the FLOPs of a token forward and back, nothing recomputed; causal: pairs that are
        masked do not count.

        6 for each weight of a matrix that multiplies it, and for attention 12 * layers * hidden *
        seq, or half of it.

        >>> round(Model(32, 4096, 32, 8, 14336, 128256, True, False).flops_of_token(8192, causal=False) / 1e9, 1)
        57.9
        """
        q, kv = self.head_width * self.heads, self.head_width * self.kv_heads
        active, router = self.ffn, 0
        if self.experts is not None:
            active, router = self.top_k * self.expert_ffn + self.shared_ffn, self.experts
        layer = self.hidden * (2 * (q + kv) + (3 if self.gated else 2) * active + router)
        pairs = 12 * self.layers * q * seq * (0.5 if causal else 1.0)
        return 6 * (self.layers * layer + self.hidden * self.vocab) + pairs


@dataclass(frozen=True)
class Row:
    """A measured step as its source states it; None: not stated."""

    id: str
    system: str
    source: str
    gpu: str  # in the source's words
    gpu_short: str  # H100, A100 and the like
    network: str
    precision: str
    model: Model | None  # None: for the reason `why_none`
    why_none: str  # reason why the row, or its model, cannot be counted
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
    tflops: float | None  # TFLOP/s of a GPU
    tokens_per_s: float | None  # tokens/s of a GPU
    mfu: float | None  # 0..1
    convention: str  # how the source counts FLOPs
    outcome: str | None  # ok, or why it did not run
    memory_gib: float | None
    notes: str

    @property
    def has_pipeline(self) -> bool:
        return self.pp > 1

    @property
    def is_mixture(self) -> bool:
        return self.model is not None and self.model.experts is not None

    @property
    def is_fp8(self) -> bool:
        return re.search("fp8|float8", self.precision.lower()) is not None

    @property
    def is_fitted(self) -> bool:
        """Whether the constants are fitted on it: on half of the dense rows in 16 bits."""
        return is_fitted(self.id) and not self.is_mixture and not self.is_fp8

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
    def ran(self) -> bool | None:
        """Whether it ran; None: the source does not say."""
        return None if self.outcome is None else self.outcome.strip().lower() in RAN

    def published_s(self, peak_flops: float | None = None) -> float | None:
        """Return the seconds of the step: as stated, else as they follow from TFLOP/s, tokens/s or
        MFU of a GPU.

        peak_flops: of a GPU, for rows that state only the MFU.
        """
        flops = self.step_flops(causal=self.counts_causal)
        if self.step_s is not None:
            return self.step_s
        if self.tflops is None and self.tokens_per_s is not None:
            return self.seq * self.global_batch / (self.tokens_per_s * self.gpus)
        if self.tflops is not None:
            a_second = self.tflops * 1e12
        elif self.mfu is not None and peak_flops is not None:
            a_second = self.mfu * peak_flops
        else:
            return None
        return (
            None
            if flops is None
            else flops * (4 / 3 if self.counts_recomputing else 1) / (a_second * self.gpus)
        )


def read_rows(path: Path) -> list[Row]:
    """Return the rows of a file. ConfigError where it is not of the format."""
    name = str(path)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}.") from None
    except ValueError as error:
        raise ConfigError(f"{name} is not JSON: {error}.") from None
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        raise ConfigError(
            f"{name} is not a list of objects, one for each published step (docs/published.md)."
        )
    rows = [_row(row, i) for i, row in enumerate(found)]
    seen = set[str]()
    for row in rows:
        if row.id in seen:
            raise ConfigError(f"{name} has two rows of id {row.id}. Give each its own.")
        seen.add(row.id)
    return rows


def _row(given: dict[str, Any], number: int) -> Row:
    """Return a row; one that is not of the format has no model, and the reason."""
    name = str(given.get("id") or f"row {number}")
    try:
        return _read(given, name)
    except ConfigError as error:
        stated: dict[str, Any] = dict.fromkeys(AXES, 1) | {
            key: str(given.get(key) or "") for key in TEXTS
        }
        gpu = str(given.get("gpu_short") or "")
        return Row(
            id=name,
            gpu=gpu,
            gpu_short=gpu,
            precision="",
            model=None,
            why_none=str(error),
            seq=1,
            gpus=1,
            dp=None,
            **stated,
            chunks=None,
            micro_batch=None,
            global_batch=1,
            num_microbatches=None,
            layers_on_last_rank=None,
            sequence_parallel=None,
            step_s=None,
            tflops=None,
            tokens_per_s=None,
            mfu=None,
            convention="",
            outcome=None,
            memory_gib=None,
        )


def _read(given: dict[str, Any], name: str) -> Row:
    """Return a row. ConfigError where a field is missing or invalid."""
    for key in ("gpu_short", "precision", "model"):
        if given.get(key) is None:
            raise ConfigError(f"the row has no {key}")
    seq, gpus = _required(given, "seq"), _required(given, "gpus")
    axes = {key: _whole(given, key) or 1 for key in AXES}
    micro, dp = _whole(given, "micro_batch"), _whole(given, "dp")
    number, batch, mfu = (
        _whole(given, "num_microbatches"),
        _whole(given, "global_batch"),
        _positive(given, "mfu"),
    )
    others = axes["tp"] * axes["pp"] * axes["cp"] * axes["fsdp"]
    if dp is None and gpus % others == 0:
        dp = gpus // others
    if batch is None and dp is not None and micro is not None and number is not None:
        batch = micro * number * dp * axes["fsdp"]
    if batch is None:
        batch = _required(given, "global_batch")
    if mfu is not None and mfu >= 1:
        raise ConfigError(f"mfu={mfu:g} is not below 1")
    model, why = _model(given["model"])
    stated: dict[str, Any] = axes | {key: str(given.get(key) or "") for key in TEXTS}
    divides = str(given.get("sequence_parallel"))
    return Row(
        id=name,
        gpu=str(given.get("gpu") or given["gpu_short"]),
        gpu_short=str(given["gpu_short"]),
        precision=str(given["precision"]),
        model=model,
        why_none=why,
        seq=seq,
        gpus=gpus,
        dp=dp,
        **stated,
        chunks=_whole(given, "vp"),
        micro_batch=micro,
        global_batch=batch,
        num_microbatches=number,
        layers_on_last_rank=_whole(given, "layers_on_last_rank", least=0),
        sequence_parallel=None if divides == "None" else divides.lower() == "true",
        step_s=_positive(given, "step_time_s"),
        tflops=_positive(given, "tflops_per_gpu"),
        tokens_per_s=_positive(given, "tokens_per_s_per_gpu"),
        mfu=mfu,
        convention=str(given.get("mfu_convention") or ""),
        outcome=None if given.get("outcome") is None else str(given["outcome"]),
        memory_gib=_gib(given.get("memory_gib")),
    )


def _required(given: dict[str, Any], key: str) -> int:
    found = _whole(given, key)
    if found is None:
        raise ConfigError(f"the row has no {key}")
    return found


def _whole(given: dict[str, Any], key: str, least: int = 1) -> int | None:
    """Return a whole number; None: no value."""
    value = _number(given, key)
    if value is not None and (value != int(value) or value < least):
        raise ConfigError(f"{key}={given[key]} is not a whole number from {least} on")
    return None if value is None else int(value)


def _positive(given: dict[str, Any], key: str) -> float | None:
    value = _number(given, key)
    if value is not None and value <= 0:
        raise ConfigError(f"{key}={given[key]} is not above 0")
    return value


def _number(given: dict[str, Any], key: str) -> float | None:
    value = given.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MOST:
        raise ConfigError(f"{key}={json.dumps(value)} is no number")
    return value


MOST = 1e15  # bound of any number in a row; NaN is not below it either


def _model(given: Any) -> tuple[Model | None, str]:
    """Return the sizes of a model, or why it cannot be expressed."""
    if not isinstance(given, dict):
        raise ConfigError(f"model={json.dumps(given)} is no object with sizes")
    sizes = {key: size for key in SIZES if (size := _whole(given, key)) is not None}
    if "heads" in sizes:
        sizes.setdefault("kv_heads", sizes["heads"])  # without groups of queries
    if given.get("experts") is not None and "expert_ffn" in given:
        sizes.setdefault("ffn", given["expert_ffn"])  # width without a dense layer
    missing = [
        key
        for key in (*SIZES, "gated")
        if key not in sizes and (key in SIZES or given.get(key) is None)
    ]
    if missing:
        return None, f"the row has no model.{missing[0]}"
    sizes["head_dim"] = _whole(given, "head_dim")
    if given.get("experts") is not None:
        needed = ("experts", "top_k", "expert_ffn")
        sizes |= {key: _required(given, key) for key in needed}
        sizes["shared_ffn"] = _whole(given, "shared_ffn", least=0) or 0
    return Model(**sizes, gated=bool(given.get("gated")), tied=bool(given.get("tied"))), ""


def _gib(value: Any) -> float | None:
    """Return a size in GiB, stated as a number or as 29GB, as tools print GiB; None where there is
    none.
    """
    text = str(value).upper().removesuffix("GIB").removesuffix("GB").strip()
    try:
        found = float(text)
    except ValueError:
        return None
    return found if math.isfinite(found) and found > 0 else None
