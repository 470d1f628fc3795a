"""One record a family: adding a file to families/ is all that tables, formulas, searches and config
need.
"""

import ast
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.source_trees import nodes

import ppctl
from ppctl.config.schedule_from_config import settings_of_family
from ppctl.schedule.families.registry import FAMILIES, build
from ppctl.schedule.search.auto_search import published

ROOT = Path(ppctl.__file__).parent
TOY = """
from ppctl.schedule.families.family import Family, each_num_chunks, looped_bubble_s
from ppctl.schedule.families.looped_bfs import looped_bfs
from ppctl.schedule.ir import split_backward
from dataclasses import replace


def toy(num_ranks, num_microbatches, *, num_chunks=2):
    \"\"\"Toy: breadth first with split backwards.

    Bubble (p-1)(F+B)/V; peak activations m. Source: this test.
    \"\"\"
    return replace(split_backward(looped_bfs(num_ranks, num_microbatches, num_chunks=num_chunks)), name="toy")


FAMILIES = (
    Family("toy", toy, published="2026-01", bubble_s=looped_bubble_s, peak=lambda s: s.m,
           searched_knobs=each_num_chunks),
)
"""
USES = """
import contextlib, importlib, io, json, sys
from ppctl.schedule import families
from ppctl.schedule.families import registry

families.__path__.append(sys.argv[1])
importlib.reload(registry)
from ppctl.cli import main
from ppctl.config.schedule_from_config import named
from ppctl.planner.search.layout_space import Space
from ppctl.schedule.families.registry import FAMILIES, LOOPED_WHOLE, ON_RING
from ppctl.schedule.costs import Costs
from ppctl.schedule.search.auto_search import published

def printed(*words):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["schedule", *words, "mesh=1x4", "schedule.num_microbatches=8", "--json"]) == 0
    return json.loads(out.getvalue())

print(json.dumps({
    "last": list(FAMILIES)[-1],
    "is_split": FAMILIES["toy"].is_split,
    "on_ring": "toy" in ON_RING,
    "forward_backward": "toy" in LOOPED_WHOLE,
    "settings": type(named("toy", 8, 3)).__name__,
    "formulas": [FAMILIES["toy"].makespan_s(4, 8, Costs(), num_chunks=3), FAMILIES["toy"].peak_activations(4, 8)],
    "space": [chunks for family, chunks in Space(4, 16, 8, 1).kinds(4) if family == "toy"],
    "auto": [label for label, _ in published(4, 8, 3) if label.startswith("toy")],
    "listed": [row["schedule"] for row in printed("list")["schedules"]],
    "compared": [row["label"] for row in printed("compare", "1f1b", "toy", "--config-dir", sys.argv[2])],
}))
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Return the output of a process with one more file in families/."""
    code, conf = tmp_path_factory.mktemp("families"), tmp_path_factory.mktemp("conf")
    (code / "toy.py").write_text(textwrap.dedent(TOY))
    (conf / "schedule").mkdir()
    (conf / "schedule/toy.yaml").write_text("defaults:\n  - /schema_chunked@_here_\n\nname: toy\n")
    command = [sys.executable, "-c", USES, str(code), str(conf)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_file_in_families_is_all_that_a_new_family_needs(toy):
    assert toy["last"] == "toy"
    assert toy["listed"] == [*FAMILIES, "toy"]
    assert toy["compared"] == ["1f1b", "toy (num_chunks=2)"]
    assert toy["settings"] == "Chunked"
    assert toy["formulas"] == [8 * 3 + 3 * 3 / 3, 8]
    assert toy["space"] == [2, 4]
    assert toy["auto"] == ["toy (num_chunks=2)", "toy (num_chunks=3)"]


def test_facts_of_a_family_are_derived_from_its_sample(toy):
    assert (toy["is_split"], toy["on_ring"], toy["forward_backward"]) == (True, True, False)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_record_agrees_with_its_schedules(family):
    for size in ((2, 4), (3, 6), (4, 4), (8, 16)):
        schedule = build(family.name, *size)
        assert schedule.is_split == family.is_split
        assert schedule.num_chunks == family.num_chunks
    settable = {key: value for key, value in family.knobs.items() if key != "group_size"}
    assert settings_of_family(family.name)(name=family.name).knobs() == settable
    for knobs in family.searched_knobs(4):
        assert knobs.keys() <= family.knobs.keys()


def test_searches_try_at_most_max_chunks():
    for max_chunks in (1, 2, 3):
        assert max(schedule.num_chunks for _, schedule in published(4, 8, max_chunks)) == max_chunks


def test_no_family_is_named_outside_families():
    found = []
    for file in ROOT.rglob("*.py"):
        place = str(file.relative_to(ROOT))
        if (
            place.startswith("schedule/families/") or place == "config/groups/schedule_settings.py"
        ):  # the latter: defaults of settings
            continue
        strings = {node.value for node in nodes(file) if isinstance(node, ast.Constant)}
        found += [(place, name) for name in FAMILIES if name in strings]
    assert found == []
