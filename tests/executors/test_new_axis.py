"""An axis that only a test adds to the table: everything follows from its record."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.environment import BY_USER

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Return the output of a process with the axis: see support.toy_axis."""
    script, path = ROOT / "tests/support/toy_axis.py", os.pathsep.join((f"{ROOT}", f"{ROOT}/tests"))
    done = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        cwd=tmp_path_factory.mktemp("toy"),
        env=BY_USER | {"PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.full
def test_a_model_divided_over_a_new_axis_trains_like_the_whole_one(found):
    training = found["training"]
    assert training["shard"] == [1, 1, 1, 8, 12 // 4]  # columns over xp and tp together
    assert max(training["spmd"], training["mpmd"]) < 1e-12


@pytest.mark.full
def test_a_whole_model_trains_over_a_new_axis_as_over_dp(found):
    assert found["training"]["not divided"] < 1e-12


def test_sends_and_sums_over_a_new_axis_are_planned(found):
    plan = json.loads(found["commands"]["plan"]["out"])
    # 2 layers gather and scatter 8 rows of 8 float32 over 2 devices: 1 s a message, 1 kB a second
    row = 8 * 4
    assert plan["stages"][0]["forward_s"] == pytest.approx(
        2 * 2 * (1 + 8 * row / 2 / 1000), rel=1e-3
    )
    # embedding and head are gathered over pp and their gradients scattered; then the shards of
    # these and the scales of 2 layers are summed over xp, which divides all else
    embed_head = (6 + 4) * row
    sums = 2 * (1 + (embed_head / 2 + 2 * row) / 2 / 1000)
    gathers = 2 * (1 + embed_head / 2 / 1000)
    assert plan["per_step_overhead_s"] == pytest.approx(gathers + sums, rel=1e-3)
    assert "stages divided over xp=2" in plan["assumes"]
    assert (
        "nothing computed while devices along xp send, but for weight gradients" in plan["assumes"]
    )


def test_tune_searches_its_sizes(found):
    rows = json.loads(found["commands"]["tune"]["out"])["best"]
    assert {row["mesh"]["xp"] for row in rows} == {2}


def test_inspect_names_it(found):
    text = found["commands"]["inspect"]["out"]
    assert "mesh=1x2 mesh.xp=2 (dp=1, pp=2, fsdp=1, xp=2)" in text
    assert re.search(r"all-gather +xp ", text), text
    assert re.search(r"reduce-scatter +xp ", text), text
    assert re.search(r"all-reduce +xp +1 +1 +232 B", text), text  # sizes that xp does not divide


def test_the_setting_of_a_new_axis_is_composed_explained_and_checked(found):
    shown = found["commands"]
    assert "  xp: 2\n" in shown["cfg"]["out"]
    assert "mesh.xp=1        parts of a toy's columns\n" in shown["help"]["out"]
    assert (
        "mesh.xpp is not a setting of mesh=1x2 mesh.xp=2. Did you mean mesh.xp?"
        in shown["typo"]["err"]
    )
    assert (
        "num_microbatches*mesh.dp*mesh.fsdp*mesh.xp = 2*1*1*2 = 4. Use data.batch_size=8 or 12"
        in shown["batch"]["err"]
    )
