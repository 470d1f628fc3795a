"""`ppctl plan`: its memory equals arrays and compilers, and layouts that do not fit are refused."""

import json
import os
import re
from dataclasses import replace
from typing import Any

import jax
import pytest
from support.plans import TINY, plan_json, planned, request, said_of
from support.selection import full, full_except

from ppctl import cli, config
from ppctl.cli.commands.plan import plan as run_plan
from ppctl.config.groups.layout_settings import Balanced, Explicit, RankAxes
from ppctl.executors.model_shapes import shard_bytes, tree_bytes
from ppctl.planner import make_plan as plan
from ppctl.planner.show.plan_terminal import costs_text, plan_lines, show_plan
from ppctl.reports.terminal_output import seconds_text
from ppctl.training.pipeline.engines.step_programs import PARTS
from ppctl.training.pipeline.job import assemble, partition_text
from ppctl.training.pipeline.known_hardware import known

COMPILE = config.Plan(compile=True)
WIDE = config.MLP(num_layers=4, d_model=512)  # its activations are larger than its table of ticks
MACHINE_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


SMALL = config.Mesh(1, 2, 1)


def as_transformer(asked):
    model = config.Transformer(num_layers=2, d_model=32, num_heads=4, seq_len=16)
    return replace(asked, model=model, data=config.Synthetic(batch_size=16, vocab_size=64))


def growth(asked, few, many):
    """By how much each part, and the compiler's total, grow from few to many microbatches of the
    same size.
    """
    one, other = (
        planned(request(asked, m, remat="none", plan=COMPILE, model=WIDE)) for m in (few, many)
    )
    parts = {part: other.memory_bytes[0][part] - size for part, size in one.memory_bytes[0].items()}
    return parts, other.total_bytes[0] - one.total_bytes[0]


# --- spmd ---------------------------------------------------------------------------------------


REMATS = [
    ("zb_h1", "full"),
    ("gpipe", "none"),
    ("zb_h1", "none"),
    ("zb_h1", "layer"),
    ("gpipe", "full"),
]


@pytest.mark.parametrize(("schedule", "remat"), full_except(REMATS, ("zb_h1", "full")))
def test_the_parts_of_a_compiled_program_add_up_to_its_compilers_total(schedule, remat):
    found = planned(request(schedule, remat=remat, plan=COMPILE))
    job = assemble(request(schedule, remat=remat))
    memory = job.pipe.engine.lower_train_step().compile().memory_analysis()
    sizes = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    assert found.total_bytes == (sizes - memory.alias_size_in_bytes,) * 4
    for of_rank in found.memory_bytes:
        assert list(of_rank) == [part for part in PARTS if part in of_rank]
        assert sum(of_rank.values()) == found.total_bytes[0]
        assert of_rank["temporaries"] > 0


@pytest.mark.full
def test_predicted_activations_equal_the_growth_of_a_compiled_program():
    parts, total = growth("gpipe", 8, 32)
    grown = parts["activations"] + parts["transfers"] + parts["batch"]
    assert (
        parts["activations"]
        == planned(request("gpipe", 24, remat="none", model=WIDE)).memory_bytes[0]["activations"]
    )
    assert grown == pytest.approx(total, rel=0.02)
    assert abs(parts["temporaries"]) <= 0.02 * total


def test_planned_bytes_of_state_and_batch_equal_their_arrays():
    asked = request(mesh=config.Mesh(2, 2, 2))
    found = planned(asked).memory_bytes[0]
    job = assemble(asked)
    state, batch = job.pipe.init(), job.pipe.put(next(job.data.batches()))
    device = jax.devices()[0]

    def there(tree):
        shards = [
            s for a in jax.tree.leaves(tree) for s in a.addressable_shards if s.device == device
        ]
        return sum(shard.data.nbytes for shard in shards)

    assert found["parameters"] == there(state["params"]) == shard_bytes(state["params"])
    assert (found["optimizer"], found["batch"]) == (there(state["optimizer"]), there(batch))


