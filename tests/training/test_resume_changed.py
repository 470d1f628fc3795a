"""A run resumes with its model, or prints a note: settings that may change, and their record."""

import importlib
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from ppctl import cli, config
from ppctl.config.changed_settings import SAME_FUNCTION, changes
from ppctl.config.code_digests import changed_modules, sources
from ppctl.config.groups.rope_settings import Rope
from ppctl.training.run.resume import lr_changes, start_fault

WORDS = (
    "model=custom model.target=own_model.model model.num_layers=2 data=regression "
    "data.batch_size=8 data.num_rows=256 data.num_features=4 data.num_targets=4 mesh=1x2 "
    "schedule=gpipe schedule.num_microbatches=2 run.platform=cpu run.eval_every=null "
    "run.trackers=[] run.dir=run run.num_steps=2 +model.options.slope=0.5"
)
OWN_MODEL = '''
"""A model."""
import jax.numpy as jnp
import own_bend
from ppctl import Stack


def model(num_layers, dtype, data, slope):
    def head(embed_head, x, targets):
        return jnp.square(x - targets).sum(), x.size

    return Stack(
        num_layers=num_layers,
        init_embed_head=lambda key: {"scale": jnp.ones((), dtype)},
        init_layer=lambda key, index: jnp.eye(data.input_dim, dtype=dtype),
        embed=lambda embed_head, inputs: inputs * embed_head["scale"],
        layer=lambda w, x: own_bend.bend(x @ w, slope),
        head=head,
    )
'''
OWN_BEND = """
def bend(x, slope):
    return x * slope
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Enter a directory with a custom model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(
        sys, "dont_write_bytecode", True
    )  # an edit within the same second would go unseen
    Path("own_model.py").write_text(OWN_MODEL)
    Path("own_bend.py").write_text(OWN_BEND)
    return tmp_path


def _forget():
    for name in ("own_model", "own_bend"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


@pytest.fixture
def train(own, capsys):
    """Return a function that trains the model of the current files: (exit code, stdout, stderr)."""

    def train(*words):
        _forget()
        code = cli.main(["train", *WORDS.split(), *words])
        return code, *capsys.readouterr()

    return train


def test_a_run_resumes_with_another_model_only_on_request_and_with_a_note_everywhere(train, capsys):
    assert train()[0] == 0
    Path("own_bend.py").write_text(OWN_BEND + "# a comment changes nothing\n")
    before = {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()}
    more = ("run.num_steps=3", "optim.lr=0.1")
    assert train("run.num_steps=2")[1].startswith("run has finished all run.num_steps=2 steps")

    code, out, err = train(*more, "model.options.slope=0.25")
    assert (code, "compiling" in out, err.count("\n")) == (2, False, 1)
    assert "is of another model: model.options.slope: 0.5 then, 0.25 now. Restore that" in err
    Path("own_bend.py").write_text(OWN_BEND.replace("* slope", "* slope + 0.0"))
    code, out, err = train(*more)
    assert (code, "compiling" in out) == (2, False)
    assert "is of another model: model.code(own_bend): " in err
    assert {path: path.read_bytes() for path in Path("run").rglob("*") if path.is_file()} == before

    code, out, _ = train(*more, "model.options.slope=0.25", "run.resume_with=changed")
    assert code == 0
    lines = [line for line in out.splitlines() if line.startswith("changed ")]
    code_line = lines.pop(3)
    assert lines == [
        f"changed   since step 2: {each}"
        for each in (
            "model.options.slope 0.5 -> 0.25",
            "optim.lr 0.002 -> 0.1",
            "run.num_steps 2 -> 3",
            "lr 2.0e-03 at step 2 -> 1.0e-01 at step 3",
        )
    ]
    assert code_line.startswith("changed   since step 2: model.code(own_bend) ")

    started = [json.loads(line) for line in Path("run/status.jsonl").read_text().splitlines()][-2]
    assert started["changed"][1] == {"name": "optim.lr", "before": 0.002, "now": 0.1}
    assert cli.main(["runs", "show", "run"]) == 0
    assert "changed   since step 2: optim.lr 0.002 -> 0.1\n" in capsys.readouterr().out
    assert cli.main(["report", "run"]) == 0
    assert "<li>since step 2: optim.lr 0.002 -&gt; 0.1</li>" in Path("run/report.html").read_text()

    assert (
        train(*more, "model.options.slope=0.25", "run.num_steps=4")[0] == 0
    )  # with the model of step 3


def stored(request):
    return json.loads(json.dumps(asdict(request)))


def test_every_setting_of_a_model_is_compared_except_those_with_the_same_function():
    models = (config.Transformer(), config.MLP(), config.CustomModel(target="a.b"))
    for model in models:
        for name, value in asdict(model).items():
            if name == "name":
                continue
            if name in ("rope", "moe"):
                for key, usual in value.items():
                    part = replace(getattr(model, name), **{key: "x" if usual == 3 else 3})
                    now = config.Config(model=replace(model, **{name: part}))
                    (change,) = changes(stored(config.Config(model=model)), now)
                    assert change.is_of_function == (change.name not in SAME_FUNCTION)
                continue
            other = {"x": 1} if isinstance(value, dict) else "gelu" if name == "activation" else 3
            other = "swiglu" if value == other else other
            before, now = (
                config.Config(model=model),
                config.Config(model=replace(model, **{name: other})),
            )
            found = {change.name: change for change in changes(stored(before), now)}
            key = "model.options.x" if name == "options" else f"model.{name}"
            assert found[key].is_of_function == (key not in SAME_FUNCTION)
            assert not changes(stored(now), now)


def test_a_nested_setting_is_a_change_by_itself():
    heads = config.Config(model=config.Transformer(num_heads=4))
    turned = config.Config(model=config.Transformer(num_heads=4, rope=Rope(theta=500.0)))
    assert [change.text for change in changes(stored(heads), turned)] == [
        "model.rope.theta: 10000.0 then, 500.0 now"
    ]


def test_settings_that_two_choices_share_are_compared():
    few = config.Config(schedule=config.Schedule("gpipe", 4))
    many = config.Config(schedule=config.Schedule("1f1b", 8), optim=config.SGD(lr=0.5))
    assert [change.arrow for change in changes(stored(few), many)] == [
        "schedule gpipe -> 1f1b",
        "schedule.num_microbatches 4 -> 8",
        "optim adamw -> sgd",
        "optim.lr 0.002 -> 0.5",
    ]


@pytest.mark.parametrize(
    ("then", "now", "step", "jump"),
    [
        (
            {"num_steps": 20},
            {"num_steps": 200},
            20,
            ["lr 2.1e-04 at step 20 -> 2.0e-03 at step 21"],
        ),
        ({"num_steps": 1000}, {"num_steps": 1001}, 500, []),
        ({"num_steps": 9}, {"num_steps": 9, "name": "other"}, 5, []),
    ],
)
def test_a_jump_of_the_learning_rate_at_a_resume_is_named(then, now, step, jump):
    optim = config.AdamW(warmup_steps=0)
    before, after = (config.Config(optim=optim, run=config.Run(**run)) for run in (then, now))
    assert [change.arrow for change in lr_changes(stored(before), after, step)] == jump


def test_where_and_how_a_run_is_started_is_no_change():
    before = config.Config()
    moved = replace(
        before,
        run=config.Run(name="b", dir="/b", resume="must", log_every=1, distributed="explicit"),
    )
    assert not changes(stored(before), replace(moved, launch=config.Launch(processes=2)))


def test_recorded_code_is_of_all_user_modules_without_comments_and_docstrings(own):
    module = importlib.import_module("own_model")
    before = sources("own_model.model")
    assert list(before) == ["own_bend", "own_model"]
    as_json = json.loads(json.dumps(before))
    Path("own_model.py").write_text(
        OWN_MODEL.replace("A model.", "The model.").replace("    def head", "\n    def head")
    )
    assert not changed_modules(as_json, sources("own_model.model"))
    Path("own_bend.py").write_text(OWN_BEND.replace("slope\n", "slope * 2\n"))
    assert changed_modules(as_json, sources("own_model.model")) == ["own_bend"]
    delattr(module, "own_bend")  # no longer used
    assert changed_modules(as_json, sources("own_model.model")) == ["own_bend"]
    assert sources("not.imported") == {}


def test_parameters_of_another_dtype_are_not_of_another_model():
    stored = {"a": "float64[2,3]", "b": "float64[3]"}
    wanted = {name: each.replace("64", "32") for name, each in stored.items()}
    assert start_fault(stored, stored) is None
    assert start_fault(stored, wanted) == (
        "another dtype: a is stored as float64[2,3], wanted float32[2,3] (the first of 2). Use "
        "run.dtype=float64."
    )
    found = start_fault(stored, wanted | {"b": "float32[4]"})
    assert found is not None
    assert found.startswith("another model: ")
