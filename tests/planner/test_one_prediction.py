"""`ppctl tune`, `plan` and `train` say the same of a request: memory, both bubbles, step time."""

import json
import random
import re
from itertools import product

import pytest
from support import fuzz_requests
from support.selection import full_except

from ppctl import cli
from ppctl.cli.compose import compose
from ppctl.config import Config
from ppctl.planner.cost.predict_step import predict_step
from ppctl.planner.make_plan import predicted
from ppctl.planner.search import tune_layouts as tune_module
from ppctl.schedule.families.registry import FAMILIES, ON_RING
from ppctl.training.pipeline.job import assemble

NUMBER = 30  # number of random requests
TEXT = "model.seq_len=16 model.num_heads=2 data=synthetic data.vocab_size=64"
ROWS = "model=mlp data=regression data.num_rows=512 data.eval_fraction=0.1 run.eval_batches=1"


@pytest.fixture(autouse=True)
def nothing_measured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def some(seed):
    """The words of a valid request of `ppctl tune`; the first two, small, are of gis, whose I and W
    are apart.
    """
    choose, is_first = random.Random(seed), seed < 2
    executor = ("spmd", "mpmd")[seed % 2]
    layers, remat = (
        4 if is_first else choose.randint(4, 9),
        choose.choice(["none", "layer", "full"]),
    )
    family = "gis" if is_first else choose.choice(ON_RING if executor == "spmd" else list(FAMILIES))
    mesh = "1x2" if is_first else choose.choice(["1x2", "1x4", "2x2", "1x2x2", "1x8"])
    words = [ROWS if is_first else choose.choice([TEXT, ROWS])]
    words += [f"model.num_layers={layers} model.d_model={choose.choice([16, 32])}"]
    words += [
        f"mesh={mesh} executor={executor} data.batch_size=16 run.platform=cpu tune.recipe=null "
        "tune.best=2"
    ]
    words += [
        f"tune.schedules=[{family}] tune.remat=[{remat}] "
        f"run.dtype={choose.choice(['float32', 'bfloat16'])}"
    ]
    words += [
        choose.choice(["hardware=h100", "hardware=host", "executor.unroll=0", "executor.unroll=2"])
    ]
    return " ".join(words).split()


def fuzzed(seed, directory):
    """The words of a valid random request, a schedule's apart, which `ppctl tune` chooses."""
    number = seed * 100
    while True:
        found, number = fuzz_requests.request(seed, number, directory), number + 1
        others = "schedule", "partition", "executor.fuse"
        words = [word for word in found.words if not word.startswith(others)]
        is_tuned = not {"executor=reference", "model=custom"} & {*words}
        has_cp = any(re.fullmatch(r"mesh=(\d+x){5}([2-9]|\d\d+)", word) for word in words)
        is_tuned &= not (has_cp and any(word.startswith("model.window") for word in words))
        if found.mistake is None and found.processes == 1 and is_tuned:
            timeless = [word for word in words if not word.startswith("run.timeline")]
            words = "schedule=1f1b schedule.num_microbatches=1 tune.recipe=null tune.best=2"
            return [*timeless, *words.split()]


def composed(words):
    found = compose(words)
    assert isinstance(found, Config)
    return found


def limited(words, row):
    """The same request where the memory of a device is a byte too small for a layout."""
    return [*words, f"plan.memory_gib={(row.total_bytes - 1) / 2**30}"]


CASES = [*product(("chosen", "fuzzed"), range(NUMBER // 2))]


@pytest.mark.parametrize(("how", "seed"), full_except(CASES, ("chosen", 0)))
def test_rows_of_tune_equal_plan_and_train_digit_for_digit(how, seed, monkeypatch, tmp_path):
    searched = []
    as_planned = tune_module.as_planned

    def recorded(config, stack, candidate):
        row = as_planned(config, stack, candidate)
        searched.append((candidate, row))
        return row

    monkeypatch.setattr(tune_module, "as_planned", recorded)
    words = some(seed) if how == "chosen" else fuzzed(seed, tmp_path)
    tuned = tune_module.tune_layouts(composed(words))
    for row in tuned.found.best:
        job = assemble(row.request.config, on_one_device=True, only_planned=True)
        plan, train = predicted(job), predict_step(job)
        assert plan.partition == row.layout.partition
        assert max(plan.total_bytes) == row.total_bytes == train.memory_bytes
        assert plan.memory_bytes[plan.total_bytes.index(row.total_bytes)] == row.memory
        assert plan.step_time_s == row.step_s == train.step_time_s
        assert plan.ideal_bubble_fraction == row.plan.ideal_bubble == train.ideal_bubble_fraction
        assert plan.predicted_bubble_fraction == row.plan.bubble == train.bubble_fraction

    # the search predicted the seconds of these, and at most their bytes
    for candidate, row in searched:
        assert candidate.seconds == pytest.approx(row.step_s, rel=1e-9)
        assert candidate.least_bytes <= row.total_bytes * 1.01, candidate
    if seed == 0:
        others = tune_module.tune_layouts(composed(limited(words, tuned.found.best[0])))
        assert tuned.found.best[0].layout not in [row.layout for row in others.found.best]


def test_plan_refuses_a_layout_that_tune_finds_a_byte_too_large(capsys):
    words = [
        *ROWS.split(),
        *[
            "mesh=1x2",
            "model.d_model=32",
            "data.batch_size=16",
            "hardware=h100",
            "run.platform=cpu",
        ],
    ]
    assert (
        cli.main(
            ["tune", *words, "tune.best=1", "tune.schedules=[1f1b]", "tune.recipe=null", "--json"]
        )
        == 0
    )
    (first,) = json.loads(capsys.readouterr().out)["best"]
    limit = f"plan.memory_gib={(first['total_bytes'] - 1) / 2**30}"
    assert cli.main(["plan", *words, *first["overrides"], limit, "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert max(found["total_bytes"]) == first["total_bytes"] == found["limit_bytes"] + 1
    for name in ("predicted_bubble_fraction", "ideal_bubble_fraction", "step_time_s"):
        assert found[name] == first[name]
