"""The notebook that builds GPipe: each number that it states, against an oracle in plain JAX or
NumPy in float64.
"""

import csv
import json
import re

import jax
import numpy as np
import pytest
from support.documents import answer, gradients

from ppctl import cli

EPOCHS = (0.399302, 0.167322, 0.140893)
# weights and biases of maps 0 to 10: of the notebook's gradients, 10 times those of its mean loss
NORMS = (
    [
        73.2951,
        133.4126,
        161.0308,
        198.4218,
        218.0527,
        215.4513,
        222.5671,
        238.0922,
        188.0285,
        198.1739,
        231.9665,
    ],
    [
        10.1193,
        11.7734,
        12.9931,
        14.9006,
        16.3011,
        16.0005,
        16.1271,
        15.3184,
        14.6679,
        13.0994,
        13.4215,
    ],
)
DRAWN = (
    "costs.input_grad_s=0.5",
    "costs.weight_grad_s=0.5",
)  # the notebook's B takes as long as its F


def drawn():
    """The notebook's draws: model 1, X(32), X(16), X(256) with labels, model 2."""
    random = np.random.RandomState(42)
    sizes = [128, *[256] * 10, 10]

    def model():
        maps = []
        for i in range(11):
            maps.append(
                [
                    random.randn(sizes[i], sizes[i + 1]) * np.sqrt(2.0 / sizes[i]),
                    np.zeros(sizes[i + 1]),
                ]
            )
        return maps

    first, rows = model(), []
    for number in (32, 16, 256):
        x = random.randn(number, 128)
        rows.append((x, np.eye(10)[random.randint(0, 10, number)]))
    return first, rows[1], rows[2], model()


def backward(maps, x, y):
    """(mean squared error, the notebook's gradient) by its equations: dout = 2(o-y)/rows."""
    kept = [x]
    for i, (w, b) in enumerate(maps):
        z = kept[-1] @ w + b
        kept.append(z if i == 10 else np.maximum(z, 0))
    loss, d, found = np.mean((kept[-1] - y) ** 2), 2 * (kept[-1] - y) / len(x), []
    for i in range(10, -1, -1):
        dz = d if i == 10 else d * (kept[i + 1] > 0)
        found.insert(0, (kept[i].T @ dz, dz.sum(axis=0)))
        d = dz @ maps[i][0].T
    return loss, found


def trained_as_in_the_notebook():
    _, _, (x, y), maps = drawn()
    losses = []
    for _ in range(3):
        for start in range(0, 256, 32):
            loss, grads = backward(maps, x[start : start + 32], y[start : start + 32])
            losses.append(loss)
            maps = [
                [w - 0.001 * dw, b - 0.001 * db]
                for (w, b), (dw, db) in zip(maps, grads, strict=True)
            ]
    return losses


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    "others",
    [
        pytest.param((), id="spmd"),
        pytest.param(("executor=mpmd", "run.timeline=true"), id="mpmd", marks=pytest.mark.full),
    ],
)
def test_the_notebooks_training_equals_numpy(others, tmp_path):
    assert cli.main(["train", "recipes=gpipe_notebook", f"run.dir={tmp_path}", *others]) == 0
    losses = [
        json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()
    ]
    assert losses == pytest.approx(trained_as_in_the_notebook(), rel=1e-7)
    means = [np.mean(losses[i : i + 8]) for i in (0, 8, 16)]
    assert means == pytest.approx(EPOCHS, abs=5e-7)
    assert (losses[0], losses[-1]) == pytest.approx((1.502653, 0.135462), abs=5e-7)
    if others:  # items 5, 6: the timeline measured is GPipe's, not one device after another
        (file,) = (tmp_path / "timeline").glob("*.csv")
        rows = list(csv.DictReader(file.read_text().splitlines()))
        for r in range(4):
            own = sorted(
                (row for row in rows if row["rank"] == str(r)),
                key=lambda row: float(row["start_s"]),
            )
            order = [f"{r}F{m}" for m in range(8)] + [f"{r}B{m}" for m in reversed(range(8))]
            assert [row["task"] for row in own] == order


