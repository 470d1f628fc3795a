"""`ppctl inspect`: counts equal the compiled text, and ticks equal the executed ones."""

from __future__ import annotations

import json
import re

import pytest
from support.selection import full

from ppctl import cli
from ppctl.cli.compose import compose
from ppctl.training.pipeline.job import assemble

TINY = (
    "model=mlp model.num_layers=4 model.d_model=16 data=regression data.batch_size=16 "
    "data.num_rows=1024 schedule.num_microbatches=4 run.platform=cpu run.dtype=float32"
)
ROWS = 4  # elements of a microbatch


def ask(capsys, words, code=0):
    """Return stdout, or stderr if the request is refused."""
    assert cli.main(["inspect", *TINY.split(), *words.split()]) == code
    return capsys.readouterr()[code == 2]


def text_of(capsys, words, form):
    """The text of each program in a form, by its name."""
    return json.loads(ask(capsys, f"{words} inspect.what={form} --json"))[form]


def job_of(words):
    return assemble(compose([*TINY.split(), *words.split()]))


def instructions(hlo, kind):
    """How many instructions of a kind an HLO text has."""
    return len(
        re.findall(rf"^\s+(?:ROOT )?%?[\w.\-]+ = .*? {kind}(?:-start)?\(", hlo, re.MULTILINE)
    )


# --- one program --------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    ("words", "hops"),
    [
        ("mesh=1x2 schedule=zb_v executor.remat=layer", 1),  # two ranks are neighbours both ways
        full(("mesh=1x4 schedule=eager_1f1b executor.remat=full", 2)),
        full(("mesh=1x2x2 schedule=interleaved executor.remat=none", 2)),
    ],
)
def test_a_tick_hops_once_each_way_and_the_text_has_the_counted_collectives(words, hops, capsys):
    said = json.loads(ask(capsys, f"{words} --json"))
    texts = {form: text_of(capsys, words, form)["step"] for form in ("jaxpr", "stablehlo", "hlo")}
    job = job_of(words)
    (program,) = said["programs"]
    counted = {}
    for each in program["collectives"]:
        counted[each["kind"]] = counted.get(each["kind"], 0) + each["instructions"]
    assert counted == {kind: instructions(texts["hlo"], kind) for kind in counted}
    (hop,) = [each for each in program["collectives"] if each["kind"] == "collective-permute"]
    assert (hop["instructions"], hop["times"], hop["is_at_most"]) == (
        hops,
        job.pipe.ticks.num_ticks,
        False,
    )
    assert hop["bytes"] == hops * ROWS // job.config.mesh.fsdp * 16 * 4
    assert all(each["times"] == 1 for each in program["collectives"] if each is not hop)
    assert ("all-gather" in counted) == (job.config.mesh.fsdp > 1 or job.config.mesh.pp > 1)
    assert len(said["ticks"]) == job.pipe.ticks.num_ticks
    for rank, tasks in enumerate(job.pipe.schedule.ranks):
        assert [one["task"] for row in said["ticks"] for one in row[rank]] == list(map(str, tasks))
    assert "shard_map" in texts["jaxpr"]
    assert "stablehlo.collective_permute" in texts["stablehlo"]
    assert texts["hlo"].startswith("HloModule jit_step")


def test_the_terminal_shows_the_summary_then_the_table(capsys):
    out = ask(capsys, "mesh=1x2 schedule=1f1b executor.remat=full")
    assert (
        out.index("collectives of a step") < out.index("one scan over 7 ticks") < out.index("0F0>1")
    )
    permutes = [line.split() for line in out.splitlines() if "collective-permute" in line]
    assert [tuple(map(int, row[row.index("pp") + 1 :][:2])) for row in permutes] == [
        (2, 7)
    ]  # (instructions, times)


