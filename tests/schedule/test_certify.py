"""Certificates of CP-SAT: those of schedules.md, and what it cannot do."""

import json

import pytest

from ppctl import cli
from ppctl.errors import ConfigError
from ppctl.schedule import build
from ppctl.schedule.costs import Costs
from ppctl.schedule.search.auto import choose
from ppctl.schedule.search.certify import certify
from ppctl.schedule.simulate import peak_activations, simulate

UNIT, REAL = Costs(), Costs(1, 1.05, 0.75, 0.1)


@pytest.mark.parametrize(
    ("family", "cap", "shortest_s"),
    [
        ("zb_h1", 4, 27),
        ("zb_h2", 7, 27),
        pytest.param("interleaved", 5.5, 28.5, marks=pytest.mark.full),
        pytest.param("v_min", 2, 29.5, marks=pytest.mark.full),
    ],
)
def test_published_schedules_are_the_shortest_under_their_own_cap(family, cap, shortest_s):
    found = certify(build(family, 4, 8), UNIT)
    assert (found.cap, found.lower_bound_s, found.shortest_s, found.is_proven) == (cap, shortest_s, shortest_s, True)


def test_a_shorter_order_is_found_where_there_is_one():
    schedule = build("1f1b", 2, 4)
    found = certify(schedule, UNIT, cap=4)
    assert found.shortest_s == found.lower_bound_s == simulate(schedule, UNIT).makespan_s == 15
    found = certify(build("v_half", 2, 2), REAL, cap=2)
    assert found.is_proven
    assert found.shortest_s < simulate(build("v_half", 2, 2), REAL).makespan_s
    assert found.shortest_s == simulate(found.schedule, REAL).makespan_s
    assert max(peak_activations(found.schedule)) <= 2


@pytest.mark.parametrize("cap", [1, 1.5, 2])
def test_auto_is_as_short_as_the_proof_on_its_placement(cap):
    choice = choose(2, 3, REAL, cap, max_chunks=2)
    found = certify(choice.best.schedule, REAL, cap)
    assert found.is_proven
    assert choice.best.length_s == pytest.approx(found.shortest_s)


def test_what_is_out_of_reach_is_refused():
    with pytest.raises(ConfigError, match=r"3072 tasks are more than the 2000 .* Use fewer ranks"):
        certify(build("zb_h1", 16, 64), UNIT)
    with pytest.raises(ConfigError, match=r"no common unit of time .* Round them"):
        certify(build("zb_h1", 2, 2), Costs(1.00000007, 0.9999999, 1.0000003))


def test_the_command_says_what_is_proven(capsys):
    line = ["certify", "schedule=zb_h1", "mesh=1x2", "schedule.num_microbatches=4"]
    assert cli.main(["schedule", *line]) == 0
    said = capsys.readouterr().out
    assert said.startswith(
        "zb_h1, 2 ranks, 4 microbatches: 13 s. No order under 2 activations on this placement takes less"
    )
    assert cli.main(["schedule", *line, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["is_proven"] is True
    for words in (["certify", "x.csv"], ["certify", "--seconds", "0"], ["show", "--seconds", "3"]):
        assert cli.main(["schedule", *words]) == 2
        assert "\n" not in capsys.readouterr().err.strip()