@pytest.mark.full
def test_the_notebooks_gradients_and_its_first_update():
    """Items 1, 3, 5, 7, 8: 4 microbatches of 4 rows; the same, recomputed or not, as of the whole
    batch.
    """
    words = (
        "recipes=gpipe_notebook",
        "data.options.part=gradients",
        "data.batch_size=16",
        "schedule.num_microbatches=4",
    )
    first, (x, y), _, _ = drawn()
    mean, expected = backward(first, x, y)
    for kind, stated in enumerate(NORMS):
        assert [np.linalg.norm(pair[kind]) for pair in expected] == pytest.approx(stated, abs=6e-5)
    found = {}
    for remat in ("full", "none"):
        loss, grads = gradients(*words, f"executor.remat={remat}")
        assert loss == pytest.approx(mean, rel=1e-12)
        embed_head, layers = grads["embed_head"], grads["layers"]
        every = [
            embed_head["first"],
            *({k: a[l] for k, a in layers.items()} for l in range(9)),
            embed_head["last"],
        ]
        for ours, (dw, db) in zip(every, expected, strict=True):
            for kind, theirs in (
                ("weight", dw),
                ("bias", db),
            ):  # 10 times: the notebook's error (c)
                assert np.max(np.abs(10 * ours[kind] - theirs)) <= 1e-13 * np.max(np.abs(theirs))
        found[remat] = grads
    for ours, theirs in zip(*map(jax.tree.leaves, found.values()), strict=True):
        assert np.max(np.abs(ours - theirs)) <= 1e-15 * np.max(
            np.abs(theirs)
        )  # rounding: they are two programs
    assert 0.01 * 10 * np.linalg.norm(
        found["full"]["embed_head"]["first"]["weight"]
    ) == pytest.approx(0.732951, abs=5e-7)


def test_a_batch_that_does_not_divide_is_refused(capsys):
    assert (
        cli.main(["train", "recipes=gpipe_notebook", "schedule.num_microbatches=5"]) == 2
    )  # item 3
    assert "data.batch_size=32 is not a multiple of" in capsys.readouterr().err


def test_the_notebooks_partition_is_refused_for_another_number_of_layers(capsys):
    assert (
        cli.main(["train", "recipes=gpipe_notebook", "model.num_layers=10"]) == 2
    )  # item 2: 11 maps, 9 of them layers
    assert "partition.layers" in capsys.readouterr().err


def cells(capsys, *words):
    found = answer(capsys, "schedule", "curves", "recipes=gpipe_notebook", *DRAWN, *words)
    return {(cell["num_ranks"], cell["num_microbatches"]): cell for cell in found["cells"]}


def test_the_notebooks_tables(capsys):
    """Items 4, 9, 15, 16."""
    found = cells(capsys, "--kept-mb", "30,10")
    printed = {  # format of the notebook
        2: ".500 .333 .200 .111 .059 .030 .015",
        4: ".750 .600 .429 .273 .158 .086 .045",
        8: ".875 .778 .636 .467 .304 .179 .099",
        16: ".938 .882 .789 .652 .484 .319 .190",
    }
    for p, line in printed.items():
        for m, number in zip((1, 2, 4, 8, 16, 32, 64), line.split(), strict=True):
            assert found[p, m]["bubble_fraction"] == pytest.approx((p - 1) / (p - 1 + m), abs=1e-12)
            assert f"{found[p, m]['bubble_fraction']:.3f}" == f"0{number}"
    assert found[4, 8]["all_mb"] == [960, 320]
    speedups = [found[4, m]["speedup"] for m in (1, 4, 8, 16, 32)]
    assert speedups == pytest.approx([1.0, 2.286, 2.909, 3.368, 3.657], abs=5e-4)
    guide = [found[p, 4 * p]["efficiency_fraction"] for p in (2, 4, 8, 16)]
    assert [f"{share:.1%}" for share in guide] == ["88.9%", "84.2%", "82.1%", "81.0%"]


