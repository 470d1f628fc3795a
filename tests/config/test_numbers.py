"""Every number among the settings: 0, -1, 10^20, NaN and infinity are checked, none ends in a
traceback.
"""

from __future__ import annotations

import math
import re
import typing
from dataclasses import fields, is_dataclass, replace

import pytest

from ppctl import cli, config as c
from ppctl.config import check
from ppctl.config.groups.data_settings import CustomData
from ppctl.config.groups.schedule_settings import Eager1F1B, Hanayo
from ppctl.errors import ConfigError

PARTS = {
    "model": [c.Transformer(), c.MLP()],
    "mesh": [c.Mesh()],
    "schedule": [c.Schedule(), Eager1F1B(), c.Interleaved(), Hanayo()],
    "executor": [c.Spmd(), c.Mpmd()],
    "optim": [c.AdamW(), c.SGD()],
    "data": [c.Stdlib(), c.Synthetic(), c.Regression()],
    "run": [c.Run()],
    "launch": [c.Launch()],
    "verify": [c.Verify()],
    "plan": [c.Plan()],
    "tune": [c.Tune()],
}
VALUES = (0, -1, 10**20, math.nan, math.inf)


def numeric(part, path=()):
    """The path of every setting of a part that takes a number."""
    hints = typing.get_type_hints(type(part))
    for field in fields(part):
        value = getattr(part, field.name)
        if is_dataclass(value):
            yield from numeric(value, (*path, field.name))
        elif {int, float} & {hints[field.name], *typing.get_args(hints[field.name])}:
            yield *path, field.name


def changed(part, path, value):
    first, *rest = path
    return replace(part, **{first: changed(getattr(part, first), rest, value) if rest else value})


def refusal(asked):
    try:
        check(asked)
    except ConfigError as error:
        return str(error)
    return None


SETTINGS = [
    (key, part, path) for key, parts in PARTS.items() for part in parts for path in numeric(part)
]


@pytest.mark.parametrize(
    ("key", "part", "path"),
    SETTINGS,
    ids=[f"{type(p).__name__}.{'.'.join(path)}" for _, p, path in SETTINGS],
)
def test_a_number_is_taken_or_refused_by_name(key, part, path):
    for value in VALUES:
        asked = replace(c.Config(), **{key: changed(part, path, value)})
        said = refusal(asked)
        assert said is None or "\n" not in said
        assert value in (0, -1) or (
            f"{key}.{'.'.join(path)}" in str(said) and str(value) in str(said)
        )


def test_the_checked_settings_are_many():
    assert len(SETTINGS) > 60


# --- numbers that can be counted, but neither laid out nor held ---------------------------------

ABSURD = {
    "layers": (
        replace(c.Config(), model=c.MLP(num_layers=10**7)),
        "model.num_layers=10000000 is out of reach",
    ),
    "width": (
        replace(c.Config(), model=c.Transformer(d_model=10**8)),
        r"model.d_model=100000000 have 9.6e\+17 param",
    ),
    "heads": (
        replace(c.Config(), model=c.Transformer(d_model=2 * 10**8, num_heads=10**8)),
        "more than the 1e.15 that",
    ),
    "mlp": (
        replace(c.Config(), model=c.Transformer(mlp_width=2**30, d_model=2**18)),
        "more than the 1e.15 that any machine holds",
    ),
    "sequence": (
        replace(c.Config(), model=c.Transformer(seq_len=10**8)),
        "model.seq_len=100000000 is out of reach",
    ),
    "vocabulary": (
        replace(c.Config(), data=c.Synthetic(vocab_size=10**9)),
        "data.vocab_size=1000000000 is out of",
    ),
    "batch": (
        replace(c.Config(), data=c.Synthetic(batch_size=10**9)),
        "data.batch_size=1000000000 is out of reach",
    ),
    "features": (
        replace(c.Config(), data=c.Regression(num_features=10**9)),
        "data.num_features=1000000000 is out of",
    ),
    "ranks": (replace(c.Config(), mesh=c.Mesh(pp=10**6)), "mesh.pp=1000000 is out of reach"),
    "microbatches": (
        replace(c.Config(), schedule=c.Schedule("1f1b", 10**8)),
        "= 200000000 tasks of a step, more",
    ),
    "tasks": (
        replace(
            c.Config(),
            mesh=c.Mesh(pp=1000),
            schedule=c.Interleaved(num_microbatches=1000, num_chunks=4),
        ),
        r"2\*1000\*4\*1000 = 8000000 tasks of a step",
    ),
    "waves": (
        replace(c.Config(), schedule=Hanayo(num_waves=10**8)),
        "schedule.num_waves=100000000 is out of reach",
    ),
    "chunks": (
        replace(c.Config(), schedule=c.Chunked(num_chunks=10**8)),
        "schedule.num_chunks=100000000 is out of reach",
    ),
    "devices": (
        replace(c.Config(), tune=c.Tune(devices=10**6)),
        "tune.devices=1000000 is out of reach",
    ),
}


