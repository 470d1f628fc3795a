"""The golden files: schedules of published figures as CSV. `make golden` rewrites them and shows what changed."""

from __future__ import annotations

import difflib
from pathlib import Path

from ppctl.schedule import build
from ppctl.schedule.text import to_csv

FOLDER = Path(__file__).with_name("golden")
CASES = {  # file: family, ranks, microbatches, knobs
    "gpipe_p4_m4.csv": ("gpipe", 4, 4, {}),  # Huang et al. 2019, figure 2c
    "1f1b_p4_m8.csv": ("1f1b", 4, 8, {}),  # Narayanan et al. 2021 (2104.04473), figure 4 top
    "eager_1f1b_p4_m8.csv": ("eager_1f1b", 4, 8, {}),  # Zhuang et al. 2022
    "interleaved_p4_m8_v2.csv": ("interleaved", 4, 8, {"num_chunks": 2}),  # 2104.04473, figure 4 bottom
}


def render(name: str) -> str:
    """The CSV that `name` must hold."""
    family, num_ranks, num_microbatches, knobs = CASES[name]
    return to_csv(build(family, num_ranks, num_microbatches, **knobs).ranks)


def rewrite() -> None:
    """Nothing; writes every golden file and prints the difference to what was there."""
    FOLDER.mkdir(exist_ok=True)
    for name in CASES:
        path = FOLDER / name
        old, new = path.read_text() if path.exists() else "", render(name)
        print("".join(difflib.unified_diff(old.splitlines(True), new.splitlines(True), name, name)), end="")
        path.write_text(new)


if __name__ == "__main__":
    rewrite()