# --- mpmd ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("remat", ["none", full("full")])
def test_each_rank_of_mpmd_holds_only_its_stages(remat):
    asked = request(executor="mpmd", remat=remat, num_microbatches=8)
    found = planned(asked)
    pipe = assemble(asked).pipe
    state = pipe.init()
    for r, of_rank in enumerate(found.memory_bytes):
        assert of_rank["parameters"] == tree_bytes(state[r]["params"])
        assert of_rank["temporaries"] > 0
    assert not found.is_compiled
    if remat == "none":  # 1F1B: rank r keeps 4-r, and its compiled program no more
        stash = tree_bytes(pipe.model.stage.programs.layers[0].saved)
        kept = [of_rank["activations"] for of_rank in found.memory_bytes]
        assert kept == [stash * n for n in (4, 3, 2, 1)]


@pytest.mark.full
@pytest.mark.parametrize("post_validation", [True, full(False)])
def test_the_parts_of_mpmd_add_up_too_once_compiled(post_validation):
    asked = as_transformer(
        request("zb_h1", executor="mpmd", remat="none", mesh=SMALL, plan=COMPILE)
    )
    asked.executor.post_validation = post_validation
    found = planned(asked)
    assert found.total_bytes == assemble(asked).pipe.engine.compile(evaluate=False).total_bytes
    for of_rank, total in zip(found.memory_bytes, found.total_bytes, strict=True):
        assert sum(of_rank.values()) == total
        assert of_rank["temporaries"] > 0
    assert found.memory_bytes[0]["activations"] > 0  # a split backward has pendings


def test_the_reference_has_no_stages(capsys):
    asked = replace(request(mesh=config.Mesh()), executor=config.Reference())
    assert run_plan(asked, as_json=False) == 0
    assert "executor=reference has no pipeline; 8 microbatches" in capsys.readouterr().out


# --- without plan.compile -----------------------------------------------------------------------


def uneven(*sizes: int) -> dict[str, Any]:
    return {
        "partition": Explicit(layers=list(sizes)),
        "model": replace(TINY.model, num_layers=sum(sizes)),
    }


LARGE = replace(
    TINY.model, d_model=512
)  # its layers are larger than the compiler's additions to any program
PREDICTED = {
    "spmd none": request("gpipe", remat="none", mesh=SMALL, model=LARGE),
    "mpmd none": request("zb_h1", executor="mpmd", remat="none", mesh=SMALL, model=LARGE),
    "spmd full fsdp": request(remat="full", mesh=config.Mesh(1, 2, 2), model=LARGE),
    "spmd interleaved": replace(
        request(mesh=SMALL, model=LARGE), schedule=config.Interleaved(num_microbatches=8)
    ),
    "transformer": as_transformer(request(mesh=SMALL)),
    "reference": replace(
        request(mesh=config.Mesh(), model=LARGE), executor=config.Reference(remat="layer")
    ),
    "mpmd layer fsdp": request(executor="mpmd", mesh=config.Mesh(1, 2, 2), model=LARGE),
    "mpmd full uneven": request("zb_h1", executor="mpmd", remat="full", mesh=SMALL, **uneven(4, 1)),
}


@pytest.mark.parametrize("asked", full_except(PREDICTED, "spmd none", "mpmd none"))
def test_predicted_memory_is_near_the_compiled_programs(asked):
    """Temporaries are counted; the programs of tiny models hold more that is not."""
    found = planned(replace(asked, plan=COMPILE))
    assert len(found.predicted_bytes) == len(found.total_bytes)
    assert max(found.predicted_bytes) == pytest.approx(max(found.total_bytes), rel=0.35)
    assert found.predicted_bytes == planned(asked).total_bytes


@pytest.mark.parametrize("executor", ["mpmd", full("spmd")])
def test_a_plan_compiles_only_on_request(executor, monkeypatch):
    for target in (jax.stages.Lowered,):
        monkeypatch.setattr(target, "compile", lambda *_: pytest.fail("compiled"))
    found = planned(request(executor=executor))
    assert found.total_bytes == found.predicted_bytes
    assert [sum(of_rank.values()) for of_rank in found.memory_bytes] == list(found.total_bytes)
    assert (found.is_compiled, found.compile_s) == (False, None)


