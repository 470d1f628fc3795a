"""The memory of a layout, from sizes of a layer and an example, against the arrays that the program
has.
"""

from dataclasses import replace
from typing import Any

import pytest
from support.steps import planned_step

from ppctl import config
from ppctl.config.groups.layout_settings import Explicit
from ppctl.executors.work.parameter_bytes import ParamBytes
from ppctl.executors.work.planned_step import PlannedLayout
from ppctl.executors.work.rank_bytes import rank_bytes, reference_bytes, sizes_of, workspace_bytes
from ppctl.executors.work.roofline import Extent, ModelWork, PieceWork
from ppctl.executors.work.task_flops import work_of
from ppctl.planner.cost.predict_step import predict_job, step_of
from ppctl.schedule.mesh_axes import MeshSizes
from ppctl.training.pipeline.job import assemble

TINY = config.Config(
    model=config.Transformer(num_layers=8, d_model=32, num_heads=4, seq_len=16),
    mesh=config.Mesh(1, 4, 1),
    schedule=config.Schedule("1f1b", 8),
    executor=config.Spmd(remat="none"),
    data=config.Synthetic(batch_size=32, vocab_size=64),
    run=config.Run(dtype="float32"),
)


def request(schedule="1f1b", remat="none", **changes):
    executor = config.Spmd(remat=remat, gather=changes.pop("gather", "step"))
    kinds = {"interleaved": config.Interleaved}
    kind = (
        kinds[schedule](num_microbatches=8) if schedule in kinds else config.Schedule(schedule, 8)
    )
    return replace(TINY, schedule=kind, executor=executor, **changes)


UNEVEN: dict[str, Any] = {"partition": Explicit(layers=[3, 2, 2, 1])}
LORA: dict[str, Any] = {"optim": config.AdamW(train="lora", lora_rank=4)}
CASES = {
    **{f"1f1b {remat}": request(remat=remat) for remat in ("none", "layer", "full")},
    **{f"zb_h1 {remat}": request("zb_h1", remat) for remat in ("none", "layer", "full")},
    **{f"interleaved {remat}": request("interleaved", remat) for remat in ("none", "full")},
    "zb_v": request("zb_v"),
    "gpipe": request("gpipe"),
    "uneven": request(**UNEVEN),
    "uneven zb_h2": request("zb_h2", "layer", **UNEVEN),
    "bfloat16": request("zb_h1", run=config.Run(dtype="bfloat16")),
    "fsdp": request(mesh=config.Mesh(1, 2, 4)),
    "dp, fsdp, bfloat16": request(
        "zb_v", mesh=config.Mesh(2, 2, 2), run=config.Run(dtype="bfloat16")
    ),
    "one rank": request("1f1b", mesh=config.Mesh(2, 1, 2)),
    "adapters": request("zb_h1", **LORA),
    "adapters, fsdp, bfloat16": request(
        "1f1b", mesh=config.Mesh(1, 2, 4), run=config.Run(dtype="bfloat16"), **LORA
    ),
    "regression": replace(
        request(remat="layer"),
        model=config.MLP(num_layers=8, d_model=16),
        data=config.Regression(batch_size=32),
    ),
}


QUICK = ("interleaved full", "uneven zb_h2", "dp, fsdp, bfloat16", "one rank", "regression")


@pytest.mark.parametrize(
    "asked",
    [pytest.param(c, id=n, marks=() if n in QUICK else pytest.mark.full) for n, c in CASES.items()],
)
def test_planned_bytes_of_every_part_equal_its_arrays(asked):
    job = assemble(asked)
    held = rank_bytes(sizes_of(step_of(job)), job.pipe.ticks.num_slots)
    shapes = job.pipe.memory()[0]
    assert held.keys() == shapes.keys()
    for part, size in shapes.items():
        # arrays that an axis does not divide are whole on each device; numbers of steps come with
        # the moments
        assert held[part] == pytest.approx(size, rel=0.01, abs=64), part


@pytest.mark.full
@pytest.mark.parametrize("executor", ["spmd", "mpmd"])
def test_adapters_take_the_memory_that_is_predicted_as_compiled(executor):
    asked = request("zb_h1", model=replace(TINY.model, d_model=128, seq_len=32), **LORA)
    if executor == "mpmd":
        asked = replace(asked, executor=config.Mpmd(remat="none"))
    job = assemble(asked)
    predicted = max(predict_job(job).total_bytes)
    whole = max(predict_job(assemble(replace(asked, optim=TINY.optim))).total_bytes)
    compiled = max(job.pipe.compile().total_bytes)
    assert predicted == pytest.approx(compiled, rel=0.25)
    assert predicted < 0.85 * whole


@pytest.mark.full
def test_w_of_adapters_costs_almost_no_time():
    asked = replace(TINY, model=replace(TINY.model, d_model=256))
    plain, adapted = (
        work_of(assemble(each).pipe.model) for each in (asked, replace(asked, **LORA))
    )
    flops = lambda ops: sum(op.flops for op in ops)
    assert flops(adapted.layer.weight_grad) < 0.05 * flops(plain.layer.weight_grad)
    assert flops(adapted.layer.forward) == pytest.approx(flops(plain.layer.forward), rel=0.05)
    assert flops(adapted.head.input_grad) == pytest.approx(
        2 / 3 * flops(plain.head.input_grad), rel=1e-6
    )
    assert not flops(adapted.embed.weight_grad)


# --- temporaries --------------------------------------------------------------------------------

NOTHING = PieceWork((), (), ())
STASH = {"none": 10, "layer": 2, "full": 2}
WORK = ModelWork(
    NOTHING,
    NOTHING,
    NOTHING,
    2,
    STASH,
    {},
    residual_bytes=16.0,
    head_bytes=Extent(each=7.0, fixed=3.0),
)
PARAMS = ParamBytes(layer=40, embed_head=100, moments=2.0, compute_ratio=0.5)
LAYOUT = PlannedLayout(MeshSizes(pp=2), rank_layers=6, chunk_layers=3)
HEAD = 7 * 2 + 3  # bytes of two examples
BY_HAND = {
    ("none", True): 3 * 10 * 2
    + HEAD,  # residuals of 3 layers before they are in their slot, and the logits
    ("none", False): max(
        3 * 10 * 2 + HEAD, 6 * 2 + 3 * 40 // 2
    ),  # or the element-wise rest of a layer, and gradients
    ("layer", True): max(3 * 2 * 2 + HEAD, 16 * 2),
    ("layer", False): 16 * 2 + 3 * 40 // 2,  # a layer's residuals, and the gradients of 3 layers
    ("full", True): 3 * 16 * 2 + HEAD,  # the residuals of 3 layers, and the logits
    ("full", False): 3 * 16 * 2 + 3 * 40 // 2,
}


@pytest.mark.parametrize(("remat", "adds"), BY_HAND)
def test_temporaries_by_hand(remat, adds):
    step = planned_step(WORK, PARAMS, None, LAYOUT, examples=2, remat=remat, adds=adds)
    assert workspace_bytes(step) == BY_HAND[remat, adds]


def test_the_reference_holds_all_layers():
    whole = (6 * 40 + 100) * 1.5  # in the dtype of compute, and the sums of gradients
    for remat, kept in (("none", 16), ("layer", 2), ("full", 16)):
        step = planned_step(WORK, PARAMS, None, LAYOUT, examples=2, remat=remat)
        assert reference_bytes(step) == whole + 6 * kept * 2 + HEAD
