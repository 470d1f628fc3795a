"""`ppctl tune tune.groups=unequal`: it estimates steps as `ppctl plan` predicts them, and writes the
layout that it prints.
"""

import json
from dataclasses import replace

import pytest
from support.tuning import composed

from ppctl import cli
from ppctl.planner.cost.predict_step import predict_job
from ppctl.planner.make_plan import predicted
from ppctl.planner.search.layout_search import SearchProgress
from ppctl.planner.search.submesh_costs import by_axes
from ppctl.planner.search.tune_groups import costs_of, tune_groups
from ppctl.planner.show.plan_page import cluster_of
from ppctl.reports.terminal_output import seconds_text
from ppctl.schedule.remat import Remat
from ppctl.training.pipeline.job import assemble, open_data

pytestmark = pytest.mark.usefixtures("machine")

# three clustered layers do not divide four devices
ALPA = (
    "recipes=alpa_mlp model.layers=auto model.num_layers=3 data.options.dim=2048 "
    "data.batch_size=2048 run.eval_every=null hardware=a100 tune.devices=4 "
    "tune.microbatches=[16] tune.groups=unequal"
)
LLAMA = (
    "model=llama2_7b data=synthetic data.vocab_size=32000 model.seq_len=2048 data.batch_size=32 "
    "executor=mpmd run.dtype=bfloat16 run.platform=cpu tune.groups=unequal tune.microbatches=[16] "
    "tune.tp=[1,2] tune.cp=[1] tune.remat=[none]"
)
MIXED = "tune.cluster=[{hosts:1,hardware:h100},{hosts:1,hardware:a100}]"


def found(*words):
    return tune_groups(composed([word for text in words for word in text.split()]), quiet())


def quiet(max_s=None):
    return SearchProgress(lambda _line: None, max_s)


def test_layers_that_devices_do_not_divide_gain_by_unequal_ranks(capsys, tmp_path):
    words = [*ALPA.split(), "tune.best=1", "tune.schedules=[1f1b]", "tune.recipe=mine"]
    assert cli.main(["tune", *words]) == 0
    out = capsys.readouterr().out
    lines = out[out.index("stages of the unequal ranks") :].splitlines()
    assert [line.split() for line in lines[3:6]] == [
        ["0", "0", "0-1", "1x2", "dp=1", "fsdp=2", "a100"],
        ["1", "1", "2", "1x1", "dp=1", "fsdp=1", "a100"],
        ["2", "2", "3", "1x1", "dp=1", "fsdp=1", "a100"],
    ]
    assert "gain of unequal ranks: 1" in out
    assert "% over equal ranks of the same schedule." in out
    assert "idle" not in out
    # the recipe is this layout, and its plan has the same numbers
    job = assemble(composed(["recipes=mine"], str(tmp_path)), only_planned=True)
    assert job.config.mesh.text == "[{fsdp:2},{ranks:1-2,dp:1}]"
    assert job.config.schedule.name == "1f1b"
    step_s = predict_job(job).step_s
    (row,) = (line.split() for line in out.splitlines() if line.startswith("unequal "))
    assert row[-4:-2] == seconds_text(step_s, step_s).split()
    (row,) = (line.split() for line in out.splitlines() if line.startswith("equal "))
    assert float(row[-4]) > 1000 * step_s
    # its page draws the devices of each rank
    figure = cluster_of(job, predicted(job))
    numbers = [part.partition("</title>")[0] for part in figure.split("<title>")[1:]]
    assert [number.partition(":")[0] for number in numbers] == [f"device {n}" for n in range(4)]
    assert numbers[0].endswith("rank 0, layers 0: 2 x a100, fsdp=2")
    assert numbers[3].endswith("rank 2, layers 2: 1 x a100")


@pytest.mark.full
def test_equal_ranks_are_estimated_as_planned():
    groups = found(LLAMA, "hardware=h100 tune.devices=16")
    assert groups.equal is not None
    assert len(groups.equal.layout.ranks) > 1
    assert groups.equal.layout.seconds == pytest.approx(groups.equal.step_s, rel=0.05)
    assert groups.equal.plan.fits


