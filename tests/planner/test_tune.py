"""`ppctl tune`: its layouts are predicted as by `ppctl plan`, its recipe is that request, wrong ones are refused."""

import json
import math
import re
from dataclasses import replace
from math import inf
from pathlib import Path

import jax
import pytest
from support.selection import few, one_in

from ppctl import cli, config, errors
from ppctl.cli.commands.tune import tune
from ppctl.cli.compose import compose
from ppctl.planner import tune as tune_module
from ppctl.planner import tune_terminal
from ppctl.planner.memory import DeviceLimit
from ppctl.planner.op_times import StepTime
from ppctl.planner.predict import predict_job
from ppctl.planner.recipe import MARK, write_recipe
from ppctl.planner.search import Candidate, Found
from ppctl.planner.space import MeshSizes, Space
from ppctl.planner.step_time import predicted_time
from ppctl.planner.tune import tune_layouts
from ppctl.reports.terminal import size_text
from ppctl.schedule.partition.partition import layout_text
from ppctl.training.job import assemble

WORDS = (
    "model=mlp model.num_layers=5 model.d_model=32 data=regression data.batch_size=32 data.num_rows=512 "
    "data.num_features=8 data.num_targets=512 data.eval_fraction=0.1 run.eval_batches=1 run.dtype=float32 "
    "run.platform=cpu"
)