def test_a_limit_below_the_prediction_does_not_fit_and_one_above_fits(capsys):
    need = max(planned(request()).total_bytes)
    tight, enough = (config.Plan(memory_gib=(need + more) / 2**30) for more in (-1, 1))
    code, found = plan_json(capsys, request(plan=tight))
    assert (code, found["fits"], found["limit_bytes"]) == (1, False, need - 1)
    assert found["limit_source"].startswith("plan.memory_gib=")
    below, said = said_of(request(plan=tight), capsys)
    assert below.fits is False
    assert "total, predicted" in said
    assert re.search(
        r"^does not fit: \S+ \S+ of \S+ \S+ a device, predicted, 1 B too much on rank 0; "
        r"limit: plan.memory_gib=\S+\. Most are",
        said,
        re.MULTILINE,
    )
    above, said = said_of(request(plan=enough), capsys)
    assert (above.fits, above.is_compiled) == (True, False)
    show_plan(above, "evaluates on 1 batch")  # before the verdict
    assert re.search(r"^note      evaluates on 1 batch\nfits: ", capsys.readouterr().out, re.M)
    assert re.search(
        r"^fits: .* \(100%\), predicted; limit: plan.memory_gib=\S+\.$", said, re.MULTILINE
    )


OVER = (
    "plan hardware=h100 mesh=1x2 data=synthetic data.batch_size=512 data.vocab_size=64 "
    "model.num_layers=4 model.d_model=2048 model.num_heads=16 model.seq_len=2048 schedule=gpipe "
    "schedule.num_microbatches=2 run.platform=cpu run.eval_every=null"
)


