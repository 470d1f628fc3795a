"""What a command line does: the message and exit code of every fault, help, sweeps, and that nothing else happens."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

from ppctl import cli
from ppctl.cli.choices import all_settings
from ppctl.cli.help import COMMANDS, EXAMPLES, MOST_USED
from ppctl.config import Config, Interleaved
from ppctl.errors import CheckpointError, NonFiniteError

PPCTL = str(Path(sys.executable).parent / "ppctl")

# A stand-in for `ppctl train` in the jobs of a sweep, which are processes: Python imports sitecustomize at its start.
STAND_IN = """
import json, signal, sys, time, types

def train(config, words, *, as_json):
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        print(json.dumps({"layers": config.model.num_layers, "dir": config.run.dir, "as_json": as_json}), flush=True)
        if config.run.seed == 9:  # a long run
            time.sleep(30)
    except KeyboardInterrupt:  # as a run that takes a moment to save when interrupted
        time.sleep(0.5)
        print("saved", flush=True)
        return 130
    return 1 if config.model.num_layers == 3 else 0

sys.modules["ppctl.cli.commands.train"] = types.ModuleType("ppctl.cli.commands.train")
sys.modules["ppctl.cli.commands.train"].train = train
"""


@pytest.fixture(autouse=True)
def empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PPCTL_DEBUG", raising=False)
    return tmp_path


@pytest.fixture
def served(monkeypatch):
    """The (command, config, as_json) of each command that was reached; the commands themselves do nothing."""
    calls: list[tuple[str, Config, bool]] = []

    def stand_in(command):
        def serve(config, words=(), *, as_json):
            calls.append((command, config, as_json))
            return 0

        return serve

    for command in COMMANDS:
        name = f"ppctl.cli.commands.{command}"
        module = sys.modules.get(name)
        if not isinstance(module, StandIn):
            module = StandIn(name)
            monkeypatch.setitem(sys.modules, name, module)
        setattr(module, command, stand_in(command))
    monkeypatch.setattr(
        "ppctl.cli.entry.launch", lambda config, words, *, as_json: stand_in("launch")(config, as_json=as_json)
    )
    return calls


class StandIn(types.ModuleType):
    pass


def test_a_request_reaches_its_command_as_dataclasses(served):
    assert cli.main(["train", "mesh=1x4", "schedule.num_microbatches=16", "--json", "run.name=x"]) == 0
    [(command, config, as_json)] = served
    assert (command, as_json) == ("train", True)
    assert isinstance(config, Config)
    assert config.schedule == Interleaved(num_microbatches=16)
    assert (config.mesh.text, config.run.dir) == ("1x4", "runs/x")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_served_and_leaves_no_files(command, served, empty_directory):
    before = os.environ.copy(), list(sys.argv)
    assert cli.main([command]) == 0
    assert [name for name, _, _ in served] == [command]
    assert list(empty_directory.iterdir()) == []
    assert (os.environ.copy(), sys.argv) == before


FAULTS = [
    # the command line itself
    (
        "trian",
        r"trian is not a command. Did you mean train\? \(train, .*, inspect, bench, sched.*, report, examples, init\)",
    ),
    ("tone", "tone is not a command. .*train, verify, doctor, plan, tune, inspect, bench"),
    ("model=mlp", "model=mlp: a command comes first, for example ppctl train model=mlp"),
    ("train --jsn", "--jsn is not an option. Did you mean --json"),
    ("train --json=1", "argument --json: ignored explicit argument '1'"),
    ("train --cfg everything", "argument -c/--cfg: invalid choice: 'everything'"),
    ("train --cfg job --multirun", "--cfg and --multirun exclude each other"),
    ("train --resolve", "--resolve only goes with --cfg"),
    ("train --config-dir nowhere", "--config-dir nowhere: there is no such directory"),
    ("train --help modle", "modle is not a part with settings. Did you mean model"),
    ("train --help model=ml", "model=ml is not an option of model. Did you mean model=mlp"),
    ("--completion fish", "--completion takes bash"),
    # keys
    (
        "train model.layrs=3",
        "model.layrs is not a setting of model=transformer. Did you mean model.num_layers.*d_model",
    ),
    ("train model={layrs:3}", "model.layrs is not a setting of model=transformer"),
    ("train modle=mlp", "modle is not a part of the config. Did you mean model.*schedule.*recipes"),
    ("train modle.num_layers=3", "modle is not a part of the config. Did you mean model"),
    ("train num_layers=3", "num_layers is not a part of the config. Did you mean model.num_layers"),
    ("train schedule.num_layers=3", "schedule.num_layers is not a setting of .* Did you mean model.num_layers"),
    ("train run.checkpoint.evry=3", "run.checkpoint.evry is not a setting of run. Did you mean run.checkpoint.every"),
    ("train mesh.tp=2", "mesh.tp is not a setting of mesh=2x4x1.* .settings: dp, pp, fsdp"),
    ("train mesh.pp.x=2", "mesh.pp.x: mesh.pp is one value, with nothing below it"),
    (
        "train schedule=gpipe schedule.num_chunks=2",
        "num_chunks is not .*=gpipe. It is a setting of schedule=interleaved",
    ),
    ("train data.path=x", "data.path is not a setting of data=stdlib. It is a setting of data=text and data=tokens"),
    (
        "train partition.layers=[3,2]",
        "layers: partition=uniform has no settings of its own. Choose partition=explicit, and",
    ),
    ("train partition=explicit partition.lyrs=[1]", "Did you mean partition.layers. .settings: layers"),
    ("train partition=explicit partition.layers.a=1", "partition.layers is one value, with nothing below it"),
    ("train partition=balanced partition.x=1", "partition.x is not a setting of partition=balanced. .settings: none"),
    ("train +x=1", "x is not a part of the config"),
    ("train +model.bar=2", "model.bar is not a setting of model=transformer"),
    ("train +model.bar.x=2", "model.bar is not a setting of model=transformer"),
    ("train +recipe=tiny", "recipe is not a part of the config. Did you mean recipes"),
    ("train +recipes=tiny", "recipes is there already. Drop the .: recipes=tiny"),
    ("train ++model.num_layers=2", "model.num_layers is there already. Drop the .: model.num_layers=2"),
    ("train ~schedule", "~schedule: nothing can be removed. Give schedule another value"),
    ("train ~run.seed", "~run.seed: nothing can be removed"),
    ("train hydra.foo=1", "hydra.foo is not a setting of Hydra's"),
    ("train hydra/launcher=basic", "hydra/launcher=basic is not an option of hydra/launcher"),
    ("train hydra.launcher.x=1", "hydra.launcher.x=1 is for the jobs of a sweep. Add --multirun"),
    ("train --multirun run.seed=1,2 hydra.launcher.x=1", "launcher.x is not a setting of hydra/launcher=ppctl. .set"),
    ("train --multirun run.seed=1,2 hydra.launcher.jbos=1", "Did you mean hydra.launcher.jobs"),
    ("train --multirun run.seed=1,2 hydra.launcher.nodes=2", "It is one of hydra/launcher=submitit_slurm"),
    ("train --multirun run.seed=1,2 hydra/launcher=[a]", "is not an option of hydra/launcher"),
    ("train --multirun run.seed=1,2 hydra.launcher.jobs=abc", "hydra.launcher.jobs takes a whole number .default 1"),
    ("train --multirun run.seed=1,2 hydra.launcher.jobs=0", "hydra.launcher.jobs=0 must be"),
    ("train --multirun run.seed=1,2 hydra.launcher._target_=os.kill", "choose hydra/launcher=ppctl . submitit_local"),
    ("verify --multirun run.seed=1,2 hydra/launcher=submitit_local", "only jobs of `ppctl train` run side by side"),
    ("verify --multirun hydra/sweeper=optuna optim.lr=interval(0,1)", "searches by what runs record, and `ppctl ver"),
    ("train model@x=mlp", "Could not override 'model@x'"),
    ("train launch.proceses=2", "launch.proceses is not a setting of launch. Did you mean launch.processes"),
    # options of groups
    ("train schedule=interleavd", "Did you mean schedule=interleaved.*.schedule: interleaved, .*gpipe"),
    ("train optim=zzz", r"optim=zzz is not an option of optim. \(optim: adamw, sgd\)"),
    ("train schedule=null", "schedule=null is not an option of schedule"),
    ("train model=[mlp,transformer]", "is not an option of model"),
    ("train recipes=tinny", "recipes=tinny is not an option of recipes. Did you mean recipes=tiny"),
    ("train schedule.name=gpipe", "the choice of schedule sets its name. Use schedule=gpipe"),
    ("train schedule={name:gpipe}", "schedule.name=gpipe, but the choice is schedule=interleaved. Use schedule=gpipe"),
    ("train partition=balancd", "partition=balancd is not an option of .* Did you mean partition=balanced"),
    ("train mesh=2x", "mesh=2x is not a mesh. Write DPxPP or DPxPPxFSDP"),
    ("train mesh=foo", "mesh=foo is not a mesh"),
    ("train mesh=0x4", "mesh=0x4 is not a mesh. .*at least 1"),
    ("train mesh=2x2x2x2", "mesh=2x2x2x2 is not a mesh"),
    ("train mesh=4", "mesh=4 is not a mesh"),
    ("train --multirun mesh=1x2,2x", "mesh=2x is not a mesh"),
    # values
    ("train model.num_layers=abc", "model.num_layers=abc: model.num_layers takes a whole number .default 8"),
    ("train model={num_layers:abc}", "model.num_layers takes a whole number .default 8.*'abc'"),
    ("train model.num_layers=", "model.num_layers=: model.num_layers takes a whole number"),
    ("train run.num_steps=4.5", "run.num_steps=4.5: run.num_steps takes a whole number .default 200"),
    ("train mesh.pp=null", "mesh.pp=null: mesh.pp takes a whole number .default 1"),
    ("train run.eval_every=often", "run.eval_every takes a whole number or null .default 100"),
    ("train run.tensorboard=maybe", "run.tensorboard takes true or false .default true"),
    ("train optim.lr=fast", "optim.lr takes a number .default 0.002"),
    ("train run.name=[a]", "run.name takes text"),
    ("train run=3", "run=3: run is a part. Set what is in it, for example run.name"),
    ("train run.checkpoint=null", "run.checkpoint is a part. Set what is in it, for example run.checkpoint.every"),
    ("train hydra.job.num=abc", "hydra.job.num=abc: hydra.job.num does not take such a value"),
    ("train model={name:[1]}", "model.name does not take such a value"),
    ("train model=???", "You must specify 'model'"),
    ("train data=text", "data.path has no value. data=text needs one: add data.path="),
    ("train partition=explicit", "partition.layers has no value. partition=explicit needs one"),
    ("train partition=explicit partition.layers={a:1}", "partition.layers={'a': 1} is neither a list"),
    ("train partition=explicit partition.layers=4", "partition.layers=4 is neither a list .* nor text"),
    ("train partition=explicit partition.layers=[4,x]", r"partition.layers=\[4, 'x'\]: stage 1 has x layers"),
    ("train partition=explicit partition.layers=3,2,2,1", "gives several values. Add --multirun"),
    ("train partition=explicit partition.layers=Et|(tt|)*2,tL", "cannot be read .*needs quotes that reach ppctl"),
    ("train partition=balanced executor=reference mesh=1x1", "partition=balanced divides layers .* has none"),
    ("train run.dir=${run.nam}", "run.dir=.*: Interpolation key 'run.nam' not found"),
    ("train run.num_steps=0", "run.num_steps=0 must be"),
    ("train executor=reference", "executor=reference is the un-pipelined model .*mesh=2x4 has 8. Use mesh=1x1"),
    ("train launch.processes=3", "mesh=2x4 has 8 devices, not a multiple of launch.processes=3. Use .*processes=2"),
    ("verify launch.processes=2", "launch.processes=2: only `ppctl train` and `ppctl doctor` heed this. Leave it out"),
    ("bench launch.max_restarts=2", "launch.max_restarts=2: only `ppctl train` and `ppctl doctor` heed this"),
    ("train plan.compile=true", "ppctl: plan.compile=true: only `ppctl plan` heeds this. Leave it out"),
    ("plan plan.topology=v5e:4x4", "names what the compiler compiles for, but plan.compile=false. Use plan.compile"),
    ("plan plan.compile=true plan.topology=v5e", "plan.topology=v5e is not a topology. Write the kind of chip"),
    ("plan plan.compile=true plan.topology=v5e:2x2 executor=mpmd", "executor=mpmd compiles for each rank's devices"),
    ("plan plan.compile=true plan.topology=v5e:2x2 run.platform=cuda", "run.platform=cuda starts devices. Use"),
    ("plan plan.memory_gib=0", "plan.memory_gib=0.0 is not a size. Use a number above 0"),
    ("plan launch.processes=2", "launch.processes=2: only `ppctl train` and `ppctl doctor` heed this"),
    ("doctor launch.processes=2 launch.max_restarts=1", "launch.max_restarts=1: only `ppctl train` is started again"),
    (
        "verify hardware=h100",
        "ppctl: hardware=h100: only `ppctl train`, `ppctl plan` and `ppctl tune` heed this. Leave it out",
    ),
    ("bench costs.doctor=x", "ppctl: costs.doctor=x: only `ppctl train`, `ppctl plan` and `ppctl tune` heed this"),
    ("doctor costs=measure", "ppctl: costs=measure: only `ppctl train`, `ppctl plan` and `ppctl tune` heed this"),
    ("doctor hardware=host", "hardware=host: only `ppctl train`, `ppctl plan` and `ppctl tune` heed this"),
    ("bench plan.memory_gib=3", "plan.memory_gib=3.0: only `ppctl plan` heeds this. Leave it out"),
    (
        "plan hardware.peak_flops.bfloat16=1e12",
        "hardware=auto has no settings of its own. Choose hardware=.* or one of .* others, and set it there",
    ),
    ("plan hardware.memory_gib=3", "hardware.memory_gib: hardware=auto has no settings of its own"),
    ("plan hardware=h100 hardware.peak_flops.float64=1", "has no float64 yet. Add it with a .: .hardware.peak_flops.f"),
    ("plan hardware=h100 hardware.peak_flops=3", "hardware.peak_flops takes values by name .no default"),
    ("plan hardware=h100 hardware.peak_flops.float32=x", "peak_flops.float32 does not take such a value"),
    ("plan hardware=h100 hardware.device_kinds=3", "hardware.device_kinds takes a list .no default"),
    ("plan hardware=h100 hardware.flops_fraction=null", "hardware.flops_fraction takes a number .no default"),
    ("plan hardware=h100 hardware.memory_gib=x", "hardware.memory_gib takes a number or null .default null"),
    ("plan hardware=h100 hardware.flops_fraction=2", "hardware.flops_fraction=2.0 must lie in"),
    ("plan hardware=h10", "hardware=h10 is not an option of hardware. Did you mean hardware=h100"),
    ("plan costs.cache_dir=x", "costs.cache_dir is not a setting of costs=analytic. It is a setting of costs=measure"),
    ("train run.peak_flops=1e12", "run.peak_flops is not a setting of run. Did you mean hardware.peak_flops"),
    # Hydra's grammar
    ("train tiny", "'tiny' is not KEY=VALUE. Did you mean recipes=tiny"),
    ("train mlp", "'mlp' is not KEY=VALUE. Did you mean model=mlp"),
    ("train model", "'model' is not KEY=VALUE. Did you mean model=transformer"),
    ("train =3", "'=3' is not KEY=VALUE"),
    ("train run.name=a=b", "run.name=a=b cannot be read .*needs quotes that reach ppctl: 'run.name="),
    ("train run.name=[1,", "cannot be read"),
    ("train run.name=it's", "cannot be read"),
    ("train run.seed=1,2", "run.seed=1,2 gives several values. Add --multirun"),
    ("train --multirun optim.lr=interval(0,1)", "a sweep over optim.lr needs a list of values"),
    # sweeps
    ("train --multirun", "--multirun runs every combination .* nothing here has several values. Give some"),
    ("train --multirun run.seed=3", "nothing here has several values"),
    ("train --multirun run.seed=range(3,3)", "This sweep is empty"),
    ("train --multirun model.layrs=2,3", "model.layrs is not a setting of model=transformer. Did you mean"),
    ("train --multirun +foo=2,3", "foo is not a part of the config"),
    ("train --multirun run.seed=1,1", "Jobs 0 .run.seed=1. and 1 .run.seed=1. have the same run.dir, runs/default/r"),
    ("train --multirun run.dir=x,./x", "have the same run.dir, x. Leave out a value that is there twice"),
    ("train --multirun data.batch_size=7,9", "All 2 jobs are refused. data.batch_size=7 is not a multiple"),
    ("train --multirun plan.compile=true run.seed=1,2", "plan.compile=true: only `ppctl plan` heeds this"),
    ("train --multirun run.dir=/proc/x run.seed=1,2", "run.dir=/proc/x cannot be written"),
    ("train hydra.launcher.jobs=2", "hydra.launcher.jobs=2 is for the jobs of a sweep. Add --multirun"),
    ("train --multirun run.seed=1,2 hydra.launcher.jobs=0", "hydra.launcher.jobs=0 must be a finite number of at le"),
    ("train --multirun run.seed=1,2 hydra.launcher.jobs=many", "hydra.launcher.jobs takes a whole number"),
    ("train --multirun run.seed=1,2 hydra.launcher.jobs=1,2", "Give hydra.launcher.jobs one value"),
    ("train --multirun run.seed=1,2 hydra/sweeper=basic", "hydra/sweeper=basic is not an option of hydra/sweeper"),
    ("bench --multirun run.seed=1,2 hydra.launcher.jobs=2", "only jobs of `ppctl train` run side by side"),
]


@pytest.mark.parametrize(("line", "message"), FAULTS, ids=[line for line, _ in FAULTS])
def test_a_wrong_request_is_one_line_and_exit_code_2(line, message, capsys, served, empty_directory):
    assert cli.main(line.split()) == 2
    out, err = capsys.readouterr()
    assert err.startswith("ppctl: ")
    assert err.count("\n") == 1
    assert re.search(message, err), err
    assert (out, served) == ("", [])
    assert list(empty_directory.iterdir()) == []


RECIPES = {
    "key": ("model: { layrs: 3 }", r"model.layrs is not a setting .*num_layers.* \(in recipes=key\)"),
    "top": ("foo: 1", r"foo is not a part of the config.* \(in recipes=top\)"),
    "value": ("model: { num_layers: abc }", r"model.num_layers takes a whole number .*'abc'.* \(in recipes=value\)"),
    "option": ("defaults: [override /schedule: gpip]", r"Did you mean schedule=gpipe.* \(in recipes=option\)"),
    "group": ("defaults: [override /modle: mlp]", "In 'recipes/group': Could not override 'modle'"),
    "name": ("schedule: { name: gpipe }", "schedule.name=gpipe, but the choice is .* `override /schedule: gpipe`"),
    "yaml": ("model: { num_layers: 3", "yaml.*line 2"),
    "check": ("run: { num_steps: 0 }", "run.num_steps=0 must be"),
}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_fault_in_a_users_recipe_is_one_line_too(recipe, capsys, served, empty_directory):
    text, message = RECIPES[recipe]
    write(empty_directory / f"mine/recipes/{recipe}.yaml", f"# @package _global_\n{text}\n")
    assert cli.main(["train", f"recipes={recipe}", "--config-dir", "mine"]) == 2
    err = capsys.readouterr().err
    assert re.fullmatch(rf"ppctl: .*{message}.*\n", err), err


def test_a_recipe_without_its_package_line_is_explained(capsys, empty_directory):
    write(empty_directory / "mine/recipes/bare.yaml", "model: { num_layers: 4 }\n")
    assert cli.main(["train", "recipes=bare", "--config-dir", "mine"]) == 2
    assert "the file starts with `# @package _global_`" in capsys.readouterr().err


def test_an_unreadable_recipe_is_named(capsys, empty_directory):
    write(empty_directory / "mine/recipes/bytes.yaml", "").write_bytes(b"\xff\xfe")
    assert cli.main(["train", "recipes=bytes", "--config-dir", "mine"]) == 2
    assert re.fullmatch(r"ppctl: .*decode.* \(in recipes=bytes\)\n", capsys.readouterr().err)


def test_an_option_without_schema_is_explained(capsys, empty_directory):
    write(empty_directory / "mine/model/free.yaml", "num_layers: 4\n")
    assert cli.main(["train", "model=free", "--config-dir", "mine"]) == 2
    assert "model: the file chosen states no schema" in capsys.readouterr().err


def test_a_users_options_and_recipes_are_found(served, empty_directory):
    write(empty_directory / "mine/schedule/four.yaml", "defaults: [interleaved]\nnum_chunks: 4\n")
    write(empty_directory / "mine/recipes/big.yaml", "# @package _global_\ndefaults: [tiny]\nrun: { name: big }\n")
    assert cli.main(["train", "--config-dir", "mine", "recipes=big", "schedule=four"]) == 0
    config = served[0][1]
    assert (config.schedule.num_chunks, config.run.dir, config.model.d_model) == (4, "runs/big", 32)


def raising(error):
    def serve(config, words=(), *, as_json):
        raise error

    return serve


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (CheckpointError("no checkpoint\nin runs/x."), 2, "ppctl: no checkpoint in runs/x.\n"),
        (NonFiniteError("loss=nan at step 3."), 4, "ppctl: loss=nan at step 3.\n"),
        (KeyboardInterrupt(), 130, "ppctl: interrupted.\n"),
    ],
)
def test_a_commands_errors_have_their_exit_codes(error, code, text, served, capsys, monkeypatch):
    monkeypatch.setattr(sys.modules["ppctl.cli.commands.train"], "train", raising(error))
    assert cli.main(["train"]) == code
    assert capsys.readouterr().err == text


def test_a_bug_keeps_its_traceback_and_says_so(served, capsys, monkeypatch):
    monkeypatch.setattr(sys.modules["ppctl.cli.commands.train"], "train", raising(RuntimeError("boom")))
    assert cli.main(["train"]) == 1
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "ppctl: this is a bug in ppctl, not in your request: RuntimeError: boom" in err


def test_debug_shows_the_traceback_of_a_wrong_request(capsys, monkeypatch):
    monkeypatch.setenv("PPCTL_DEBUG", "1")
    assert cli.main(["train", "model.layrs=3"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1].startswith("ppctl: model.layrs is not a setting")


# --- what is shown ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_ppctl_alone_shows_the_commands(argv, capsys):
    assert cli.main(argv) == 0
    out = capsys.readouterr().out
    for command in COMMANDS:
        assert re.search(rf"^  {command} +\w", out, re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_groups_settings_examples_and_exit_codes(command, capsys):
    assert cli.main([command, "--help"]) == 0
    out = capsys.readouterr().out
    for text in ("Usage: ", "interleaved | ", "model.num_layers=8", "optimizer steps", "Examples:", "130, 143"):
        assert text in out
    assert max(map(len, out.splitlines())) <= 120


def test_help_of_a_part_without_settings_says_what_it_is(capsys):
    assert cli.main(["train", "--help", "partition"]) == 0
    out = capsys.readouterr().out
    for text in ("partition=uniform: As many layers", "partition=balanced: ", "partition.layers=...  a list"):
        assert text in out


def test_help_of_parts_shows_all_their_settings(capsys):
    assert cli.main(["train", "--help", "schedule", "model=mlp", "run", "mesh"]) == 0
    out = capsys.readouterr().out
    for text in (
        "schedule=interleaved: ",
        "schedule.num_chunks=2",
        "model.d_model=64",
        "run.profile.start=null",
        "mesh.pp",
    ):
        assert text in out
    assert "swiglu" not in out


@pytest.mark.parametrize("line", [line for lines in EXAMPLES.values() for line in lines])
def test_the_examples_of_the_help_compose(line, served, monkeypatch):
    argv = line.split()[1:]
    if "--multirun" in argv:  # each combination is a job; its first one stands for them
        argv = [word.split(",")[0] for word in argv if word != "--multirun"]
    assert cli.main(argv) == 0


def test_the_settings_of_the_help_are_explained():
    plain = ("run.name",)
    assert [key for key in MOST_USED if not all_settings()[key].about] == list(plain)


def test_the_launcher_is_served_and_shown_by_train_and_doctor_alone(served, capsys):
    assert cli.main(["train", "recipes=tiny", "launch.processes=2"]) == 0
    [(command, config, _)] = served
    assert (command, config.launch.processes) == ("launch", 2)
    for command in COMMANDS:
        assert cli.main([command, "--help"]) == 0
        assert ("launch.max_restarts=0" in capsys.readouterr().out) == (command in ("train", "doctor"))


def test_a_command_shows_the_groups_that_it_heeds(capsys):
    for command in COMMANDS:
        assert cli.main([command, "--help"]) == 0
        out = capsys.readouterr().out
        for line in ("  hardware  auto |", "  costs     analytic | measure\n"):
            assert (line in out) == (command in ("train", "plan", "tune")), (command, line)


def test_hardware_of_a_users_own_is_a_choice(capsys, served, empty_directory):
    write(empty_directory / "mine/hardware/ours.yaml", "defaults: [h100]\nname: ours\nflops_fraction: 0.7\n")
    words = ["hardware=ours", "+hardware.peak_flops.float64=67e12", "hardware.peak_flops.bfloat16=900e12"]
    assert cli.main(["plan", "--config-dir", "mine", *words]) == 0
    [(_, config, _)] = served
    ours = config.hardware
    assert (ours.name, ours.flops_fraction, ours.host_devices) == ("ours", 0.7, 8)
    assert ours.peak_flops == {"float32": 494.7e12, "bfloat16": 900e12, "float64": 67e12}


def test_hardware_without_its_numbers_is_refused(capsys, served, empty_directory):
    write(empty_directory / "mine/hardware/bare.yaml", "defaults: [/schema_hardware@_here_]\nname: bare\n")
    assert cli.main(["plan", "hardware=bare", "--config-dir", "mine"]) == 2
    assert "hardware.device_kinds has no value. hardware=bare needs one" in capsys.readouterr().err


def test_cfg_prints_the_composed_config(capsys, served):
    assert cli.main(["train", "--cfg", "job", "recipes=tiny", "--resolve"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^mesh:\n  dp: 1\n  pp: 2\n  fsdp: 1$", out, re.MULTILINE)
    assert "  dir: runs/tiny\n" in out
    assert served == []


def test_version_is_the_packages(capsys):
    assert cli.main(["--version"]) == 0
    assert re.fullmatch(r"ppctl \d+\.\d+\.\d+\n", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("ppctl tr", "train"),
        ("ppctl train sched", "schedule="),
        ("ppctl train schedule=", "schedule=gpipe"),
        ("ppctl train recipes=", "recipes=tiny"),
        ("ppctl train mesh=2", "mesh=2x4"),
        ("ppctl train --json schedule=gpipe schedule.", "schedule.num_microbatches="),
        ("ppctl train launch.", "launch.processes="),
        ("ppctl train --js", "--json"),
    ],
)
def test_bash_completes(line, expected, capsys, monkeypatch):
    monkeypatch.setenv("COMP_LINE", line)
    assert cli.main(["-sc", "query=bash"]) == 0
    assert expected in capsys.readouterr().out.split()


def test_bash_completion_of_a_wrong_line_is_silent(capsys, monkeypatch):
    monkeypatch.setenv("COMP_LINE", "ppctl train schedule=nope x=[ model.")
    assert cli.main(["-sc", "query=bash"]) == 0
    assert capsys.readouterr() == ("", "")


def test_the_completion_script_is_for_ppctl(capsys):
    assert cli.main(["--completion", "bash"]) == 0
    assert "hydra_bash_completion ppctl" in capsys.readouterr().out


# --- processes -------------------------------------------------------------------------------------------------------


def test_a_wrong_request_loads_no_jax_and_is_fast():
    code = (
        "import sys; from ppctl.cli import main; c = main(['train', 'model.layrs=3']); print(c, 'jax' in sys.modules)"
    )
    before = os.times().children_user
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", "False"]
    assert os.times().children_user - before < 2  # CPU seconds: a busy machine does not count


def test_the_console_script_and_the_module_are_the_same_program():
    for program in ([PPCTL], [sys.executable, "-m", "ppctl.cli"]):
        done = subprocess.run([*program, "train", "mesh=2x"], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("ppctl: mesh=2x is not a mesh")


def test_info_shows_where_the_config_comes_from():
    done = subprocess.run([PPCTL, "train", "--info", "searchpath"], capture_output=True, text=True, check=True)
    assert re.search(r"main +\| file://.*conf", done.stdout)  # a process of its own: Hydra adds a log handler


@pytest.fixture
def jobs_environment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stand_in")
    (folder / "sitecustomize.py").write_text(STAND_IN)
    places = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}


def sweep(environment, *words):
    command = [PPCTL, "train", "--multirun", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_a_sweep_runs_each_job_in_its_own_process_and_directory(jobs_environment, empty_directory):
    done = sweep(jobs_environment, "model.num_layers=2,3,4", "run.name=abc", "--json")
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert results == [
        {"layers": n, "dir": f"runs/abc/model.num_layers={n}", "as_json": True} for n in (2, 3, 4)
    ]  # the failing second job did not stop the third
    assert done.returncode == 1
    rows = re.findall(r"^ \d: model.num_layers=(\d) +(\w+)", done.stderr, re.MULTILINE)
    assert rows == [("2", "finished"), ("3", "failed"), ("4", "finished")]
    assert "ppctl: job 1: model.num_layers=3: ended with exit code 1\n" in done.stderr
    left = {str(path.relative_to("runs/abc")) for path in Path("runs/abc").rglob("*") if path.is_file()}
    assert left == {"multirun.yaml", "sweep.csv", "sweep.json", "sweep.html"}


def test_a_sweep_over_run_dir_leaves_it_alone(jobs_environment):
    done = sweep(jobs_environment, "run.dir=x,y")
    assert [json.loads(line)["dir"] for line in done.stdout.splitlines()] == ["x", "y"]
    assert done.returncode == 0


def test_a_sweeps_directories_have_names_that_are_one_path_component(jobs_environment):
    done = sweep(jobs_environment, "data=text", "data.path=/a/b,/a_b", "run.dir='it\\'s, here'")
    found = [json.loads(line)["dir"] for line in done.stdout.splitlines()]
    assert len(set(found)) == 2
    assert all(re.fullmatch(r"it's, here/data\.path=_a_b(-\w{8})?", name) for name in found), found


def test_a_job_that_is_refused_does_not_stop_the_others(jobs_environment):
    done = sweep(jobs_environment, "data.batch_size=7,16")
    assert done.returncode == 1
    assert "ppctl: job 0: data.batch_size=7: refused: data.batch_size=7 is not a multiple" in done.stderr
    assert [json.loads(line)["dir"] for line in done.stdout.splitlines()] == ["runs/default/data.batch_size=16"]


@pytest.mark.parametrize(
    ("command", "seeds"), [("train", [1, 2]), ("verify", [1, 2]), ("train hydra.launcher.jobs=2", [2, 1])]
)
def test_a_sweep_is_composed_and_checked_before_anything_runs(command, seeds, served, monkeypatch, empty_directory):
    asked = []
    monkeypatch.setattr("ppctl.launch.sweep.sweep.serve", lambda found, report: asked.append(found) or 0)
    words = command.split()
    assert cli.main([words[0], "-m", f"run.seed={seeds[0]},{seeds[1]}", "optim.lr=0.1", *words[1:]]) == 0
    [found] = asked
    assert [job.values for job in found.jobs] == [{"run.seed": seed} for seed in seeds]
    assert found.num_parallel == (2 if len(words) > 1 else 1)
    assert found.trains == (words[0] == "train")
    assert [job.config.run.dir for job in found.jobs] == [f"runs/default/run.seed={seed}" for seed in seeds]
    assert found.jobs[0].words == (words[0], f"run.seed={seeds[0]}", "optim.lr=0.1")
    assert (served, list(empty_directory.iterdir())) == ([], [])


def test_a_file_may_describe_a_sweep(monkeypatch, empty_directory):
    asked = []
    monkeypatch.setattr("ppctl.launch.sweep.sweep.serve", lambda found, report: asked.append(found) or 0)
    text = "# @package _global_\nhydra: {sweeper: {params: {run.seed: '1,2'}}, launcher: {jobs: 3}}\n"
    write(empty_directory / "mine/recipes/both.yaml", text)
    assert cli.main(["train", "-m", "recipes=both", "--config-dir", "mine"]) == 0
    assert ([job.swept for job in asked[0].jobs], asked[0].num_parallel) == ([("run.seed=1",), ("run.seed=2",)], 3)


@pytest.mark.parametrize(("number", "code", "last"), [(signal.SIGINT, 130, "saved"), (signal.SIGTERM, 143, "")])
@pytest.mark.parametrize("side", [1, 2])
def test_an_interrupted_sweep_waits_for_its_jobs_and_starts_no_other(number, code, last, side, jobs_environment):
    command = [PPCTL, "train", "--multirun", "run.seed=9", "model.num_layers=1,2,4", "--json"]
    command += [f"hydra.launcher.jobs={side}"]
    process = subprocess.Popen(
        command, env=jobs_environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    layers = {json.loads(process.stdout.readline())["layers"] for _ in range(side)}
    assert layers == {1, 2} if side == 2 else {1}
    if number == signal.SIGINT:  # a terminal sends it to all of its foreground processes
        os.killpg(process.pid, number)
    else:
        process.terminate()
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out.split()) == (code, [last] * side * bool(last))
    assert err.count(f"interrupted ({code})") == side
    assert "ppctl: job 2: model.num_layers=4: running" not in err
    states = [record["status"] for record in json.loads(Path("runs/default/sweep.json").read_text())]
    assert states == ["interrupted"] * side + ["not started"] * (3 - side)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path
