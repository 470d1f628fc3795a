"""`ppctl tune`: its layouts are predicted as by `ppctl plan`, their gain is printed, wrong requests are refused."""

import json
import math
import re
from dataclasses import asdict
from math import inf

import pytest
from support.remedies import suggestions
from support.tuning import composed, layout, request

from ppctl import cli
from ppctl.planner.cost.predict_step import predict_job
from ppctl.planner.rehearsal.timed_runs import Timing
from ppctl.planner.search.layout_space import Space
from ppctl.planner.search.tune_layouts import Found, Tuned
from ppctl.planner.show import tune_terminal
from ppctl.reports.terminal_output import size_text
from ppctl.schedule.mesh_axes import MeshSizes
from ppctl.training.pipeline.job import assemble

pytestmark = pytest.mark.usefixtures("machine")


def step_s(job):
    """The seconds of a step that are predicted."""
    time = predict_job(job).time
    assert time is not None
    return time.total_s


# --- found layouts ------------------------------------------------------------------------------


def test_a_table_a_line_about_pipelines_and_a_recipe(tuned):
    code, out, err = tuned("mesh=2x2", best=10)
    assert (code, err.count("wrote ")) == (0, 1)
    assert "ppctl: wrote recipes/tuned.yaml (" in err
    first, head, *_, last = out.strip().splitlines()
    assert re.fullmatch(
        r"\w+, float32 compute, batch of [\d,]+ (rows|sequences of .* tokens)", first
    )
    limit = r"each \(this machine's memory, shared by 4 simulated devices\)"
    assert re.fullmatch(
        rf"[\d,]+ layouts for 4 x host of .* {limit}: 0 too large, [\d,]+ simulated in [\d.]+ s",
        head,
    )
    assert len(re.findall(r"^\d+ +\d+x", out, re.MULTILINE)) == 10
    assert "pipeline" in out
    assert re.search(r"predicted +per-step", out)
    assert ("|" in out) == ("stages as partition.layers takes them: E embedding, t layer" in out)
    assert (
        last
        == "the first is a recipe now, recipes/tuned.yaml: ppctl train --config-dir . recipes=tuned"
    )


@pytest.mark.full
def test_the_document_holds_the_settings_to_train_each_layout(tuned, tmp_path):
    code, out, _ = tuned("mesh=2x2", "--json", "tune.recipe=null", best=10)
    document = json.loads(out)
    assert (code, document["recipe"], list(tmp_path.iterdir())) == (0, None, [])
    assert document["num_layouts"] > document["num_simulated"] >= len(document["best"]) == 10
    times = [layout["step_time_s"] for layout in document["best"]]
    assert times == sorted(times)
    for each in document["best"][::4]:
        asked = request(*each["overrides"])
        assert asdict(asked.mesh.sizes) == each["mesh"]
        assert step_s(assemble(asked)) == pytest.approx(each["step_time_s"], rel=1e-9)