def step_s(job, costs=None):
    """The seconds of a step that are predicted."""
    time, _ = predicted_time(job, costs)
    assert time is not None
    return time.total_s


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """An empty directory, and two cores."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.cpu_count", lambda: 2)


@pytest.fixture
def tuned(capsys):
    """A function that tunes: (exit code, what was printed on stdout, on stderr)."""

    def run(*words, best=2):
        """best: layouts, each of which is built to be predicted."""
        code = cli.main(["tune", *WORDS.split(), f"tune.best={best}", *words])
        return code, *capsys.readouterr()

    return run


def composed(words, *flags):
    found = compose(words, [*flags], ["tune"])
    assert isinstance(found, config.Config)
    return found


def request(*words):
    return composed([*WORDS.split(), *words])


# --- what is found ----------------------------------------------------------------------------------------------------


def test_a_table_a_line_about_pipelines_and_a_recipe(tuned):
    code, out, err = tuned("mesh=2x2", best=10)
    assert (code, err) == (0, "")
    head, *_, last = out.strip().splitlines()
    limit = r"each \(this machine's memory, shared by 4 simulated devices\)"
    assert re.fullmatch(rf"[\d,]+ layouts for 4 x host of .* {limit}: 0 too large, [\d,]+ simulated in [\d.]+ s", head)
    assert len(re.findall(r"^ +\d+ +\d+x", out, re.MULTILINE)) == 10
    assert "pipeline" in out
    assert re.search(r"recomputed +per-step", out)
    table = out.partition("stages, with seconds")[0]
    assert ("|" in table) == ("stages as partition.layers takes them: E embedding, t layer" in out)
    assert last == "the first is a recipe now, recipes/tuned.yaml: ppctl train --config-dir . recipes=tuned"


@pytest.mark.full
def test_the_document_holds_what_is_needed_to_train_each_layout(tuned, tmp_path):
    code, out, _ = tuned("mesh=2x2", "--json", "tune.recipe=null", best=10)
    document = json.loads(out)
    assert (code, document["recipe"], list(tmp_path.iterdir())) == (0, None, [])
    assert document["num_layouts"] > document["num_simulated"] >= len(document["best"]) == 10
    times = [layout["step_time_s"] for layout in document["best"]]
    assert times == sorted(times)
    for layout in document["best"][::4]:
        asked = request(*layout["overrides"])
        assert list(asked.mesh.sizes) == layout["mesh"]
        assert step_s(assemble(asked)) == pytest.approx(layout["step_time_s"], rel=1e-9)


@pytest.mark.full
def test_speeds_are_printed_in_tokens_for_text_alone(tuned, capsys):
    words = ["mesh=1x2", "hardware=h100", "run.dtype=bfloat16", "tune.schedules=[gpipe]", "tune.best=2"]
    text = "model.num_layers=4 model.d_model=32 model.seq_len=16 data=synthetic data.batch_size=32 run.platform=cpu"
    assert cli.main(["tune", *text.split(), *words]) == 0
    out = capsys.readouterr().out
    assert "tok/s" in out
    assert "MFU" in out
    assert "tok/s" not in tuned(*words)[1]
    assert cli.main(["tune", *text.split(), *words, "tune.tokens=1e9", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    budget, step_s = document["token_budget"], document["best"][0]["step_time_s"]
    assert budget["num_steps"] == math.ceil(1e9 / document["batch_tokens"]) == math.ceil(1e9 / (32 * 16))
    assert budget["device_hours"] == pytest.approx(2 * budget["num_steps"] * step_s / 3600)
    assert cli.main(["tune", *text.split(), *words, "tune.tokens=1e9"]) == 0
    assert re.search(r"^tokens, with the first: 1e9 in .* hours: .* GPU-hours, ", capsys.readouterr().out, re.MULTILINE)


DIVIDED = (
    "model.num_layers=2 model.d_model=32 model.seq_len=16 data=synthetic data.batch_size=16 run.platform=cpu mesh=2x4 "
    "tune.best=2 tune.schedules=[1f1b] tune.remat=[none] hardware=h100 run.dtype=bfloat16 tune.recipe=null --json"
)


@pytest.mark.full
@pytest.mark.parametrize("executor", ["mpmd", "spmd"])
def test_stages_are_divided_over_tp_and_cp_as_the_request_allows(executor, capsys):
    words = [*DIVIDED.split(), f"executor={executor}", "tune.tp=[1,2]", "tune.cp=[2]"]
    assert cli.main(["tune", *words]) == 0
    document = json.loads(capsys.readouterr().out)
    meshes = [layout["mesh"] for layout in document["best"]]
    assert all(math.prod(mesh) == 8 and mesh[4] == 2 for mesh in meshes)
    assert cli.main(["tune", *words, "tune.tp=[2]"]) == 0
    layout = json.loads(capsys.readouterr().out)["best"][0]
    assert layout["mesh"][3:] == [2, 2]
    asked = composed([*DIVIDED.replace("--json", "").split(), f"executor={executor}", *layout["overrides"]])
    assert list(asked.mesh.sizes) == layout["mesh"]
    assert step_s(assemble(asked)) == pytest.approx(layout["step_time_s"], rel=1e-9)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("tune.tp=[8]", r"model.num_heads=4 is not a multiple of mesh.tp=8: .* Use mesh.tp=2, 4, or other sizes"),
        (
            "tune.tp=[1] tune.cp=[8] model.seq_len=8",
            r"8 tokens are fewer than the 2\*mesh.cp = 2\*8 = 16 .* mesh.cp=4 at",
        ),
    ],
)
def test_what_tp_and_cp_cannot_divide_is_refused_before_the_search(words, message, capsys):
    assert cli.main(["tune", *DIVIDED.replace("--json", "").split(), *words.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert re.search(message, err), err


# --- none fits, none is needed ----------------------------------------------------------------------------------------


@pytest.mark.full
def test_where_none_fits_it_says_what_the_smallest_needs(tuned, tmp_path):
    small = ("mesh=2x2", "--json", "tune.memory_gib=0.0001")
    code, out, _ = tuned(*small)
    need = json.loads(out)["smallest_bytes"]
    assert (code, list(tmp_path.iterdir())) == (1, [])
    code, out, _ = tuned(*small[:1], *small[2:])
    assert code == 1
    assert out.splitlines()[-1] == (
        f"none fits: the smallest needs {size_text(need)} a device. Use more devices (tune.devices), or a smaller "
        "model."
    )
    assert tuned("mesh=2x2", f"tune.memory_gib={(need - 1) / 2**30}")[0] == 1
    assert tuned("mesh=2x2", f"tune.memory_gib={(need + 1) / 2**30}")[0] == 0


def layout(mesh, seconds):
    time = StepTime(seconds, 0.0, seconds, seconds, 1.0)
    return Candidate(MeshSizes(*mesh), "1f1b", 1, 4, "none", (5,) * mesh[1], time, 0.0, {"parameters": 1})


def said(best, alone, measured_s=()):
    """The line about pipelines."""
    found = Found(tuple(best), alone, 9, 0, 9, None)
    tuned = tune_terminal.Tuned(found, measured_s, 0.1, "4 x host", None, None, 1.0, None, None)
    return tune_terminal._about_pipelines(tuned, replace(config.Config(), mesh=config.Mesh(*best[0].mesh)))


def test_a_line_says_whether_a_pipeline_is_faster():
    one, flat, slow = layout((1, 4, 1), 1.0), layout((4, 1, 1), 1.5), layout((2, 2, 1), 2.0)
    assert said([flat, slow], flat) == (
        "no pipeline is needed: mesh=4x1 (pp=1) is fastest; the best pipeline takes 1.33 times as long."
    )
    assert said([flat], flat) == "no pipeline is needed: mesh=4x1 (pp=1) is fastest."
    assert said([one], None) == "without a pipeline (mesh.pp=1) nothing fits."
    assert said([one, slow], flat) == (
        "without a pipeline the best is mesh=4x1, 4 microbatches, remat=none: 1.50 times as long."
    )
    # as measured, where both were
    assert said([one, flat], flat, (3.0, 3.3)).endswith("1.10 times as long.")
    assert said([flat, one], flat, (3.0, 3.6)).endswith("the best pipeline takes 1.20 times as long.")


def said_of_divisions(best, by_division):
    found = Found(tuple(best), None, 9, 0, 9, None, by_division)
    return tune_terminal._about_divisions(tune_terminal.Tuned(found, (), 0.1, "", None, None, 1.0, None, None))


def test_a_line_says_what_dividing_stages_buys_and_costs():
    halves = replace(layout((1, 4, 1, 2), 1.0), sent_fraction=0.8, bubble=0.1)  # one device in eight works all the time
    whole = replace(layout((1, 8, 1), 1.25), recomputed_fraction=0.2, bubble=0.3, memory={"parameters": 3 * 2**30})
    assert said_of_divisions([halves], {}) is None  # nothing else was looked at
    assert said_of_divisions([halves], {False: whole}) == (
        "tp=2: devices of a stage send to each other for 10.0% of the step. Without, the best is mesh=1x8 1f1b, 4 "
        "microbatches, remat=none: 1.25 times as long, with bubble 30.0% (10.0% here), recomputed 20.0% (0.0% here), "
        "per-step overhead 0.0% (0.0% here), memory 3.0 GiB (1 B here)."
    )
    assert said_of_divisions([halves], {False: None}) == "without tp and cp nothing fits."
    assert said_of_divisions([whole], {True: replace(halves, time=replace(halves.time, pipeline_s=2.5))}) == (
        "no stage is divided: with tp or cp the best is mesh=1x4x1x2 1f1b, 4 microbatches, remat=none: 2.00 times as "
        "long; its devices send to each other inside stages for 4.0% of it."
    )


# --- memory -----------------------------------------------------------------------------------------------------------

H100 = ("mesh=1x4", "hardware=h100", "run.dtype=bfloat16", "tune.schedules=[1f1b]")


@pytest.mark.full
def test_what_a_larger_share_of_the_gpus_memory_would_buy_is_said(tuned):
    def at(gib, *words):
        return tuned(*H100, f"hardware.memory_gib={gib}", *words)[1]

    fastest = json.loads(at(59.3, "--json", "tune.recipe=null"))["best"][0]
    tight = fastest["total_bytes"] / 2**30 / 0.85 * 0.75  # the fastest takes 85% of the GPU
    document = json.loads(at(tight, "--json"))
    more = document["with_more_memory"]
    assert (document["limit_fraction"], more["memory_fraction"]) == (0.75, 0.9)
    assert more["total_bytes"] <= more["limit_bytes"] == round(document["limit_bytes"] / 0.75 * 0.9)
    assert more["speedup"] == document["best"][0]["step_time_s"] / more["step_time_s"] >= 1 / 0.99
    enough = json.loads(at(tight, "--json", "run.memory_fraction=0.9"))
    assert enough["best"][0]["step_time_s"] == more["step_time_s"] == fastest["step_time_s"]
    assert (enough["with_more_memory"], enough["limit_fraction"]) == (None, 0.9)
    again = request(*(word for word in H100 if "tune" not in word), *more["overrides"])
    assert again.run.memory_fraction == 0.9
    out = at(tight)
    assert "% of the " in out.splitlines()[0]
    assert "of hardware=h100: run.memory_fraction=null, JAX's default)" in out.splitlines()[0]
    assert re.search(r"^with run.memory_fraction=0.9: mesh=\S+ .*% faster \(\S+ s, .* of .*\)\.$", out, re.MULTILINE)


def test_where_nothing_fits_a_larger_share_is_named_where_it_does(tuned):
    words = (*H100, "tune.recipe=null", "executor.remat=none")
    smallest = json.loads(tuned(*words, "hardware.memory_gib=1e-6", "--json")[1])["smallest_bytes"] / 2**30
    code, out, _ = tuned(*words, f"hardware.memory_gib={smallest / 0.85 * 0.75}")
    assert code == 1
    assert re.match(
        r"none fits: .*\nwith run.memory_fraction=0.9: mesh=.*: it fits \(", "\n".join(out.splitlines()[-2:])
    )


# --- the recipe -------------------------------------------------------------------------------------------------------

RECIPES = {
    "uneven": "mesh=1x8 model.num_layers=9 hardware=h100",
    "mpmd": "mesh=1x2 executor=mpmd executor.unroll=0 tune.schedules=[interleaved,zb_v]",
    "examples": "model=mlp model.num_layers=4 model.d_model=16 data=regression data.batch_size=32 mesh=1x2",
    "settings": "mesh=1x2 optim.lr=1e-5 optim.clip_norm=null run.checkpoint.every=null run.name=mine run.seed=3",
    "options": "recipes=gpipe_notebook",  # names of a custom model's own
}


@pytest.mark.parametrize("words", few(RECIPES.values(), 1), ids=RECIPES)
def test_the_recipe_is_the_request_found(words, tmp_path):
    shown = [*words.split(), f"tune.best={10 if 'num_layers=9' in words else 2}"]
    asked = composed(shown) if "mlp" in words or "recipes" in words else request(*shown)
    path = tmp_path / "recipes/tuned.yaml"
    assert tune(asked, as_json=True) == 0
    tuned, configs = tune_layouts(asked)
    name = asked.run.name if asked.run.name != config.Run().name else "tuned"
    uneven = [i for i, found in enumerate(configs) if found.partition.name == "explicit"][:1]
    assert uneven or "num_layers=9" not in words
    for i in (0, len(configs) - 1, *uneven):
        write_recipe(path, configs[i], tuned.found.best[i], None)
        found = composed(["recipes=tuned"], "--config-dir", str(tmp_path))
        run = replace(configs[i].run, name=name, dir=f"runs/{name}")
        assert found == replace(configs[i], run=run)


COUNTED = {
    "hardware": "hardware=h100 hardware.network_bytes_per_s=12e9 hardware.cuda.cores=99 run.dtype=bfloat16",
    "a dtype": "hardware=h100 +hardware.peak_flops.float64=67e12 run.memory_fraction=0.9",
    "links": "hardware=v5e costs.doctor=links.json",
    "order": "mesh=2x2 mesh.order=dp-pp-fsdp",
    "own": "hardware=mine hardware.memory_gib=33",
}


@pytest.mark.parametrize("name", COUNTED)
def test_a_recipe_keeps_what_its_plan_counts_with(name, tmp_path):
    (tmp_path / "hardware").mkdir()
    (tmp_path / "hardware/mine.yaml").write_text("defaults: [h100]\nname: mine\n")
    asked = composed([*WORDS.split(), *COUNTED[name].split()], "--config-dir", str(tmp_path))
    path = tmp_path / "recipes/tuned.yaml"
    write_recipe(path, asked, layout((1, 4, 1), 1.0), None)
    found = composed(["recipes=tuned"], "--config-dir", str(tmp_path))
    assert found == replace(asked, run=replace(asked.run, name="tuned", dir="runs/tuned"))
    text = path.read_text()
    assert ("# Needs: hardware/mine.yaml next to recipes/." in text) == (name == "own")
    (assumed,) = re.findall(r"^# Assumes: (.*)\.$", text, re.MULTILINE)
    assert assumed.startswith("data=regression data.")
    assert {"data.batch_size=32", "data.num_features=8"} <= {*assumed.replace(",", "").split()}
    assert f", hardware={asked.hardware.name}" in assumed


def test_plan_prints_of_the_recipe_what_tune_did(tuned, capsys):
    code, out, _ = tuned("mesh=1x4", "hardware=h100", "run.dtype=bfloat16", "tune.schedules=[1f1b]", "--json")
    first = json.loads(out)["best"][0]
    assert (code, cli.main(["plan", "--config-dir", ".", "recipes=tuned", "--json"])) == (0, 0)
    found = json.loads(capsys.readouterr().out)
    assert (found["hardware"], found["step_time_s"]) == ("h100", first["step_time_s"])
    assert max(found["total_bytes"]) == first["total_bytes"]
    assert cli.main(["verify", "--config-dir", ".", "recipes=tuned"]) == 2
    assert "Leave it out, or use hardware=auto." in capsys.readouterr().err


@pytest.mark.full
def test_adapters_are_all_that_has_gradients_and_moments_in_a_layout_found(tuned, capsys):
    words = ["model=transformer", "model.num_heads=2", "model.seq_len=16", "data=synthetic", "data.batch_size=16"]
    words = ["tune", *words, "model.num_layers=4", "model.d_model=32", "mesh=1x4", "hardware=h100", "tune.best=1"]
    words += ["tune.schedules=[zb_h1]", "tune.tp=[1]", "tune.cp=[1]", "optim.train=lora", "optim.lora_rank=2", "--json"]
    assert cli.main(words) == 0
    first = json.loads(capsys.readouterr().out)["best"][0]
    assert cli.main(["plan", "--config-dir", ".", "recipes=tuned", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["step_time_s"] == first["step_time_s"]
    assert max(found["total_bytes"]) == first["total_bytes"]
    assert first["memory"]["optimizer"] < first["memory"]["parameters"]


@pytest.mark.full
@pytest.mark.slow
def test_the_recipe_trains(tuned, capsys):
    assert tuned("mesh=2x2", "run.num_steps=2", "run.tensorboard=false", "tune.schedules=[zb_h1]")[0] == 0
    assert cli.main(["train", "--config-dir", ".", "recipes=tuned"]) == 0
    assert "finished at step 2" in capsys.readouterr().out


def test_a_recipe_is_written_again_but_no_other_file(tuned, tmp_path):
    assert tuned("mesh=1x2")[0] == 0
    assert tuned("mesh=2x1")[0] == 0
    file = tmp_path / "recipes/tuned.yaml"
    assert "for 2 devices" in file.read_text()
    file.write_text(file.read_text().replace(MARK, "# mine"))
    before = file.read_text()
    code, out, err = tuned("mesh=1x2")
    assert (code, out, file.read_text()) == (2, "", before)
    assert err == (
        "ppctl: tune.recipe=tuned: recipes/tuned.yaml was not written by `ppctl tune` and stays. "
        "Use another name, or null.\n"
    )


def test_where_no_recipe_can_be_written_nothing_is_searched(tuned, tmp_path, monkeypatch):
    monkeypatch.setattr("ppctl.cli.commands.tune.tune_layouts", lambda config: pytest.fail("searched"))
    (tmp_path / "recipes/other.yaml").mkdir(parents=True)
    (tmp_path / "recipes/bytes.yaml").write_bytes(b"\xff\xfe")
    for name, why in (("other", "Is a directory"), ("bytes", "it is no text")):
        code, _, err = tuned("mesh=1x2", f"tune.recipe={name}")
        assert (code, err) == (
            2,
            f"ppctl: tune.recipe={name}: recipes/{name}.yaml cannot be written: {why}. "
            "Use another name, another directory, or null.\n",
        )
    monkeypatch.chdir(tmp_path / "recipes/other.yaml")
    Path("recipes").write_text("")
    assert "cannot be written: Not a directory" in tuned("mesh=1x2")[2]
    Path("recipes").unlink()
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert "cannot be written: Permission denied" in tuned("mesh=1x2")[2]


# --- measuring --------------------------------------------------------------------------------------------------------


def test_those_measured_are_ranked_by_that(tuned, monkeypatch):
    _, out, _ = tuned("mesh=2x2", "--json", best=4)
    planned = [layout["overrides"] for layout in json.loads(out)["best"]]
    seconds = {1: 0.3, 2: 0.1, 3: 0.2}
    measured = iter(seconds.values())
    monkeypatch.setattr("ppctl.planner.tune._step_s", lambda config: next(measured))
    _, out, _ = tuned("mesh=2x2", "--json", "tune.measure=3", best=4)
    document = json.loads(out)
    assert [layout["overrides"] for layout in document["best"]] == [planned[i] for i in (1, 2, 0, 3)]
    assert [layout["measured_s"] for layout in document["best"]] == [0.1, 0.2, 0.3, None]
    assert next(measured, inf) == inf


@pytest.mark.slow
def test_two_are_run_and_timed(tuned, tmp_path):
    code, out, _ = tuned("mesh=1x2", "tune.measure=2", "tune.schedules=[1f1b]", "--json", best=3)
    first, second, third, *_ = json.loads(out)["best"]
    assert code == 0
    assert 0 < first["measured_s"] <= second["measured_s"]
    assert third["measured_s"] is None
    assert f"{first['measured_s']:.4g} as measured" in (tmp_path / "recipes/tuned.yaml").read_text()


# --- refusals ---------------------------------------------------------------------------------------------------------

REFUSED = {
    "mesh=1x1 executor=reference": "executor=reference has one layout, on one device. Use executor=spmd or",
    "costs=measure": "costs=measure times the pieces of one layout, and `ppctl tune` looks at thousands. Use tune",
    "tune.schedules=[1f1b,gpip]": r"tune.schedules: gpip is none that executor=spmd runs \(gpipe, 1f1b, ",
    "executor.idle=compute": "executor.idle=compute computes in idle ticks too, which `ppctl tune` does not predict",
    "tune.measure=2 hardware=h100": r"tune.measure=2 runs steps on what is here \(cpu\), but hardware=h100. Use",
    "run.memory_fraction=0.9": "run.memory_fraction=0.9 is of GPUs, but the devices are cpu. Leave it out",
    "run.memory_fraction=0.9 hardware=v5e": "run.memory_fraction=0.9 is of GPUs, but the devices are hardware=v5e",
    "tune.tokens=0.5": "tune.tokens=0.5 is no number of tokens to train on. Use one from 1 to 1e.18",
    "tune.tokens=1e9": "tune.tokens=1e.09 counts tokens of text, but the data are no text. Leave it out",
    "tune.remat=[some]": "tune.remat: some is not one of none, layer, full",
    "tune.recipe=a/b": "tune.recipe=a/b is not a name. Use letters, digits, _ and -",
    "tune.devices=0": "tune.devices=0 must be",
    "tune.max_chunks=0": "tune.max_chunks=0 must be",
    "tune.best=0": "tune.best=0 must be",
    "tune.measure=3": "tune.measure=3 runs more layouts than tune.best=2 shows. Use tune.best=3 or more, or a",
    "tune.memory_gib=0": "tune.memory_gib=0.* must be",
    "tune.tp=[1,3]": r"tune.tp: 3 does not divide \d devices. Use some of 1, 2",
    "tune.cp=[]": r"tune.cp=\[\] leaves nothing to choose from",
    "tune.tp=[0]": "tune.tp=0 must be",
    "tune.tp=[1,2] model.d_model=33": "model.d_model=33 is not a multiple of mesh.tp=2",
    "tune.tp=[16] tune.devices=64 hardware=h100": "tune.tp: 16 would go over several hosts of 8 devices: what tp",
    "plan.memory_gib=1": "plan.memory_gib=1.0: applies to `ppctl plan` only",
    "hardware=h100 run.dtype=float64": "hardware=h100 states no peak for float64",
}


@pytest.mark.parametrize("words", one_in(3, REFUSED))
def test_what_cannot_be_is_refused_in_a_line(words, tuned, tmp_path):
    code, out, err = tuned(*words.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert re.search(REFUSED[words], err), err
    assert list(tmp_path.iterdir()) == []


def test_no_layer_is_left_out_and_no_device():
    for mesh in Space(12, 5, 24, 1, divisions=((1, 1), (2, 3))).meshes:
        assert math.prod(mesh) == 12
        assert mesh.pp <= 5
    numbers = {microbatch.number for mesh, microbatch in Space(1, 5, 24, 1).microbatches}
    assert numbers == {1, 2, 3, 4, 6, 8, 12, 24}


# --- embedding and head on all ranks ----------------------------------------------------------------------------------

VOCABULARY = (  # a batch that leaves no layout without a pipeline
    "model.num_layers=4 model.d_model=128 model.num_heads=2 model.seq_len=128 data=synthetic data.vocab_size=32768 "
    "data.batch_size=6 schedule=1f1b schedule.num_microbatches=3 mesh=1x4 hardware=h100 run.dtype=bfloat16 "
    "run.platform=cpu tune.schedules=[1f1b] tune.remat=[none] tune.tp=[1] tune.recipe=null"
)


def planned_step(*words):
    """The seconds and the bytes that `ppctl plan` predicts of a request."""
    asked = composed([*VOCABULARY.split(), *words])
    found = predict_job(assemble(replace(asked, tune=config.Tune()), on_one_device=True, only_planned=True))
    assert found.time is not None
    return found.time.total_s, max(found.total_bytes)


def test_what_dividing_the_vocabulary_gains_is_what_plan_says_of_both(capsys):
    assert cli.main(["tune", *VOCABULARY.split(), "tune.best=1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    (first,), gain = document["best"], document["gain_of_divided_vocabulary"]
    assert (first["vocab"], first["schedule"]) == ("parallel", "1f1b, vocab=parallel")
    assert "schedule.vocab=parallel" in first["overrides"]
    divided, whole = planned_step(*first["overrides"]), gain["whole"]
    assert divided == (pytest.approx(first["step_time_s"], rel=1e-9), first["total_bytes"])
    same = [word for word in first["overrides"] if not word.startswith(("schedule.vocab", "partition"))]
    layers = f"partition.layers=[{','.join(map(str, whole['partition']))}]"
    before = planned_step(*same, "partition=explicit", layers)
    assert gain["saved_s"] == pytest.approx(before[0] - divided[0], rel=1e-6)
    assert gain["saved_fraction"] == pytest.approx(1 - divided[0] / before[0], rel=1e-6)
    assert gain["saved_bytes"] == before[1] - divided[1] > 0
    assert document["with_whole_vocabulary"]["step_time_s"] <= before[0]


@pytest.mark.full
def test_a_recipe_says_where_the_vocabulary_is_divided(capsys, tmp_path):
    assert cli.main(["tune", *VOCABULARY.replace("recipe=null", "recipe=found").split(), "tune.best=2"]) == 0
    out = capsys.readouterr().out
    assert "1f1b, vocab=parallel" in out
    assert re.search(r"embedding and head on all ranks of the first: its step is .* s \([\d.]+%\) shorter than", out)
    assert "vocab: parallel" in (tmp_path / "recipes" / "found.yaml").read_text()


def gain_of(divided, whole, limit=None):
    return tune_terminal.VocabularyGain(divided, whole).text("the first", limit)


def test_a_line_says_what_dividing_the_vocabulary_gains():
    divided, whole = layout((1, 4, 1), 1.0), replace(layout((1, 4, 1), 1.25), memory={"parameters": 3 * 2**30})
    divided = replace(divided, vocab="parallel", memory={"parameters": 2 * 2**30})
    said = (
        "embedding and head on all ranks of the first: its step is 0.25 s (20.0%) shorter than that of the same layout "
        f"with both whole ({layout_text(whole.partition)}), and takes 1.0 GiB less memory"
    )
    assert gain_of(divided, whole) == f"{said}."
    assert gain_of(divided, whole, DeviceLimit(2 * 2**30, "here")) == f"{said}, which would not fit."
    assert " 0.25 s (25.0%) longer than" in gain_of(whole, divided)
    assert " 1.0 GiB more memory" in gain_of(whole, divided)
    assert gain_of(divided, None).endswith("with both whole there is no such layout.")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("tune.vocab=[parallel]", r"this model does not say that it has \(Stack.has_vocabulary\)"),
        ("schedule.vocab=parallel", r"`ppctl tune` chooses schedules. .* alone with tune.vocab=\[parallel\]"),
        ("tune.vocab=[halved]", r"tune.vocab=halved is not one of whole, parallel"),
        ("tune.vocab=[]", r"tune.vocab=\[\] leaves nothing to choose from"),
    ],
)
def test_a_vocabulary_that_cannot_be_divided_is_refused(words, message, tuned):
    code, out, err = tuned(*words.split())
    assert (code, out) == (2, "")
    assert re.search(message, err)


def test_executors_that_cannot_divide_the_vocabulary_have_it_whole(monkeypatch):
    def refuses(*args):
        raise errors.ConfigError("not here")

    asked = composed([*VOCABULARY.split()])
    batch = {"inputs": jax.ShapeDtypeStruct((6, 128), "int32")}
    stack = assemble(replace(asked, tune=config.Tune()), on_one_device=True, only_planned=True).pipe.stack
    assert tune_module._vocab(asked, stack, batch) == ("whole", "parallel")
    monkeypatch.setattr(tune_module, "with_vocabulary_of", refuses)
    assert tune_module._vocab(asked, stack, batch) == ("whole",)
    with pytest.raises(errors.ConfigError, match="not here"):
        tune_module._vocab(replace(asked, tune=config.Tune(vocab=["parallel"])), stack, batch)
