"""`ppctl inspect`: what it counts stands in the compiled text, and what it lists is what the
executors run.
"""

from __future__ import annotations

import json
import re

import pytest
from support.selection import full

from ppctl import cli
from ppctl.cli.compose import compose
from ppctl.schedule.ir import reads
from ppctl.schedule.schedule_text import task_name
from ppctl.training.pipeline.job import assemble

TINY = (
    "model=mlp model.num_layers=4 model.d_model=16 data=regression data.batch_size=16 "
    "data.num_rows=1024 schedule.num_microbatches=4 run.platform=cpu run.dtype=float32"
)
ROWS = 4  # of a microbatch


def ask(capsys, words, code=0):
    """What is printed on stdout, or on stderr where the request is refused."""
    assert cli.main(["inspect", *TINY.split(), *words.split()]) == code
    return capsys.readouterr()[code == 2]


def text_of(capsys, words, form):
    """The text of each program in a form, by its name."""
    return json.loads(ask(capsys, f"{words} inspect.what={form} --json"))[form]


def job_of(words):
    return assemble(compose([*TINY.split(), *words.split()], [], ["inspect"]))


def instructions(hlo, kind):
    """How many instructions of a kind an HLO text has."""
    return len(
        re.findall(rf"^\s+(?:ROOT )?%?[\w.\-]+ = .*? {kind}(?:-start)?\(", hlo, re.MULTILINE)
    )


# --- one program --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "hops"),
    [
        (
            "mesh=1x2 schedule=zb_v executor.remat=layer",
            1,
        ),  # of two ranks either is next to the other
        full(("mesh=1x4 schedule=eager_1f1b executor.remat=full", 2)),
        full(("mesh=1x2x2 schedule=interleaved executor.remat=none", 2)),
    ],
)
def test_a_tick_hops_once_each_way_and_the_text_has_what_is_counted(words, hops, capsys):
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


def test_the_host_dispatches_the_tasks_in_order_and_deletes_what_is_used_up(capsys):
    said = json.loads(ask(capsys, f"{MPMD} inspect.what=program --json"))["dispatch"]
    job = job_of(MPMD)
    schedule = job.pipe.schedule
    for rank, tasks in enumerate(schedule.ranks):
        mine = [each["what"] for each in said if each["rank"] == rank and "__" in each["what"]]
        assert mine == list(map(task_name, tasks))
    crossing = [
        value
        for tasks in schedule.ranks
        for task in tasks
        for value in reads(task, schedule.num_stages)
        if schedule.rank_of[value.stage] != schedule.rank_of[task.stage]
    ]
    between = [
        each
        for each in said
        if each["what"] == "transfer" and re.match(r"(y|gx)\(", each["reads"][0])
    ]
    assert len(between) == len(crossing)
    gone = set()
    for each in said:
        gone -= set(each["writes"])
        assert not gone & set(each["reads"]), each
        gone |= set(each["deletes"])
    assert {"stash(0,0)", "acc(1)", "grads(1)"} <= gone
    assert not {name for name in gone if name.startswith(("params", "optimizer"))}


@pytest.mark.full
def test_each_program_has_a_text_in_every_form_and_tasks_say_nothing_to_each_other(capsys):
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


def test_the_listing_has_both_ends_of_a_transfer(capsys):
    text = ask(capsys, f"{MPMD} inspect.what=program")
    first, second = text.split("rank 1, stages 1 3")
    assert re.search(r"transfer +y\(0,0\) to rank 1, as x\(1,0\); delete y\(0,0\)", first)
    assert re.search(r"transfer +x\(1,0\) from rank 0", second)
    assert re.search(r"fwd_0__0 .*-> stash\(0,0\) y\(0,0\)", first)


def test_a_stage_and_a_task_choose_one_program(capsys):
    hlo = ask(capsys, f"{MPMD} inspect.task=2F inspect.what=hlo")
    assert hlo.startswith("HloModule jit_F")
    listing = ask(capsys, f"{MPMD} inspect.task=2B inspect.what=program")
    assert re.findall(r"bwd_\d__\d", listing) == [f"bwd_2__{m}" for m in range(4)]
    assert "rank 1" not in listing
    summary = json.loads(ask(capsys, f"{MPMD} inspect.task=1finish inspect.what=summary --json"))
    assert [(each["name"], each["ranks"], each["runs"]) for each in summary["programs"]] == [
        ("finish of rank 1", [1], 1)
    ]


def test_without_a_barrier_the_step_is_the_one_that_is_tried(capsys):
    words = (
        "executor=mpmd mesh=1x2 schedule=zb_h1 executor.post_validation=true inspect.what=program"
    )
    out = ask(capsys, words)
    assert re.search(r"\btry\b", out)
    assert re.search(r"bwd_w_1__3", out)
    assert "update" not in out


# --- faults -------------------------------------------------------------------------------------

SPMD = "mesh=1x2 schedule=1f1b"
FAULTS = [
    (
        f"{SPMD} inspect.what=llvm",
        "inspect.what=llvm is not one of summary, program, jaxpr, stablehlo, hlo",
    ),
    (
        f"{SPMD} inspect.task=1",
        "inspect.task=1 chooses among the programs of executor=mpmd, but executor=spmd is",
    ),
    (f"{SPMD} inspect.task=F", "inspect.task=F chooses among the programs of executor=mpmd"),
    (f"{MPMD} inspect.task=-1", "inspect.task=-1 is not a stage"),
    (f"{SPMD} run.distributed=auto", "ppctl inspect runs in one process, but run.distributed=auto"),
    (
        "mesh=1x1 schedule=gpipe executor=reference inspect.what=program",
        "executor=reference has neither ticks nor",
    ),
    (f"{MPMD} inspect.task=4", "inspect.task=4: interleaved on 2 ranks has stages 0 to 3"),
    (
        f"{MPMD} inspect.task=W",
        "inspect.task=W is no program. Use one of prepare, F, B, reduce, mean, finish",
    ),
    (
        "executor=mpmd mesh=1x2 schedule=1f1b executor.remat=full inspect.task=1F",
        "no program of stage 1 and its rank. With executor.remat=full the last stage's forward "
        "is left to its backward",
    ),
]


@pytest.mark.parametrize(("words", "message"), FAULTS, ids=[message[:40] for _, message in FAULTS])
def test_a_wrong_request_is_one_line(words, message, capsys):
    said = ask(capsys, words, code=2)
    assert message in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("command", ["train", "plan", "verify"])
def test_other_commands_refuse_its_settings(command, capsys):
    assert cli.main([command, "inspect.what=hlo"]) == 2
    assert "inspect.what=hlo: applies to `ppctl inspect` only" in capsys.readouterr().err
