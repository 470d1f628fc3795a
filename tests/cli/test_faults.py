"""The message of every fault of a request that Hydra composes: one line, exit code 2, and nothing
else happens.
"""

from __future__ import annotations

import re

import jax
import pytest
from support.files import write
from support.remedies import suggestions, with_suggestion
from support.run_dirs import make

from ppctl import cli

pytestmark = pytest.mark.usefixtures("in_empty_directory")

FAULTS = [
    (
        "trian",
        "trian is not a command. Did you mean train\\? \\(train, .*, inspect, bench, sched.*,",
    ),
    (
        "tone",
        "tone is not a command. .*train, verify, doctor, plan, rehearse, tune, inspect, bench",
    ),
    ("model=mlp", "model=mlp: a command comes first, for example ppctl train model=mlp"),
    ("train --jsn", "--jsn is not an option. Did you mean --json"),
    ("plan --out x.html", "--out is not an option. Use plan.html=FILE.html."),
    ("train data=a/notes.txt", "names a file. Use data=text data.path=a/notes.txt"),
    ("train data=ids.npy", "names a file. Use data=tokens data.path=ids.npy"),
    ("train --json=1", "argument --json: ignored explicit argument '1'"),
    ("train --cfg everything", "argument --cfg: invalid choice: 'everything'"),
    ("train --cfg job --multirun", "--cfg and --multirun exclude each other"),
    ("train --config-dir nowhere", "--config-dir nowhere: there is no such directory"),
    ("train mesh=1x2 --all", "--all shows all settings of a group. Use it with --help GROUP"),
    ("train --help modle", "modle is not a part with settings. Did you mean model"),
    ("train --help model=ml", "model=ml is not an option of model. Did you mean model=mlp"),
    (
        "train model.layrs=3",
        "model.layrs is not a setting of model=transformer. Did you mean model.num_layers.*d_model",
    ),
    ("train model={layrs:3}", "model.layrs is not a setting of model=transformer"),
    ("train modle=mlp", "modle is not a part of the config. Did you mean model.*schedule.*recipes"),
    ("train +model.bar=2", "model.bar is not a setting of model=transformer"),
    ("train ~schedule", "~schedule: settings cannot be removed. Give schedule another value"),
    ("train --multirun run.seed=1,2 hydra.launcher.jbos=1", "Did you mean hydra.launcher.jobs"),
    ("train --multirun run.seed=1,2 hydra.launcher.jobs=0", "hydra.launcher.jobs=0 must be"),
    (
        "verify --multirun run.seed=1,2 hydra/launcher=submitit_slurm",
        "only jobs of `ppctl train` run side by side",
    ),
    (
        "verify --multirun hydra/sweeper=optuna optim.lr=interval(0,1)",
        "searches by the records of runs, and `ppctl ver",
    ),
    ("train model@x=mlp", "Could not override 'model@x'"),
    (
        "train schedule=interleavd",
        "Did you mean schedule=interleaved.*.schedule: interleaved, .*gpipe",
    ),
    ("train model=mixtral", "model=mixtral is not an option of model. Did you mean model=mixtral_"),
    ("train model=qwen4_8b", "model=qwen4_8b is not an option of model. .model: qwen3_8b, "),
    (
        "train model=deepseek_v3",
        "model=deepseek_v3: ppctl's transformer has no multi-head latent attention .MLA.. Use ano",
    ),
    ("train model=gpt-oss-120b", "model=gpt-oss-120b: ppctl's transformer has no attention sinks"),
    (
        "train model=llama4_scout",
        "model=llama4_scout: ppctl's transformer has no chunked attention",
    ),
    ("train hardware=v100", "hardware=v100 is not an option of hardware. .hardware: h100, "),
    (
        "train data=mixture data.parts=[{path:a,wieght:1}]",
        "data.parts: wieght is not a setting of an entry. Did you mean weight. .settings: path, field",
    ),
    ("train data=mixture data.parts=[{weight:x}]", "data.parts: weight: Value 'x' of type 'str'"),
    (
        "train data=mixture data.parts=[{weight:1}]",
        r"data.parts\[0\].path has no value. Use data.parts=\[{path: PATH, weight: 0.7}, {path:",
    ),
    ("train data=mixture data.parts=[1]", r"data.parts=\[1\]: Invalid type .*value: 1\.\n"),
    (
        "train mesh.ranks=[{fsdp:4},{tpp:2}]",
        "mesh.ranks: tpp is not a setting of an entry. Did you mean tp. .settings: dp, fsdp",
    ),
    (
        "tune tune.cluster=[{host:4,hardware:h100}]",
        "tune.cluster: host is not a setting of an entry. Did you mean hosts",
    ),
    (
        "tune tune.groups=unequal tune.cluster=[{hosts:4}]",
        r"tune.cluster\[0\].hardware has no value. Use tune.cluster=\[{hosts: 4, hardware: h100}",
    ),
    ("train optim=zzz", "optim=zzz is not an option of optim. \\(optim: adafactor, adamw, custom"),
    ("train schedule.name=gpipe", "but the choice is schedule=interleaved. Use schedule=gpipe"),
    (
        "train schedule={name:gpipe}",
        "schedule.name=gpipe, but the choice is schedule=interleaved. Use schedule=gpipe",
    ),
    ("train mesh=2x", "mesh=2x is not a mesh. Write DPxPP, DPxPPxFSDP or DPxPPxFSDPxEPxTPxCP"),
    ("train mesh=foo", "mesh=foo is not a mesh"),
    ("train --multirun mesh=1x2,2x", "mesh=2x is not a mesh"),
    (
        "train model.num_layers=abc",
        "model.num_layers=abc: Value 'abc' of type 'str' could not be converted to Integer",
    ),
    ("train model={num_layers:abc}", "Value 'abc' of type 'str' could not be converted"),
    (
        "train run.num_steps=4.5",
        "run.num_steps=4.5: Value '4.5' of type 'float' could not be converted to Integer",
    ),
    ("train model={name:[1]}", "Cannot convert 'ListConfig' to string"),
    ("train model=???", "You must specify 'model'"),
    ("train data=text", "data.path has no value. data=text needs one: add data.path="),
    ("train partition=explicit", "partition.layers has no value. partition=explicit needs one"),
    ("train run.dir=${run.nam}", "run.dir=.*: Interpolation key 'run.nam' not found"),
    ("train run.num_steps=0", "run.num_steps=0 must be"),
    (
        "verify hardware=h100",
        "hardware=h100: applies to `ppctl train`, .* and `ppctl doctor` only. Leave it out, or",
    ),
    (
        "doctor launch.processes=2 launch.max_restarts=1",
        "launch.max_restarts=1: only `ppctl train` is started again",
    ),
    (
        "train run.name=a=b",
        "run.name=a=b cannot be read .*needs quotes that reach ppctl: 'run.name=",
    ),
    ("train run.name=it's", "cannot be read"),
    (
        "train run.trackers=tensorboard",
        r"run.trackers=tensorboard is not a list. Use run.trackers=\[tensorboard\]\.",
    ),
    (
        "train --multirun run.trackers=tensorboard,wandb",
        r"is not a list. Use run.trackers=\[tensorboard\],\[wandb\]\.",
    ),
    ("train run.trackers=tensorboard,wandb", "several values.* brackets around them"),
    ("train run.seed=1,2", "run.seed=1,2 gives several values. Add --multirun"),
    ("train --multirun optim.lr=interval(0,1)", "a sweep needs a list of values"),
    (
        "train --multirun",
        "--multirun runs every combination .* no setting has several values. Add some",
    ),
    ("train --multirun run.seed=3", "no setting has several values"),
    ("train --multirun run.seed=range(3,3)", "This sweep is empty"),
    (
        "train --multirun model.layrs=2,3",
        "model.layrs is not a setting of model=transformer. Did you mean",
    ),
    ("train --multirun +foo=2,3", "foo is not a part of the config"),
    (
        "train --multirun run.seed=1,1",
        "Jobs 0 .run.seed=1. and 1 .run.seed=1. have the same run.dir, runs/default/r",
    ),
    ("train --multirun run.dir=x,./x", "have the same run.dir, x. Leave out the repeated value"),
    (
        "train --multirun data.batch_size=7,9",
        "All 2 jobs are refused; the first: data.batch_size=7 is not a multiple",
    ),
    (
        "train --multirun plan.compile=true run.seed=1,2",
        "plan.compile=true: applies to `ppctl plan` only",
    ),
    ("train run.dir=r\udce4", "run.dir=r.* is not UTF-8 text. Rename it, or use a UTF-8 locale"),
    ("train --multirun run.dir=r\udce4 run.seed=1,2", "run.dir=r.* is not UTF-8 text"),
    ("train --multirun run.dir=/proc/x run.seed=1,2", "run.dir=/proc/x cannot be written"),
    (
        "bench --multirun run.seed=1,2 hydra.launcher.jobs=2",
        "only jobs of `ppctl train` run side by side",
    ),
]


