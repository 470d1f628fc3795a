"""Published steps next to their predictions, row by row, and how far off these are."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.published.constants import FITTED, Constants
from benchmarks.published.device_work import work_of_request
from benchmarks.published.request import DTYPE, Request, requests_of
from benchmarks.published.rows import Row
from benchmarks.published.step import chosen, memory_gib
from ppctl.errors import ConfigError, ScheduleError
from ppctl.training.pipeline.mfu import mfu


@dataclass(frozen=True)
class Compared:
    """A published row and its prediction; `refused`: why it cannot be expressed, the rest is None."""

    id: str
    system: str
    source: str
    gpu: str
    has_pipeline: bool
    is_fitted: bool  # whether the constants were fitted on it
    is_mixture: bool  # whether the model has experts
    is_fp8: bool  # linear maps in 8 bits
    published_step_s: float | None
    predicted_step_s: float | None = None
    ratio: float | None = None  # predicted over published
    # share of the peak in the row's precision, with the FLOPs counted as the row counts
    published_mfu_fraction: float | None = None
    predicted_mfu_fraction: float | None = None  # likewise
    predicted_mfu_full_fraction: float | None = None  # all pairs of tokens in attention
    predicted_mfu_causal_fraction: float | None = None
    counts: str | None = None  # how the row counts: full | causal, and with recomputing
    bubble_fraction: float | None = None
    per_step_overhead_s: float | None = None
    memory_gib: float | None = None  # predicted, of a device of the fullest rank
    published_memory_gib: float | None = None
    fits: bool | None = None
    ran: bool | None = None  # None: the source does not say
    layout: str | None = None
    assumed: tuple[str, ...] = ()
    refused: str | None = None

    @property
    def error(self) -> float | None:
        return None if self.ratio is None else abs(self.ratio - 1)

    @property
    def memory_ratio(self) -> float | None:
        """Return predicted over measured memory; None if one is unknown."""
        if self.memory_gib is None or self.published_memory_gib is None:
            return None
        return self.memory_gib / self.published_memory_gib


@dataclass(frozen=True)
class Errors:
    """How far predictions are off, as fractions of the published steps."""

    name: str
    rows: int
    median: float
    ninth_decile: float  # largest error of the best nine in ten rows
    worst: float


def compare(rows: Sequence[Row], constants: Constants = FITTED) -> list[Compared]:
    """Return every row with its prediction or the reason for its absence, in order."""
    return [_compared(row, constants) for row in rows]


def expressible(rows: Iterable[Row]) -> Iterator[tuple[Row, list[Request]]]:
    """Yield the rows that have a prediction, with their requests."""
    for row in rows:
        try:
            requests = requests_of(row)
            work_of_request(requests[0])
        except (ConfigError, ScheduleError):
            continue
        yield row, requests


def _compared(row: Row, constants: Constants) -> Compared:
    head = (
        row.id,
        row.system,
        row.source,
        row.gpu_short,
        row.has_pipeline,
        row.is_fitted,
        row.is_mixture,
        row.is_fp8,
    )
    try:
        request, time = chosen(requests_of(row), constants)
    except (ConfigError, ScheduleError) as error:
        return Compared(
            *head,
            row.published_s(),
            published_memory_gib=row.memory_gib,
            ran=row.ran,
            refused=str(error),
        )
    hardware = request.hardware
    peak = hardware.peak_flops["fp8" if row.is_fp8 else DTYPE]
    published_s, size = row.published_s(peak), memory_gib(request)
    full, causal = (row.step_flops(causal=causal) for causal in (False, True))
    assert full is not None, "a row with a request has a model"
    assert causal is not None, "likewise"
    counted = (causal if row.counts_causal else full) * (4 / 3 if row.counts_recomputing else 1)
    how = "causal" if row.counts_causal else "full"
    return Compared(
        *head,
        published_s,
        time.total_s,
        None if published_s is None else time.total_s / published_s,
        mfu(counted, published_s, peak * row.gpus),
        mfu(counted, time.total_s, peak * row.gpus),
        mfu(full, time.total_s, peak * row.gpus),
        mfu(causal, time.total_s, peak * row.gpus),
        how + (", recomputing too" if row.counts_recomputing else ""),
        time.bubble_fraction,
        time.overhead_s,
        size,
        row.memory_gib,
        size <= request.device_gib,
        row.ran,
        layout_text(request),
        request.assumed,
    )


def layout_text(request: Request) -> str:
    """Return a layout in a few words: tp8 pp12 dp4, m=512 of 1."""
    row = request.row
    sizes = {"tp": row.tp, "pp": row.pp, "dp": request.dp, "fsdp": request.fsdp, "cp": row.cp}
    sizes["ep"] = request.ep
    axes = " ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)
    chunks = f" x{request.num_chunks}" if request.num_chunks > 1 else ""
    redone = f", {request.redone:.0%} recomputed" if request.redone else ""
    return f"{axes}{chunks}, {request.num_microbatches:.4g} x {request.micro_batch}{redone}"


def errors(compared: Iterable[Compared], name: str) -> Errors | None:
    """Return the errors of rows; None of none."""
    return errors_of((row.error for row in compared), name)


def errors_of(values: Iterable[float | None], name: str) -> Errors | None:
    """Return the summary of errors, the unknown ones left out; None of none."""
    found = sorted(value for value in values if value is not None)
    if not found:
        return None
    ninth = found[-(-9 * len(found) // 10) - 1]
    return Errors(name, len(found), statistics.median(found), ninth, found[-1])


def summary(compared: Sequence[Compared]) -> list[Errors]:
    """Return the errors with and without a pipeline: of all rows, of those fitted on, and of the
    others; then of rows in fp8 and of mixtures: no constant is fitted on these.
    """
    found = list[Errors | None]()
    for has_pipeline, name in ((True, "with a pipeline"), (False, "without a pipeline")):
        dense = (row for row in compared if not row.is_mixture and not row.is_fp8)
        rows = [row for row in dense if row.has_pipeline == has_pipeline]
        found.append(errors(rows, name))
        found += [
            errors([row for row in rows if row.is_fitted == half], f"{name}, {text}")
            for half, text in HALVES
        ]
    found.append(errors([row for row in compared if row.is_fp8], "fp8"))
    found.append(errors([row for row in compared if row.is_mixture], "mixtures of experts"))
    return [each for each in found if each is not None]


HALVES = (True, "constants fitted on"), (False, "the other half")


def memory_lines(compared: Iterable[Compared]) -> list[str]:
    """Return sentences on the predicted memory: where the sources measured it, and where they only
    state whether the layout ran.
    """
    lines, rows = list[str](), list(compared)
    # 1. measured
    ratios = [row.memory_ratio for row in rows if row.memory_ratio is not None]
    if off := errors_of((abs(ratio - 1) for ratio in ratios), "memory"):
        low = sum(ratio < 1 for ratio in ratios)
        lines.append(
            f"The sources of {off.rows} rows measured the memory of a GPU. The predicted memory is "
            f"off by {off.median:.1%} at the median, by at most {off.ninth_decile:.1%} for nine of "
            f"ten rows and by {off.worst:.1%} for the worst; it is too low for {low} of them."
        )
    # 2. outcomes
    known = [row for row in rows if row.ran is not None and row.fits is not None]
    for ran, stated in ((True, "ran"), (False, "did not run")):
        of_outcome = [row for row in known if row.ran == ran]
        if of_outcome:
            fit = sum(row.fits is True for row in of_outcome)
            lines.append(
                f"The sources of {len(of_outcome)} rows state only that the layout {stated}; the "
                f"predicted memory fits the GPU for {fit} of them."
            )
    if known and all(row.ran for row in known):
        lines.append("No row is of a layout that did not run, so a wrong `fits` is not tested.")
    return lines


def as_json(compared: Sequence[Compared], constants: Constants = FITTED) -> dict[str, Any]:
    """Return the object that --json prints."""
    return {
        "rows": [asdict(row) for row in compared],
        "errors": [asdict(each) for each in summary(compared)],
        "constants": asdict(constants),
        "memory": memory_lines(compared),
    }
