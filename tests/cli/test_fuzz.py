"""A few requests of `python tests/fuzz.py`, and the faults that it finds."""

import json
from collections import Counter
from pathlib import Path

import fuzz
import pytest
from fuzz import Served
from support.fuzz_requests import MISTAKES, request

from ppctl.schedule.families.registry import FAMILIES
from ppctl.training.pipeline.execution import EXECUTORS

ROOT = Path(__file__).parents[2]
REFUSAL = Served(2, "", "ppctl: no.\n")


@pytest.mark.full
@pytest.mark.parametrize("number", range(10))
def test_all_commands_serve_or_refuse_a_random_request(tmp_path, monkeypatch, number):
    monkeypatch.chdir(ROOT)
    _, finding = fuzz.tried(request(0, number, tmp_path), tmp_path)
    assert finding is None, finding


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("requests")


@pytest.fixture(scope="module")
def drawn(directory):
    return [request(7, number, directory) for number in range(600)]


@pytest.mark.full
def test_a_request_is_a_function_of_its_seed_and_number(drawn, directory):
    assert drawn[:50] == [request(7, number, directory) for number in range(50)]
    assert drawn[:50] != [request(8, number, directory) for number in range(50)]
    assert len({each.mistake for each in drawn[:300]}) > len(MISTAKES) / 2


@pytest.mark.full
def test_every_family_and_feature_is_drawn(drawn):
    words = Counter(
        word
        for request in drawn
        for word in request.words
        for word in (word, word.partition("=")[0])
    )
    schedules = {f"schedule={name}" for name in (*FAMILIES, "auto", "csv")}
    executors = {f"executor={name}" for name in EXECUTORS}
    assert schedules | executors | {"model=custom", "mesh=2x2x2", "mesh=1x2x1x2"} <= words.keys()
    # each in at least a third of the requests that it applies to
    experts, transformers = words["model.moe.num_experts"], words["model=transformer"]
    shares = {
        "model=transformer": 600,
        "model.moe.num_experts": transformers,
        "+data.options.packs=true": transformers,
        "+data.options.masked": transformers,
        "optim.train=lora": transformers,
        "model.dropout": transformers,
        "model.linear_dtype=fp8": transformers - experts,
        "model.moe.dispatch=alltoall": experts,
        "executor.fuse=fb": words["executor=mpmd"],
    }
    rare = {word: words[word] for word, number in shares.items() if words[word] < number / 3}
    assert not rare
    assert words["model.moe.capacity"] > experts / 6  # not with adapters


def judged(monkeypatch, tmp_path, **found):
    """The finding on a request where the commands do this."""
    monkeypatch.setattr(fuzz, "served", lambda words: found[words[0]])
    result, finding = fuzz.tried(request(0, 0, tmp_path), tmp_path)
    return result, finding and finding.what


def test_an_equal_refusal_by_all_commands_is_not_a_finding(monkeypatch, tmp_path):
    assert judged(monkeypatch, tmp_path, plan=REFUSAL, verify=REFUSAL, train=REFUSAL) == (
        "refused",
        None,
    )


@pytest.mark.parametrize(
    ("verify", "what"),
    [
        (Served(0, "", ""), "verify accepts what plan, train refuses"),
        (Served(2, "", "ppctl: no,\nreally.\n"), "verify refuses in other than one line"),
        (Served(2, "", "ppctl: never.\n"), "verify gives another reason than train"),
        (Served(1, "NOT EQUAL", ""), "verify ends with 1"),
        (Served(2, "", "Traceback ...\nppctl: no.\n"), "verify ends with 2"),
    ],
)
def test_different_answers_of_commands_are_a_finding(monkeypatch, tmp_path, verify, what):
    assert judged(monkeypatch, tmp_path, plan=REFUSAL, verify=verify, train=REFUSAL)[1] == what


def test_a_run_directory_of_a_refused_request_is_a_finding(monkeypatch, tmp_path):
    (tmp_path / "run").mkdir()
    what = "a request that was refused left a run directory"
    assert judged(monkeypatch, tmp_path, plan=REFUSAL, verify=REFUSAL, train=REFUSAL)[1] == what


@pytest.mark.parametrize(("loss", "is_found"), [(1 + 1e-10, False), (1 + 1e-8, True)])
def test_a_loss_that_differs_from_the_reference_is_a_finding(monkeypatch, tmp_path, loss, is_found):
    (tmp_path / "run").mkdir()
    record = {"step": 1, "loss": loss, "grad_norm": 1.0, "lr": 0.1}
    (tmp_path / "run/metrics.jsonl").write_text(json.dumps(record) + "\n")
    expected = {"metrics.jsonl": [record | {"loss": 1.0}], "eval.jsonl": []}
    monkeypatch.setattr(fuzz, "reference", lambda words: (expected, "float64"))
    well = Served(0, json.dumps({"predicted_bubble_fraction": None}), "")
    _, what = judged(monkeypatch, tmp_path, plan=well, verify=well, train=well)
    assert (what is not None) == is_found
    assert not is_found or "loss of step 1" in what