def test_gathers_in_a_branch_run_at_most_so_often(capsys):
    words = (
        "mesh=1x2x2 schedule=gpipe executor.gather=layer executor.remat=full inspect.what=summary "
        "--json"
    )
    said = json.loads(ask(capsys, words))
    ticks = job_of(words.removesuffix(" --json")).pipe.ticks
    gathers = [each for each in said["programs"][0]["collectives"] if each["kind"] == "all-gather"]
    assert {(each["times"], each["is_at_most"]) for each in gathers} == {
        (1, False),
        (ticks.num_ticks, True),
    }
    assert "ticks" not in said


def test_the_reference_has_texts_and_a_summary_but_no_table(capsys):
    words = "mesh=1x1 schedule=gpipe executor=reference"
    out = ask(capsys, words)
    assert "reference: no pipeline, 4 microbatches" in out
    assert re.search(r"step +0 +1 +none", out)
    assert "tick" not in out
    assert ask(capsys, f"{words} inspect.what=jaxpr").startswith(("{ lambda", "let "))
    assert ask(capsys, f"{words} inspect.what=stablehlo").startswith("module @jit_step")


# --- many programs ------------------------------------------------------------------------------

MPMD = "executor=mpmd mesh=2x2 schedule=interleaved executor.remat=none"


@pytest.mark.full
def test_each_program_has_a_text_in_every_form_and_tasks_have_no_collectives(capsys):
    texts = text_of(capsys, MPMD, "hlo")
    assert {
        "fwd of stage 0",
        "fwd of stage 1-2",
        "fwd of stage 3",
        "bwd of stage 3",
        "prepare of rank 0",
    } <= texts.keys()
    for form in ("jaxpr", "stablehlo"):
        assert text_of(capsys, MPMD, form).keys() == texts.keys()
    out = ask(capsys, f"{MPMD} inspect.what=stablehlo")
    assert re.findall(r"^# (.*)$", out, re.MULTILINE) == [*texts]
    summary = ask(capsys, f"{MPMD} inspect.what=summary")
    reduced = {name for name, text in texts.items() if instructions(text, "all-reduce")}
    assert reduced
    assert not {name for name in reduced if name.startswith(("fwd", "bwd"))}
    for name in texts:
        line = next(line for line in summary.splitlines() if line.strip().startswith(name))
        assert ("all-reduce" in line) == (name in reduced), line
    assert re.search(
        r"^ *0 +1 +\d+ ", summary[summary.index("transfers of a step") :], re.MULTILINE
    )


def test_post_validation_shows_the_tried_update_and_no_other(capsys):
    words = "executor=mpmd mesh=1x2 schedule=zb_h1 executor.post_validation=true"
    names = text_of(capsys, words, "jaxpr").keys()
    assert {"try", "bwd_w"} <= {name.partition(" ")[0] for name in names}
    assert not [name for name in names if name.startswith("update")]


# --- faults -------------------------------------------------------------------------------------

SPMD = "mesh=1x2 schedule=1f1b"
FAULTS = [
    (
        f"{SPMD} inspect.what=llvm",
        "inspect.what=llvm is not one of summary, program, jaxpr, stablehlo, hlo",
    ),
    (f"{SPMD} run.distributed=auto", "ppctl inspect runs in one process, but run.distributed=auto"),
    (
        "mesh=1x1 schedule=gpipe executor=reference inspect.what=program",
        "inspect.what=program shows the ticks of ranks, but executor=reference has none",
    ),
    (f"{MPMD} inspect.what=program", "but executor=mpmd has none. Use inspect.what=jaxpr"),
]


@pytest.mark.parametrize(("words", "message"), FAULTS, ids=[message[:40] for _, message in FAULTS])
def test_a_wrong_request_of_inspect_is_refused_in_one_line(words, message, capsys):
    said = ask(capsys, words, code=2)
    assert message in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("command", ["train", "plan", "verify"])
def test_other_commands_refuse_its_settings(command, capsys):
    assert cli.main([command, "inspect.what=hlo"]) == 2
    assert "inspect.what=hlo: applies to `ppctl inspect` only" in capsys.readouterr().err
