"""README: schedules, plans and searches, before anything runs; and the run takes the planned time and memory."""

import json
import re

import numpy as np
import pytest
from support.promise import MODEL, records, train

from ppctl import cli
from ppctl.schedule.families.registry import FAMILIES

LAYOUTS = {
    "spmd": "mesh=2x2 schedule=interleaved",
    "mpmd": "mesh=1x2x2 schedule=zb_v executor=mpmd executor.remat=full",
}
UNITS = "costs.forward_s=1 costs.input_grad_s=1 costs.weight_grad_s=1"


def printed(capsys, *words, code=0):
    capsys.readouterr()
    assert cli.main([*words, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_14_schedules_are_listed_next_to_their_lower_bounds(capsys):
    """every schedule with bubble and memory next to its lower bound"""
    rows = printed(capsys, *["schedule", "list", "mesh=1x8", "schedule.num_microbatches=32"])[
        "schedules"
    ]
    assert {row["schedule"] for row in rows} == set(FAMILIES)
    assert len(rows) == 14
    for row in rows:
        assert row["lower_bound_s"] <= row["makespan_s"]
        assert row["peak_activations_lower_bound"] <= row["peak_activations"]
        assert 0 <= row["bubble_fraction"] < 1


def test_a_search_keeps_to_a_memory_cap(capsys):
    """**14 schedules** from GPipe to zero bubble, custom ones from a CSV file, and a search under a
    memory cap.
    """
    words = f"mesh=1x4 schedule.num_microbatches=8 {UNITS}".split()
    found = printed(
        capsys, "schedule", "show", "schedule=auto", "schedule.max_activations=3", *words
    )
    rows = printed(capsys, "schedule", "list", *words)["schedules"]
    fitting = [row["makespan_s"] for row in rows if row["peak_activations"] <= 3]
    assert max(found["peak_activations"]) <= 3
    assert found["lower_bound_s"] <= found["makespan_s"] <= min(fitting)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_run_has_the_stages_memory_and_time_of_its_plan(layout, tmp_path, capsys):
    """stages, bubble, step time and memory, before anything runs"""
    words = [*MODEL, *layout.split()]
    planned = printed(capsys, "plan", *words)
    compiled = (
        printed(capsys, "plan", *words, "plan.compile=true") if "spmd" not in layout else planned
    )
    train(tmp_path / "run", layout, num_steps=3)
    out = capsys.readouterr().out
    record = records(tmp_path / "run")[-1]
    name = planned["schedule"].split()[0]
    assert re.search(rf"^schedule +{name}, 4 microbatches", out, re.MULTILINE)
    assert len(planned["stages"]) == 4
    assert [stage["num_layers"] for stage in planned["stages"]] == planned["partition"]
    for key in ("ideal_bubble_fraction", "predicted_bubble_fraction"):
        assert record[key] == planned[key]
    assert record["predicted_step_time_s"] == planned["step_time_s"]
    assert record["predicted_memory_bytes"] == max(planned["total_bytes"])
    (memory,) = records(tmp_path / "run", "memory.json")
    assert [sum(rank.values()) for rank in memory["ranks"]] == compiled[
        "total_bytes"
    ]  # bytes as compiled


def test_the_fastest_layout_for_64_gpus_is_found_without_them(capsys, tmp_path, monkeypatch):
    """**Before you pay for hardware**: step time, memory and the fastest layout for 64 GPUs,
    from a laptop.
    """
    monkeypatch.chdir(tmp_path)
    words = ["hardware=h100", "tune.devices=64", "data.batch_size=512"]
    words += ["tune.schedules=[gpipe,1f1b]", "tune.tp=[1]", "tune.cp=[1]"]
    found = printed(capsys, "tune", *words, "tune.best=1")
    (best,) = found["best"]
    assert found["devices"] == "64 x h100"
    assert np.prod([*best["mesh"].values()]) == 64
    assert best["step_time_s"] > 0
    assert 0 < best["total_bytes"] < found["limit_bytes"]
    assert "for 64 devices" in (tmp_path / "recipes/tuned.yaml").read_text()


def test_a_recipe_that_tune_wrote_trains(capsys, tmp_path, monkeypatch):
    """the fastest mesh, schedule, partition, microbatches and remat, as a recipe"""
    monkeypatch.chdir(tmp_path)
    words = [
        *MODEL,
        "mesh=1x2",
        "tune.schedules=[1f1b]",
        "tune.remat=[layer]",
        "tune.best=1",
        "run.num_steps=2",
    ]
    (best,) = printed(capsys, "tune", *words)["best"]
    found = printed(capsys, "train", "--config-dir", ".", "recipes=tuned")
    assert (found["status"], found["step"]) == ("finished", 2)
    assert found["predicted_step_time_s"] == best["step_time_s"]
    assert found["predicted_memory_bytes"] == best["total_bytes"]


def test_ranks_are_rehearsed_one_by_one_on_one_device(capsys):
    """the same, from timing each rank's tasks on one device"""
    words = ["rehearse", *MODEL, "mesh=1x2", "schedule=1f1b", "executor.remat=layer"]
    found = printed(capsys, *words)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert found["step_time_s"] > max(rank["tasks_s"] for rank in found["ranks"])
    assert 0 < found["bubble_fraction"] < 1