# Hydra composes each, which takes half a second
@pytest.mark.parametrize(("line", "message"), FAULTS, ids=[line for line, _ in FAULTS])
def test_a_wrong_request_is_refused_in_one_line_with_exit_code_2(
    line, message, capsys, served, in_empty_directory
):
    assert cli.main(line.split()) == 2
    out, err = capsys.readouterr()
    assert err.startswith("ppctl: ")
    assert err.count("\n") == 1
    assert re.search(message, err), err
    assert (out, served) == ("", [])
    assert list(in_empty_directory.iterdir()) == []
    if "--multirun" not in line:
        for suggestion in suggestions(err):
            assert cli.main(with_suggestion(line.split(), suggestion)) == 0, suggestion


# --- files of the user's ------------------------------------------------------------------------

RECIPES = {
    "key": (
        "model: { layrs: 3 }",
        r"model.layrs is not a setting .*num_layers.* \(in recipes=key\)",
    ),
    "top": ("foo: 1", r"foo is not a part of the config.* \(in recipes=top\)"),
    "value": (
        "model: { num_layers: abc }",
        r"model.num_layers: Value 'abc' of type 'str' .* \(in recipes=value\)",
    ),
    "option": (
        "defaults: [override /schedule: gpip]",
        r"Did you mean schedule=gpipe.* \(in recipes=option\)",
    ),
    "group": ("defaults: [override /modle: mlp]", "In 'recipes/group': Could not override 'modle'"),
    "name": (
        "schedule: { name: gpipe }",
        "schedule.name=gpipe, but the choice is .* `override /schedule: gpipe`",
    ),
    "yaml": ("model: { num_layers: 3", "yaml.*line 2"),
    "endless": ("run: &a {name: *a}", "endless.yaml: its aliases and interpolations"),
    "check": ("run: { num_steps: 0 }", "run.num_steps=0 must be"),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_fault_in_a_users_recipe_is_named_in_one_line(recipe, capsys, served, in_empty_directory):
    text, message = RECIPES[recipe]
    write(in_empty_directory / f"mine/recipes/{recipe}.yaml", f"# @package _global_\n{text}\n")
    assert cli.main(["train", f"recipes={recipe}", "--config-dir", "mine"]) == 2
    err = capsys.readouterr().err
    assert re.fullmatch(rf"ppctl: .*{message}.*\n", err), err


def test_a_recipe_without_its_package_line_is_explained(capsys, in_empty_directory):
    write(in_empty_directory / "mine/recipes/bare.yaml", "model: { num_layers: 4 }\n")
    assert cli.main(["train", "recipes=bare", "--config-dir", "mine"]) == 2
    assert "the file starts with `# @package _global_`" in capsys.readouterr().err


def test_an_unreadable_recipe_is_named(capsys, in_empty_directory):
    write(in_empty_directory / "mine/recipes/bytes.yaml", "").write_bytes(b"\xff\xfe")
    assert cli.main(["train", "recipes=bytes", "--config-dir", "mine"]) == 2
    assert re.fullmatch(
        r"ppctl: .*bytes\.yaml cannot be read: .* UTF-8\.\n", capsys.readouterr().err
    )


def test_an_option_without_schema_is_explained(capsys, in_empty_directory):
    write(in_empty_directory / "mine/model/free.yaml", "num_layers: 4\n")
    assert cli.main(["train", "model=free", "--config-dir", "mine"]) == 2
    assert "model: the chosen file has no schema" in capsys.readouterr().err


def test_a_users_options_and_recipes_are_found(served, in_empty_directory):
    write(
        in_empty_directory / "mine/schedule/four.yaml", "defaults: [interleaved]\nnum_chunks: 4\n"
    )
    write(
        in_empty_directory / "mine/recipes/big.yaml",
        "# @package _global_\ndefaults: [tiny]\nrun: { name: big }\n",
    )
    assert cli.main(["train", "--config-dir", "mine", "recipes=big", "schedule=four"]) == 0
    config = served[0][1]
    assert (config.schedule.num_chunks, config.run.dir, config.model.d_model) == (4, "runs/big", 32)


def test_hardware_files_of_the_user_are_options(capsys, served, in_empty_directory):
    write(
        in_empty_directory / "mine/hardware/ours.yaml",
        "defaults: [h100]\nname: ours\nreached: {flops: 0.7}\n",
    )
    words = [
        "hardware=ours",
        "+hardware.peak_flops.float64=67e12",
        "hardware.peak_flops.bfloat16=900e12",
    ]
    assert cli.main(["plan", "--config-dir", "mine", *words]) == 0
    [(_, config, _)] = served
    ours = config.hardware
    assert (ours.name, ours.reached["flops"], ours.host_devices) == ("ours", 0.7, 8)
    given = {"bfloat16": 900e12, "float64": 67e12}
    assert ours.peak_flops == {"float32": 494.7e12, "fp8": 1978.9e12} | given


def test_hardware_without_its_numbers_is_refused(capsys, served, in_empty_directory):
    write(
        in_empty_directory / "mine/hardware/bare.yaml",
        "defaults: [/schema_hardware@_here_]\nname: bare\n",
    )
    assert cli.main(["plan", "hardware=bare", "--config-dir", "mine"]) == 2
    assert "hardware.device_kinds has no value. hardware=bare needs one" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["", " ", "\t"])
