"""What the README shows is so: its commands compose, its tree is the tree, its charts are what ppctl draws."""

import re
import shlex
from pathlib import Path

import pytest

from ppctl.cli import main
from ppctl.schedule import FAMILIES, build
from ppctl.schedule.costs import Costs
from ppctl.schedule.simulate import simulate
from ppctl.schedule.ticks import ticks

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = sorted(set(re.findall(r"`(ppctl (?:train|verify|bench|plan|tune|inspect) [^`]*)`", README)))


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_compose(command, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = [word for word in shlex.split(command)[1:] if word not in ("-m", "--help", "--cfg", "job")]
    words = [word for word in words if not word.startswith("hydra")]
    words = [re.sub(r"=(?:tag\(log,interval\()?([\w-]+),.*", r"=\1", word) for word in words]  # a job of a sweep
    assert main([*words, "--cfg", "job"]) == 0
    assert "num_microbatches" in capsys.readouterr().out


def test_the_tree_names_what_is_there_and_all_of_it():
    block = re.search(r"## Where things are\n\n```\n(.*?)```", README, re.DOTALL)
    assert block is not None
    named = set()
    for line in block[1].splitlines():
        parent = "ppctl/" if line.startswith(" ") else ""
        for column in re.split(r"\s{2,}", line.strip()):
            if not re.fullmatch(r"\w+(\.\w+|/)?", column):  # what it is, in words
                break
            named.add(parent + column)
    missing = {name for name in named if not (ROOT / name).exists()}
    assert not missing
    there = {f"ppctl/{path.name}{'/' * path.is_dir()}" for path in (ROOT / "ppctl").iterdir()}
    hidden = {"ppctl/__init__.py", "ppctl/__pycache__/"}
    assert there - hidden <= named


def test_charts_are_what_ppctl_draws(capsys):
    shown = re.findall(r"\$ (ppctl schedule show .*)\n((?:(?!```).*\n)*)", README)
    assert shown
    for command, expected in shown:
        assert main(shlex.split(command)[1:]) == 0
        drawn = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        assert [line for line in expected.splitlines() if line] == [line for line in drawn if line][:-1]  # no legend


def test_every_family_stands_in_the_schedule_table():
    assert set(re.findall(r"^\| `(\w+)`[^|]*\| ", README, re.MULTILINE)) >= set(FAMILIES)


def test_the_schedule_table_says_what_lockstep_costs():
    costs, found = Costs(), dict(re.findall(r"^\| `(\w+)`.* \| ([^|]+) \|$", README, re.MULTILINE))
    for family in FAMILIES:
        schedule = build(family, 8, 32)
        stretch = ticks(schedule, costs).makespan_s(costs) / simulate(schedule, costs).makespan_s
        assert found[family] == f"{stretch:.2f}", family


def test_make_targets_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([\w-]+)", README)) - {"help"} <= targets
