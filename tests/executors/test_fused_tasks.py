"""A forward and a backward as one program (executor.fuse=fb): the reference's numbers, and the
operations that the compiler for GPUs runs during each send.
"""

import pytest
from support.cuda_plugin import needs_cuda_plugin
from support.mixtures import OPTIMIZER, Written, check, make_batch
from support.mpmd_cases import MpmdCase, check as check_dense, make_engine, name_of
from support.selection import full, full_except

import ppctl
from ppctl import config
from ppctl.config.groups.moe_settings import Experts
from ppctl.errors import ConfigError
from ppctl.executors.hlo_text import collectives
from ppctl.training.pipeline.job import assemble

FUSED = {"executor": "mpmd", "fuse": "fb", "num_microbatches": 8}
ALLTOALL, PARALLEL = {"dispatch": "alltoall"}, {"vocab": "parallel"}
MIXTURES = {
    "dualpipe_v": ({"pp": 2, "ep": 2}, {"schedule": "dualpipe_v", "remat": "none"}),
    "interleaved": (
        {"pp": 2, "ep": 2},
        {"schedule": "interleaved", "num_chunks": 2, "remat": "layer", **ALLTOALL},
    ),
    "eager": ({"pp": 2, "ep": 4}, {"schedule": "eager_1f1b", "remat": "full"}),
    "1f1b": ({"pp": 2, "ep": 2}, {"schedule": "1f1b", "remat": "none", "num_microbatches": 16}),
    "zb_v tp2": (
        {"pp": 2, "ep": 2, "tp": 2},
        {"schedule": "zb_v", "remat": "layer", "mixture": "sigmoid", **ALLTOALL},
    ),
    "full": ({"pp": 2, "ep": 2}, {"schedule": "dualpipe_v", "remat": "full", **ALLTOALL}),
    "parts": (
        {"pp": 2, "ep": 2},
        {"schedule": "interleaved", "num_chunks": 2, "remat": "none", **PARALLEL},
    ),
    "shards": (
        {"pp": 2, "ep": 2, "fsdp": 2},
        {"schedule": "dualpipe_v", "gather": "layer", "mixture": "dense between"},
    ),
}


@pytest.mark.parametrize(("mesh", "how"), full_except(MIXTURES))
def test_mixtures_equal_the_reference(mesh, how):
    check(mesh, **(FUSED | how))


DENSE = [
    MpmdCase("dualpipe_v", (1, 2, 1), num_layers=4, remat="none", model="tied swiglu", fuses=True),
    MpmdCase("interleaved", (1, 2, 2), remat="layer", model="mlp", fuses=True),
    MpmdCase("zb_v", (1, 2, 1), remat="full", model="mlp", fuses=True),
    MpmdCase("eager_1f1b", (2, 2, 1), remat="full", model="untied gelu", fuses=True),
]


@pytest.mark.full
@pytest.mark.parametrize("case", [DENSE[0], *map(full, DENSE[1:])], ids=name_of)
def test_dense_models_do_too(case):
    check_dense(case)


def test_both_orders_of_a_pair_are_programs_and_a_second_step_compiles_nothing():
    case = MpmdCase("dualpipe_v", (1, 2, 1), num_layers=4, remat="none", model="mlp", fuses=True)
    engine, batch = make_engine(case)
    engine.compile(evaluate=False)
    before = dict(engine.compiled.compiled)
    kinds = {program.kind for program, _ in before}
    assert {"BF", "FB"} <= kinds
    state, placed = engine.new_state(), engine.batches.put(batch)
    for _ in range(2):
        state, _ = engine.step(state, placed)
    assert engine.compiled.compiled == before


# --- refused ------------------------------------------------------------------------------


REFUSED = {
    "gpipe has no neighbours": (
        {"schedule": "gpipe"},
        "fuse=fb runs a forward and a backward as one program, but schedule=gpipe",
    ),
    "too few microbatches": (
        {"schedule": "dualpipe_v", "num_microbatches": 2},
        "schedule=dualpipe_v of 2 microbatches has no adjacent pair that can start together. Use "
        "fuse=none or num_microbatches=",
    ),
    "layers are scanned": ({"schedule": "dualpipe_v", "unroll": 0}, "Use unroll=1."),
}


@pytest.mark.parametrize(("how", "words"), REFUSED.values(), ids=REFUSED)
def test_requests_without_fusible_tasks_are_refused(how, words):
    stack = Written({"num_experts": 4}).stack()
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        ppctl.pipeline(
            stack, ppctl.mesh(pp=2), batch=make_batch(), optimizer=OPTIMIZER, **(FUSED | how)
        )


# --- compiled for H100s that are not here -----------------------------------------------------------


def compiled_for_gpus(dispatch):
    """The collectives over ep of a forward, of a backward, and of the program of both."""
    request = config.Config(
        model=config.Transformer(
            num_layers=8,
            d_model=512,
            num_heads=4,
            seq_len=512,
            activation="swiglu",
            moe=Experts(num_experts=8, dispatch=dispatch),
        ),
        mesh=config.Mesh(1, 2, 1, ep=4),
        schedule=config.Schedule("dualpipe_v", 8),
        executor=config.Mpmd(fuse="fb"),
        data=config.Synthetic(vocab_size=256, batch_size=32),
        run=config.Run(dtype="bfloat16"),
        plan=config.Plan(topology="h100:1x8"),
    )
    engine = assemble(request).pipe.engine
    entries, _ = engine.plans.plan("step")
    engine.compiled.shapes(entries, engine.given_shapes)
    of_kind = {}
    for entry in entries:
        roles = entry.program and getattr(entry.program.shape, "programs", [entry.program])
        if entry.task and roles and not any(r.shape.is_first or r.shape.is_last for r in roles):
            of_kind.setdefault(entry.program.kind, entry)
    found = {}
    for kind in ("F", "B", "BF"):
        (compiled,) = engine.compiled.compiled_first([of_kind[kind]]).values()
        counted = collectives(compiled.as_text(), engine.compiled.submeshes[0].shape)
        of_ep = [each for each in counted if each.axes == ("ep",) and each.bytes > 2**18]
        found[kind] = tuple(
            sum(getattr(each, name) for each in of_ep) for name in ("instructions", "overlapped")
        )
    return found


@needs_cuda_plugin
@pytest.mark.slow
@pytest.mark.parametrize(("dispatch", "alone"), [("gather", 1), full(("alltoall", 11))])
def test_sends_to_experts_overlap_products_of_the_other_task(dispatch, alone):
    found = compiled_for_gpus(dispatch)
    print(dispatch, found)
    (sent, hidden), (sent_back, hidden_back) = found["F"], found["B"]
    together, both = found["BF"]
    assert hidden == 0  # a forward computes nothing while its tokens travel
    assert both - together > (hidden - sent) + (hidden_back - sent_back)
    assert together - both <= alone