@pytest.mark.full
def test_the_series_of_the_notebooks_figures(capsys):
    """Item 14."""
    bubble = cells(capsys, "--microbatches", "1-64")
    assert len(bubble) == 4 * 64
    assert all(
        cell["bubble_fraction"] == pytest.approx((p - 1) / (p - 1 + m))
        for (p, m), cell in bubble.items()
    )
    memory = cells(capsys, "--ranks", "2-16", "--microbatches", "8", "--kept-mb", "30,10")
    assert {p: cell["all_mb"] for (p, _), cell in memory.items()} == {
        p: [240 * p, 80 * p] for p in range(2, 17)
    }
    efficiency = cells(capsys, "--ranks", "2-16", "--microbatches", "4,8,16,32")
    assert all(
        cell["efficiency_fraction"] == pytest.approx(m / (p - 1 + m))
        for (p, m), cell in efficiency.items()
    )


TIMELINES = {
    (4, 4): (14, 3 / 7),
    (4, 8): (22, 3 / 11),
    (3, 4): (12, 1 / 3),
}  # steps and bubble, as they should be


@pytest.mark.parametrize("size", TIMELINES)
def test_the_notebooks_timelines_repaired(size, capsys):
    """Items 5, 6, 11: the notebook runs one device after another, and starts a backward on device
    0.
    """
    p, m = size
    words = f"recipes=gpipe_notebook mesh=1x{p} schedule.num_microbatches={m}".split()
    found = answer(
        capsys, "schedule", "show", *words, "costs.input_grad_s=0.5", "costs.weight_grad_s=0.5"
    )
    steps, bubble = TIMELINES[size]
    matrix = np.zeros((p, steps))  # item 6: m+1 for a forward, -(m+1) for a backward
    for r in range(p):
        for task, start_s, end_s in zip(
            found["ranks"][r], found["start_s"][r], found["end_s"][r], strict=True
        ):
            kind, microbatch = re.fullmatch(r"\d+([FB])(\d+)", task).groups()
            assert end_s - start_s == 1
            assert matrix[r, int(start_s)] == 0
            matrix[r, int(start_s)] = (int(microbatch) + 1) * (1 if kind == "F" else -1)
    assert found["makespan_s"] == steps
    assert np.mean(matrix == 0) == pytest.approx(bubble)
    if size == (3, 4):
        rows = [
            "1 2 3 4 0 0 0 0 -4 -3 -2 -1",
            "0 1 2 3 4 0 0 -4 -3 -2 -1 0",
            "0 0 1 2 3 4 -4 -3 -2 -1 0 0",
        ]
        assert matrix.tolist() == [[float(cell) for cell in row.split()] for row in rows]


def test_the_notebooks_data_parallelism_against_its_pipeline(capsys):
    """Item 12: layers take 1, all-reduce 2. First with the notebook's errors (e) and (f), then
    without them.
    """

    def drawn_s(p, m, layers):
        costs = (
            f"costs.forward_s={layers} costs.input_grad_s={layers / 2} "
            f"costs.weight_grad_s={layers / 2}"
        )
        words = f"recipes=gpipe_notebook mesh=1x{p} schedule.num_microbatches={m} {costs}".split()
        found = answer(capsys, "schedule", "show", *words)
        forward_s = max(max(ends[: len(ends) // 2]) for ends in found["end_s"])
        return forward_s, found["makespan_s"] - forward_s, np.mean(found["bubble_fraction"])

    forward_s, backward_s, _ = drawn_s(
        1, 1, 11
    )  # whole batch on one device, and 8 times as long as its unit
    assert (forward_s, backward_s, forward_s + backward_s + 2) == (11, 11, 24)
    forward_s, backward_s, bubble = drawn_s(4, 8, 2)  # 3 of 11 layers dropped
    assert (forward_s, backward_s) == (22, 22)
    assert (f"{1 - bubble:.1%}", f"{bubble:.1%}") == ("72.7%", "27.3%")
    # repaired: both in seconds of a microbatch through a layer, all 11 layers
    forward_s, backward_s, _ = drawn_s(1, 2, 11)  # 2 of 8 microbatches a device
    assert forward_s + backward_s + 2 == 46
    forward_s, backward_s, _ = drawn_s(4, 8, 2.75)
    assert forward_s + backward_s == 60.5
