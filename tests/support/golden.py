"""The golden files: schedules of published figures as CSV. `make golden` rewrites them and shows
what changed.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from ppctl.schedule.families.registry import build
from ppctl.schedule.schedule_text import to_csv

FOLDER = Path(__file__).parents[1] / "golden"
CASES = {  # file: family, ranks, microbatches, knobs
    "gpipe_p4_m4.csv": ("gpipe", 4, 4, {}),  # Huang et al. 2019, figure 2c
    "1f1b_p4_m8.csv": ("1f1b", 4, 8, {}),  # Narayanan et al. 2021 (2104.04473), figure 4 top
    "eager_1f1b_p4_m8.csv": ("eager_1f1b", 4, 8, {}),  # Zhuang et al. 2022
    "interleaved_p4_m8_v2.csv": (
        "interleaved",
        4,
        8,
        {"num_chunks": 2},
    ),  # 2104.04473, figure 4 bottom
    "looped_bfs_p4_m8_v2.csv": (
        "looped_bfs",
        4,
        8,
        {"num_chunks": 2},
    ),  # Lamy-Poirier 2023 (2211.05953), figure 2d
    "zb_h1_p4_m8.csv": ("zb_h1", 4, 8, {}),  # Qi et al. 2023 (2401.10241), figure 2 top
    "zb_h2_p4_m8.csv": ("zb_h2", 4, 8, {}),  # 2401.10241, figure 2 bottom
    "interleaved_zb_p4_m8_v2.csv": (
        "interleaved_zb",
        4,
        8,
        {"num_chunks": 2},
    ),  # no figure; optimal, see test_bounds.py
    "zb_v_p4_m8.csv": ("zb_v", 4, 8, {}),  # 2401.10241, figure 6
    "v_half_p4_m8.csv": ("v_half", 4, 8, {}),  # Qi et al. 2024 (2405.15362), figure 4
    "v_min_p4_m8.csv": ("v_min", 4, 8, {}),  # 2405.15362, figure 4
    "gis_p4_m8_v2.csv": ("gis", 4, 8, {"num_chunks": 2}),  # Wan et al. 2025 (2503.01328)
    "dualpipe_v_p4_m10.csv": (
        "dualpipe_v",
        4,
        10,
        {},
    ),  # the eight steps of github.com/deepseek-ai/DualPipe
    "hanayo_p4_m4_w1.csv": (
        "hanayo",
        4,
        4,
        {"num_waves": 1},
    ),  # Liu et al. 2023 (2308.15762), figure 4
    "hanayo_p4_m4_w2.csv": ("hanayo", 4, 4, {"num_waves": 2}),  # the same, two waves
}


def render(name: str) -> str:
    """The CSV that `name` must hold."""
    family, num_ranks, num_microbatches, knobs = CASES[name]
    return to_csv(build(family, num_ranks, num_microbatches, **knobs).ranks)


def rewrite() -> None:
    """Write every golden file and print the difference to the last one."""
    FOLDER.mkdir(exist_ok=True)
    for name in CASES:
        path = FOLDER / name
        old, new = path.read_text() if path.exists() else "", render(name)
        print(
            "".join(difflib.unified_diff(old.splitlines(True), new.splitlines(True), name, name)),
            end="",
        )
        path.write_text(new)


if __name__ == "__main__":
    rewrite()
