"""Gains of ranks of unequal sizes (`ppctl tune tune.groups=unequal`) on published models, as a table.

python tests/benchmarks/unequal_groups.py [NAME ...]

Without names the table of all rows is written into docs/planning.md (`make bench-groups`, about 20
minutes); with names, rows that contain one of them are printed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ppctl.cli.compose import compose
from ppctl.planner.search.layout_search import SearchProgress
from ppctl.planner.search.tune_groups import PlannedGroups, of_one_kind, tune_groups
from ppctl.planner.search.tune_layouts import tune_layouts
from ppctl.schedule.partition.partition import layout_text

PAGE = Path(__file__).resolve().parents[2] / "docs/planning.md"
BEGIN, END = "<!-- groups: begin -->\n", "<!-- groups: end -->"
COMMON = (
    "data=synthetic executor=mpmd run.dtype=bfloat16 run.platform=cpu tune.groups=unequal "
    "tune.schedules=[1f1b,interleaved] tune.best=1"
)
GPT3 = (
    "model.num_layers=96 model.d_model=12288 model.num_heads=96 model.activation=gelu "
    "model.seq_len=2048 data.vocab_size=51200"
)
LLAMA = "data.vocab_size=128256 model.seq_len=8192"
QWEN = "data.vocab_size=151936 model.seq_len=4096"
MIXTRAL = "data.vocab_size=32000 model.seq_len=4096"
MIXED = "tune.cluster=[{hosts:%d,hardware:h100},{hosts:%d,hardware:a100}]"


class Row(NamedTuple):
    """A model on a cluster, as overrides."""

    name: str
    model: str
    devices: str

    @property
    def words(self) -> list[str]:
        return f"{COMMON} {self.model} {self.devices}".split()


def rows() -> Iterator[Row]:
    """Yield the rows of the table."""
    models = {
        "Llama 3 8B": f"model=llama3_8b {LLAMA} data.batch_size=128",
        "Llama 3 70B": f"model=llama3_70b {LLAMA} data.batch_size=128",
        "GPT-3 175B": f"{GPT3} data.batch_size=256",
        "Llama 3.1 405B": f"model=llama3_405b {LLAMA} data.batch_size=256",
        "Mixtral 8x7B": f"model=mixtral_8x7b {MIXTRAL} data.batch_size=256",
        "Qwen3 30B-A3B": f"model=qwen3_30b_a3b {QWEN} data.batch_size=256",
        "Qwen3 235B-A22B": f"model=qwen3_235b_a22b {QWEN} data.batch_size=2048",
    }
    on = {
        "Llama 3 8B": (64,),
        "Llama 3 70B": (64, 256),
        "GPT-3 175B": (128,),
        "Llama 3.1 405B": (512,),
        "Mixtral 8x7B": (64,),
        "Qwen3 30B-A3B": (64,),
        "Qwen3 235B-A22B": (256,),
    }
    for name, numbers in on.items():
        for number in numbers:
            words = f"hardware=h100 tune.devices={number}"
            yield Row(f"{name}, {number} H100", models[name], words)
    for name in ("Llama 3 8B", "Llama 3 70B", "Mixtral 8x7B", "Qwen3 30B-A3B"):
        yield Row(f"{name}, 56 H100", models[name], "hardware=h100 tune.devices=56")
    for name, hosts in (("Llama 3 8B", 4), ("Llama 3 70B", 4), ("Mixtral 8x7B", 4)):
        each = 8 * hosts
        yield Row(f"{name}, {each} H100 and {each} A100", models[name], MIXED % (hosts, hosts))


def cells(row: Row) -> list[str]:
    """Return the cells of a row: seconds of equal and unequal ranks, gain, and the layout."""
    config = compose(row.words)
    began, progress = time.process_time(), SearchProgress(print)
    found = tune_groups(config, progress)
    cpu_s, one = time.process_time() - began, of_one_kind(config)
    tuned = None if one is None else tune_layouts(one, progress)
    best = tuned.found.best[0] if tuned is not None and tuned.found.best else None
    equal, unequal = found.equal, found.unequal
    assert unequal is not None, row.name
    gain = "" if equal is None else f"{equal.step_s / unequal.step_s - 1:+.1%}"
    is_unequal = len({*unequal.layout.ranks}) > 1
    any_s = "" if best is None else f"{best.step_s:.3f}"
    return [
        row.name,
        any_s,
        "" if equal is None else f"{equal.step_s:.3f}",
        f"{unequal.step_s:.3f}" if is_unequal else "none found",
        gain if is_unequal else "0",
        f"`{_layout(unequal)}`",
        f"{cpu_s:.0f}",
    ]


def _layout(found: PlannedGroups) -> str:
    layout = found.layout
    how = f"{layout.num_microbatches} microbatches, remat={layout.remat}"
    mesh = found.request.mesh.text
    return f"{mesh}, {layout_text(layout.layers)}, {how}".replace("|", "\\|")


HEAD = ("devices", "interleaved, s", "equal, s", "unequal, s", "gain", "1f1b layout", "CPU s")


def table(names: Sequence[str]) -> str:
    """Return the rows whose name contains one of `names` (all without names), as Markdown."""
    lines = [f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|"]
    for row in rows():
        if not names or any(name in row.name for name in names):
            lines.append(f"| {' | '.join(cells(row))} |")
            print(lines[-1], flush=True)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    text = table(sys.argv[1:])
    if not sys.argv[1:]:
        page = PAGE.read_text(encoding="utf-8")
        head, rest = page.split(BEGIN)
        PAGE.write_text(f"{head}{BEGIN}{text}{rest[rest.index(END) :]}", encoding="utf-8")