@pytest.mark.full
def test_speeds_are_printed_in_tokens_only_for_text(tuned, capsys):
    words = [
        "mesh=1x2",
        "hardware=h100",
        "run.dtype=bfloat16",
        "tune.schedules=[gpipe]",
        "tune.best=2",
    ]
    text = (
        "model.num_layers=4 model.d_model=32 model.seq_len=16 data=synthetic data.batch_size=32 "
        "run.platform=cpu"
    )
    assert cli.main(["tune", *text.split(), *words]) == 0
    out = capsys.readouterr().out
    assert "tok/s" in out
    assert "MFU" in out
    assert "tok/s" not in tuned(*words)[1]
    assert cli.main(["tune", *text.split(), *words, "plan.tokens=1e9", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    budget, step_s = document["token_budget"], document["best"][0]["step_time_s"]
    assert (
        budget["num_steps"]
        == math.ceil(1e9 / document["batch_tokens"])
        == math.ceil(1e9 / (32 * 16))
    )
    assert budget["device_hours"] == pytest.approx(2 * budget["num_steps"] * step_s / 3600)
    assert cli.main(["tune", *text.split(), *words, "plan.tokens=1e9"]) == 0
    assert re.search(
        r"^tokens, with the first: 1e9 in .* hours: .* GPU-hours, ",
        capsys.readouterr().out,
        re.MULTILINE,
    )


DIVIDED = (
    "model.num_layers=2 model.d_model=32 model.seq_len=16 data=synthetic data.batch_size=16 "
    "run.platform=cpu mesh=2x4 tune.best=2 tune.schedules=[1f1b] tune.remat=[none] hardware=h100 "
    "run.dtype=bfloat16 tune.recipe=null --json"
)


@pytest.mark.full
@pytest.mark.parametrize("executor", ["mpmd", "spmd"])
def test_stages_are_divided_over_tp_and_cp_as_the_request_allows(executor, capsys):
    words = [*DIVIDED.split(), f"executor={executor}", "tune.tp=[1,2]", "tune.cp=[2]"]
    assert cli.main(["tune", *words]) == 0
    document = json.loads(capsys.readouterr().out)
    meshes = [layout["mesh"] for layout in document["best"]]
    assert all(math.prod(mesh.values()) == 8 and mesh["cp"] == 2 for mesh in meshes)
    assert cli.main(["tune", *words, "tune.tp=[2]"]) == 0
    layout = json.loads(capsys.readouterr().out)["best"][0]
    assert (layout["mesh"]["tp"], layout["mesh"]["cp"]) == (2, 2)
    asked = composed(
        [*DIVIDED.replace("--json", "").split(), f"executor={executor}", *layout["overrides"]]
    )
    assert asdict(asked.mesh.sizes) == layout["mesh"]
    assert step_s(assemble(asked)) == pytest.approx(layout["step_time_s"], rel=1e-9)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "tune.tp=[8]",
            r"model.num_heads=4 is not a multiple of tune.tp=\[8\]: .* Use tune.tp=\[2, 4\], or "
            r"other sizes",
        ),
        (
            "tune.tp=[1] tune.cp=[8] model.seq_len=8",
            r"8 tokens are fewer than the 2\*tune.cp = 2\*8 = 16 .* tune.cp=\[4\] at",
        ),
    ],
)
def test_models_that_tp_and_cp_cannot_divide_are_refused_before_the_search(words, message, capsys):
    assert cli.main(["tune", *DIVIDED.replace("--json", "").split(), *words.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert re.search(message, err), err
    ((suggested,),) = suggestions(err)  # a setting of tune: mesh.tp would change nothing
    name = suggested.partition("=")[0].removeprefix("tune.")
    assert name in words
    assert 8 not in getattr(composed([suggested]).tune, name)


# --- none fits, none is needed ------------------------------------------------------------------


@pytest.mark.full
def test_if_no_layout_fits_the_least_memory_of_each_is_stated(tuned, tmp_path):
    small = ("mesh=2x2", "--json", "plan.memory_gib=0.0001")
    code, out, _ = tuned(*small)
    need = json.loads(out)["smallest_bytes"]
    assert (code, list(tmp_path.iterdir())) == (1, [])
    code, out, _ = tuned(*small[:1], *small[2:])
    assert code == 1
    assert out.splitlines()[-1] == (
        f"no layout fits: each needs {size_text(need)} a device or more. Use more devices "
        "(tune.devices), or a smaller model."
    )
    assert tuned("mesh=2x2", f"plan.memory_gib={(need - 1) / 2**30}")[0] == 1


def test_a_search_ends_at_its_limit(tuned, tmp_path):
    code, out, _ = tuned("mesh=2x2", "tune.max_s=1e-9")
    assert code == 1
    assert out.endswith("the search ended early (tune.max_s=1e-09): nothing is predicted yet.\n")
    assert list(tmp_path.iterdir()) == []


def said(best, alone):
    """The line about pipelines."""
    found = Found(tuple(best), alone, 9, 0, 9, None, None)
    return tune_terminal._about_pipelines(
        Tuned(found, "mlp", "float32", 8, None, 0.1, "4 x host", None, None, 1, None)
    )


def test_a_line_states_whether_a_pipeline_is_faster():
    one, flat, slow = layout((1, 4, 1), 1.0), layout((4, 1, 1), 1.5), layout((2, 2, 1), 2.0)
    assert said([flat, slow], flat) == "no pipeline is needed: mesh=4x1 is fastest."
    assert said([one], None) == "without a pipeline (mesh.pp=1) nothing fits."
    assert said([one, slow], flat) == (
        "without a pipeline the best is mesh=4x1, 4 microbatches, remat=none: 1.50 times as long."
    )
    # measured seconds, if both were measured
    one, flat = layout((1, 4, 1), 1.0, measured_s=3.0), layout((4, 1, 1), 1.5, measured_s=3.3)
    assert said([one, flat], flat).endswith("1.10 times as long.")


# --- measuring ----------------------------------------------------------------------------------


@pytest.mark.full
def test_measured_layouts_are_ranked_by_measurement(tuned, monkeypatch):
    _, out, _ = tuned("mesh=2x2", "--json", best=4)
    planned = [layout["overrides"] for layout in json.loads(out)["best"]]
    seconds = {1: 0.3, 2: 0.1, 3: 0.2}
    measured = iter(seconds.values())
    monkeypatch.setattr(
        "ppctl.planner.search.tune_layouts.run_steps", lambda job: Timing(next(measured), 0.0)
    )
    _, out, _ = tuned("mesh=2x2", "--json", "tune.measure=3", best=4)
    document = json.loads(out)
    assert [layout["overrides"] for layout in document["best"]] == [
        planned[i] for i in (1, 2, 0, 3)
    ]
    assert [layout["measured_s"] for layout in document["best"]] == [0.1, 0.2, 0.3, None]
    assert next(measured, inf) == inf


@pytest.mark.full
@pytest.mark.slow
def test_two_are_run_and_timed(tuned, tmp_path):
    code, out, _ = tuned("mesh=1x2", "tune.measure=2", "tune.schedules=[1f1b]", "--json", best=3)
    first, second, third, *_ = json.loads(out)["best"]
    assert code == 0
    assert 0 < first["measured_s"] <= second["measured_s"]
    assert third["measured_s"] is None
    assert f"{first['measured_s']:.4g} as measured" in (tmp_path / "recipes/tuned.yaml").read_text()


# --- refusals -----------------------------------------------------------------------------------

REFUSED = {
    "mesh=1x1 executor=reference": "executor=reference has one layout, on one device. Use executor=spmd or",
    "tune.schedules=[1f1b,gpip]": "executor=spmd cannot run schedule gpip, only gpipe, 1f1b, ",
    "tune.measure=2 hardware=h100": r"tune.measure=2 runs steps on the devices of this machine \(cpu\), but",
    "run.memory_fraction=0.9": "run.memory_fraction=0.9 is for GPUs, but the devices are cpu. Leave it out",
    "run.memory_fraction=0.9 hardware=v5e": "run.memory_fraction=0.9 is for GPUs, but the devices are hardware=v5e",
    "plan.tokens=0.5": "plan.tokens=0.5 must lie in",
    "plan.tokens=1e9": "plan.tokens=1e.09 counts tokens of text, but the data are not text. Leave it out",
    "tune.remat=[some]": "tune.remat=some is not one of none, layer, full",
    "tune.recipe=a/b": "tune.recipe=a/b is not a name. Use letters, digits, _ and -",
    "tune.devices=0": "tune.devices=0 must be",
    "tune.max_chunks=0": "tune.max_chunks=0 must be",
    "tune.best=0": "tune.best=0 must be",
    "tune.measure=3": "tune.measure=3 runs more layouts than tune.best=2 shows. Use tune.best=3 or more, or a",
    "plan.memory_gib=0": "plan.memory_gib=0.* must be a finite",
    "tune.tp=[1,3]": r"tune.tp: 3 does not divide \d devices. Use some of 1, 2",
    "tune.cp=[]": r"tune.cp=\[\] leaves nothing to choose from",
    "tune.tp=[0]": "tune.tp=0 must be",
    "tune.tp=[1,2]": "mesh.tp=2 divides stages, but this model does not define how",
    "tune.tp=[16] tune.devices=64 hardware=h100": "tune.tp: 16 would go over several hosts of 8 devices",
    "plan.compile=true": "plan.compile=true: applies to `ppctl plan` only",
    "hardware=h100 run.dtype=float64": "hardware=h100 states no peak for float64",
}


@pytest.mark.parametrize("words", REFUSED)
def test_impossible_requests_of_tune_are_refused_in_one_line(words, tuned, tmp_path):
    code, out, err = tuned(*words.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.search(REFUSED[words], err), err
    assert list(tmp_path.iterdir()) == []


def test_no_layer_is_left_out_and_no_device():
    for mesh in Space(12, 5, 24, 1, divisions=(MeshSizes(), MeshSizes(tp=2, cp=3))).meshes:
        assert mesh.num_devices == 12
        assert mesh.pp <= 5
    numbers = {microbatch.number for mesh, microbatch in Space(1, 5, 24, 1).microbatches}
    assert numbers == {1, 2, 3, 4, 6, 8, 12, 24}