@pytest.mark.full
def test_faster_chips_get_more_layers(tmp_path):
    groups = found(LLAMA, MIXED)
    assert groups.devices == "8 x h100 and 8 x a100"
    layout = groups.unequal.layout
    assert {*layout.chips} == {"h100", "a100"}
    layers = dict.fromkeys(layout.chips, 0)
    for chip, number in zip(layout.chips, layout.layers, strict=True):
        layers[chip] += number
    assert layers["h100"] > 1.5 * layers["a100"]
    assert groups.unequal.request.hardware.ranks == [*layout.chips]
    assert groups.unequal.plan.fits
    # the recipe has the chips, too
    words = [*LLAMA.split(), MIXED, "tune.recipe=mixed", "--json"]
    assert cli.main(["tune", *words]) == 0
    assert composed(["recipes=mixed"], str(tmp_path)) == replace(
        groups.unequal.request, run=composed(["recipes=mixed"], str(tmp_path)).run
    )


def test_memory_limits_the_microbatches_in_flight():
    config = composed([*LLAMA.split(), "hardware=h100", "tune.devices=8"])
    costs = costs_of(config, open_data(config))
    options = costs.options(16, Remat.NONE, 1)
    half = replace(costs, room=0.5).options(16, Remat.NONE, 1)
    in_flight = {each.label: each.costs.in_flight for each in options}
    for each in half:
        if each.label in in_flight:
            assert (each.costs.in_flight <= in_flight[each.label]).all()
    assert all(
        (s % each[0].label.sizes.num_devices == 0)
        for each in by_axes(options)
        for s in each[0].starts
    )


@pytest.mark.full
def test_devices_without_a_stage_are_named(capsys):
    words = [*ALPA.split(), "data.batch_size=16", "model.num_layers=1", "tune.devices=3"]
    assert cli.main(["tune", *words, "tune.recipe=null"]) == 0
    out = capsys.readouterr().out
    assert "idle devices: 1-2, the last 2." in out
    assert "gain of unequal ranks: none, equal ranks are the fastest." in out
    assert cli.main(["tune", *words, "tune.recipe=null", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["unequal_ranks"] == document["equal_ranks"]
    assert document["unequal_ranks"]["layers"] == [1]
    assert document["any_schedule"]["best"] == []


def test_a_search_for_groups_ends_at_its_limit():
    config = composed(ALPA.split())
    ended = tune_groups(config, quiet(max_s=1e-9))
    assert (ended.unequal, ended.ended_by) == (None, "tune.max_s=1e-09")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("executor=spmd", "which executor=spmd does not allow. Use executor=mpmd."),
        ("mesh.order=pp-dp-fsdp", "which mesh.order=pp-dp-fsdp does not allow. Use auto."),
        (MIXED, "tune.devices=4 and tune.cluster both state the devices. Leave out one"),
        (f"tune.devices=null {MIXED}", "hardware=a100 and tune.cluster both state the chips."),
        (
            "tune.devices=null hardware=auto tune.cluster=[{hosts:1,hardware:v5e}]",
            "tune.cluster: hardware=v5e states no devices of a host.",
        ),
        ("tune.groups=equal tune.cluster=[{hosts:1,hardware:h100}]", "Use tune.groups=unequal, or"),
        ("tune.devices=[4,8]", "but tune.devices=[4, 8]. Use one number, or tune.groups=equal."),
        ("tune.measure=1", "but tune.measure=1. Use 0, or tune.groups=equal."),
        ("tune.launch=slurm", "but tune.launch=slurm. Use null, or tune.groups=equal."),
        ("tune.schedules=[gpipe]", "but tune.schedules=['gpipe']. Use 1f1b, or tune.groups=equal."),
        ("tune.vocab=[parallel]", "but tune.vocab=['parallel']. Use whole, or tune.groups=equal."),
    ],
)
def test_a_setting_without_unequal_ranks_is_refused(words, message, capsys):
    assert cli.main(["tune", *ALPA.split(), *words.split()]) == 2
    assert message in capsys.readouterr().err