@pytest.mark.parametrize("dtype", ["bfloat16", full("float32")])
def test_over_the_limit_of_the_hardware_plan_ends_with_1_and_names_the_limit(dtype, capsys):
    assert cli.main([*OVER.split(), f"run.dtype={dtype}"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.match(
        r"does not fit: [\d.]+ GiB of 59\.3 GiB a device, predicted, .*; limit: 75% of the 79\.1 "
        r"GiB of hardware=h100: run\.memory_fraction=null, JAX's default\. Most are",
        last,
    )
    assert "it fits" not in last


def test_compiled_memory_is_shown_next_to_the_prediction(capsys):
    found, said = said_of(request(plan=config.Plan(compile=True, memory_gib=1.0)), capsys)
    assert (found.fits, found.is_compiled) == (True, True)
    assert "fits: " in said
    assert "total, compiled" in said
    assert "total, predicted" in said


def test_costs_to_paste_are_relative_to_a_forward_of_a_stage():
    found = planned(TINY)
    names = "forward_s", "input_grad_s", "weight_grad_s"
    per_rank = {f"costs.{n}": sum(getattr(s, n) for s in found.stages) / 4 for n in names}
    per_rank["costs.transfer_s"] = found.transfer_s
    forward_s = per_rank["costs.forward_s"]
    pasted = re.findall(r"(costs\.\w+)=(\S+)", costs_text(found))
    assert {key: float(value) for key, value in pasted} == pytest.approx(
        {key: value / forward_s for key, value in per_rank.items()}, rel=0.05
    )
    assert (
        f"relative to a forward through 1/p of the model, {seconds_text(forward_s)}"
        in costs_text(found)
    )
    assert costs_text(replace(found, transfer_s=None)) is None


def test_costs_to_paste_come_with_their_mesh_and_microbatches(capsys):
    """Costs of pp=4 were pasted for the default mesh, of other ranks and microbatches."""
    words = costs_text(planned(TINY)).split(" for `ppctl schedule`")[0].split()
    assert words[:2] == ["mesh=1x4", f"schedule.num_microbatches={TINY.schedule.num_microbatches}"]
    assert cli.main(["schedule", "show", "schedule=1f1b", *words, "--json"]) == 0
    drawn = json.loads(capsys.readouterr().out)
    assert (drawn["num_ranks"], drawn["num_microbatches"]) == (4, TINY.schedule.num_microbatches)


def test_json_holds_the_stages_and_the_bubble(capsys):
    code, found = plan_json(
        capsys, request("zb_v", executor="mpmd", model=replace(TINY.model, num_layers=9))
    )
    assert code == 0
    assert found["partition"] == [2, 1, 1, 1, 1, 1, 1, 1]
    assert found["rank_of"] == [0, 1, 2, 3, 3, 2, 1, 0]
    assert 0 < found["ideal_bubble_fraction"] < 0.5
    assert 0 < found["predicted_bubble_fraction"] < 1
    assert found["fits"] is True
    assert (
        found["limit_bytes"] == MACHINE_BYTES // 4
    )  # simulated devices share the machine's memory
    assert len(found["memory_bytes"]) == len(found["total_bytes"]) == 4


# --- how it reads -------------------------------------------------------------------------------


def test_a_note_names_forwards_that_run_in_their_backward(capsys):
    found, said = said_of(request(remat="full"), capsys)
    assert found.stages[-1].forward_s == 0
    [row] = [line for line in said.splitlines() if line.split()[:1] == [str(len(found.stages) - 1)]]
    assert "in backward" in row
    assert "in backward" not in said_of(request(remat="layer"), capsys)[1]


def test_stages_are_a_short_line_and_assumptions_precede_the_verdict(capsys):
    found, said = said_of(request(), capsys)
    lines = said.splitlines()
    assert "stages    4 of 1 layer each, on ranks 0-3" in lines
    assert " ".join(
        " ".join(lines[[line[:7] for line in lines].index("assumes") : -1]).split()
    ) == (f"assumes {'; '.join(found.assumes)}")
    assert "step overhead: parameters, gradients, optimizer" in said


@pytest.mark.parametrize(
    ("vocab", "stages"), [("whole", "Ett|tL (E emb"), full(("parallel", "tt|t (t l"))]
)
def test_embedding_and_head_are_listed_only_on_their_stages(vocab, stages):
    asked = request("1f1b", 4, executor="mpmd", mesh=SMALL, partition=Balanced())
    asked = as_transformer(replace(asked, schedule=config.Schedule("1f1b", 4, vocab=vocab)))
    asked = replace(asked, model=replace(asked.model, num_layers=3))
    job = assemble(asked, only_planned=True)
    found = plan.predicted(job)
    lines, name = dict(plan_lines(found)), "1f1b" if vocab == "whole" else "1f1b, vocab=parallel"
    assert lines["schedule"].startswith(f"{name}, 4 microbatches")
    assert lines["stages"].startswith(stages)
    where = "embedding 0.0, head" if vocab == "whole" else "embedding and head on all ranks; larg"
    assert f"; balanced ({where}" in (partition_text(job) or "")


@pytest.mark.full
def test_a_plan_without_compilation_has_no_limit_on_devices(capsys):
    words = "plan model=llama3_405b mesh=16x16x8x1x8 hardware=h100 executor=mpmd data=synthetic"
    sizes = "data.batch_size=2048 schedule.num_microbatches=16 plan.memory_gib=1000"
    assert cli.main([*words.split(), *sizes.split(), "run.eval_every=null", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["devices"] == "16384 x h100 (described)"
    assert found["step_time_s"] > 0
    numbers = [number for stage in found["stages"][:16] for number in stage["devices"]]
    assert sorted(numbers) == [*range(16384)]


# --- ranks that differ ----------------------------------------------------------------------------


def test_ranks_that_differ_have_separate_devices_seconds_and_limits(capsys):
    ranks = [RankAxes(fsdp=4), RankAxes(dp=2, ranks="1-2")]
    mesh, chips = config.Mesh(pp=3, ranks=ranks), config.AutoHardware(ranks=["h100", "h100", "v5e"])
    parts = {"executor": config.Mpmd(remat="layer"), "data": config.Regression(batch_size=32)}
    asked = replace(TINY, mesh=mesh, hardware=chips, **parts)
    found, out = said_of(asked, capsys)
    places = [stage.place for stage in found.stages]
    assert places == ["4 x h100, fsdp=4", "2 x h100, dp=2", "2 x v5e, dp=2"]
    assert [stage.devices for stage in found.stages] == [(0, 1, 2, 3), (4, 5), (6, 7)]
    assert all(place in out for place in places)
    assert "6 x h100 and 2 x v5e (described)" in out
    # each rank takes the seconds and bytes that it takes if all have its chip
    for rank, name in enumerate(chips.ranks):
        alike = planned(replace(asked, hardware=known()[name]))
        assert found.stages[rank].backward_s == alike.stages[rank].backward_s
        assert found.memory_bytes[rank] == alike.memory_bytes[rank]
    assert len({stage.backward_s for stage in found.stages}) == 3
    assert found.fullest_rank == 2  # of 16 GiB a device
    assert "hardware=v5e" in out.splitlines()[-1]
    # fsdp=4 divides the state of rank 0; it has two layers, the others have one
    states = [sizes["parameters"] for sizes in found.memory_bytes]
    assert states[0] < states[1]