@pytest.mark.parametrize(("asked", "words"), ABSURD.values(), ids=ABSURD)
def test_sizes_beyond_any_machine_are_refused_before_any_work(asked, words):
    said = refusal(asked)
    assert said is not None
    assert re.search(words, said), said
    assert "\n" not in said


LARGE = {
    "175B": c.Transformer(num_layers=96, d_model=12288, num_heads=96, seq_len=2048),
    "100T": c.Transformer(num_layers=500, d_model=2**17, num_heads=1024, seq_len=2**20),
    "deep": c.MLP(num_layers=4096),
}


@pytest.mark.parametrize("model", LARGE.values(), ids=LARGE)
def test_large_models_can_be_planned(model):
    asked = replace(
        c.Config(), model=model, mesh=c.Mesh(dp=64, pp=64), schedule=c.Schedule("1f1b", 512)
    )
    data = (
        c.Regression(batch_size=64 * 512)
        if isinstance(model, c.MLP)
        else c.Synthetic(batch_size=64 * 512)
    )
    assert refusal(replace(asked, data=data)) is None


def test_a_request_for_a_drawing_may_be_of_any_length_but_not_of_any_mesh():
    asked = c.ScheduleConfig(c.Mesh(pp=1000), c.Schedule("1f1b", 10**8), c.Costs())
    asked.check()
    with pytest.raises(ConfigError, match=r"mesh\.pp=1000000 is out of reach"):
        asked._replace(mesh=c.Mesh(pp=10**6)).check()


@pytest.mark.parametrize(
    "words",
    [
        "plan mesh=100000x1 data.batch_size=800000 plan.compile=true",
        "train mesh=1x4100 schedule=1f1b",
    ],
)
def test_more_devices_than_a_machine_simulates_are_refused(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main([*words.split(), "run.platform=cpu", "data=synthetic"]) == 2
    assert re.fullmatch(
        r"ppctl: \d+ devices are more than the 4096 that a machine can simulate. Use .*\n",
        capsys.readouterr().err,
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["train", "verify"])
def test_a_model_that_this_machine_cannot_hold_is_refused_before_it_is_made(
    command, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    words = (
        "mesh=1x2 model=mlp model.d_model=1000000 model.num_layers=4 data=regression "
        "run.platform=cpu"
    )
    assert cli.main([command, *words.split()]) == 2
    assert re.fullmatch(
        r"ppctl: The state of [\d,]+ parameters takes .*, but this machine, .*\n",
        capsys.readouterr().err,
    )
    assert list(tmp_path.iterdir()) == []


def test_a_number_of_a_users_options_is_finite_as_checkpoints_record_it():
    data = CustomData(target="a.b", options={"of": [1.0, {"it": math.inf}]})
    with pytest.raises(ConfigError, match=r"^data\.options\.of\.it=inf is not finite"):
        check(c.Config(data=data))