def test_an_empty_word_is_answered_with_the_commands(word, capsys):
    assert cli.main([word]) == 2
    assert capsys.readouterr().err.startswith(
        f"ppctl: {word!r} is not a command. (train, verify, doctor, "
    )


@pytest.mark.parametrize("command", ["plan", "verify", "train"])
def test_evaluations_without_held_out_data_are_refused_equally_by_all_commands(
    tmp_path, monkeypatch, capsys, command
):
    monkeypatch.chdir(tmp_path)
    words = (
        "model=mlp model.num_layers=2 data=regression data.num_rows=64 data.batch_size=2 "
        "data.eval_fraction=0 "
    )
    words += "mesh=1x1 schedule=gpipe schedule.num_microbatches=2 run.platform=cpu"
    assert cli.main([command, *words.split()]) == 2
    assert capsys.readouterr().err.startswith(
        "ppctl: data.eval_fraction=0 holds out nothing to evaluate on. Use "
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["train", "doctor", "bench", "generate", "evaluate", "export"])
def test_an_absent_platform_is_named_in_one_line(monkeypatch, capsys, command):
    def missing(*_):
        raise AssertionError  # JAX's error without a plugin for the platform

    for name in ("devices", "local_devices", "process_index", "process_count"):
        monkeypatch.setattr(jax, name, missing)
    words = ["model=mlp", "data=regression", "mesh=1x2"]
    if command in ("generate", "evaluate", "export"):
        make("t", "model=transformer", "model.num_layers=2")
        of_run = {"generate": ("--prompt", "a"), "evaluate": ("data=tokens",)}
        words = ["runs/t", *of_run.get(command, ("--out", "out"))]
    assert cli.main([command, *words]) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(
        r"ppctl: JAX cannot start on .*: no such devices.*\. Use .*=cpu, .*\n", said
    )
