"""The assumptions of a plan follow from the request, and its seconds are counted with them."""

from dataclasses import replace

import pytest

from ppctl import config
from ppctl.config.groups.moe_settings import Experts
from ppctl.errors import ConfigError
from ppctl.model.parallel import StageAxes
from ppctl.planner.cost.predict_step import predict_job, target_of
from ppctl.planner.make_plan import assumptions
from ppctl.planner.search.device_models import stage_divisions
from ppctl.training.pipeline.job import assemble
from ppctl.training.pipeline.known_hardware import known

ROWS = config.Config(
    model=config.MLP(num_layers=4, d_model=16),
    mesh=config.Mesh(1, 4),
    schedule=config.Schedule("1f1b", 8),
    executor=config.Spmd(),
    data=config.Regression(batch_size=64),
)
TOKENS = replace(
    ROWS,
    model=config.Transformer(num_layers=4, d_model=32, num_heads=4, seq_len=16),
    data=config.Synthetic(batch_size=64, vocab_size=64),
    run=config.Run(dtype="bfloat16"),
    hardware=known()["h100"],
)
TEXT = {"model": TOKENS.model, "data": TOKENS.data}


def said(request, *, is_timed=True):
    """Return the assumptions of a plan of the request, as one text."""
    return "; ".join(assumptions(assemble(request, only_planned=True), is_timed=is_timed))


@pytest.mark.parametrize(
    ("changes", "words", "others"),
    [
        (
            {},
            "ticks as long as the slowest rank's tasks and a transfer",
            "ranks that compute while",
        ),
        ({"executor": config.Mpmd()}, "ranks that compute while values travel", "ticks"),
        ({"mesh": config.Mesh(2, 1)}, "gathers of parameters before all tasks", "ticks as long as"),
        (
            {"mesh": config.Mesh(1, 2, 2)},
            "gathers of parameters before all tasks",
            "before each task",
        ),
        (
            {"mesh": config.Mesh(1, 2, 2), "executor": config.Mpmd(gather="layer")},
            "each layer gathered in each task that reads it, with nothing computed meanwhile",
            "before all tasks",
        ),
        (
            {
                "mesh": config.Mesh(1, 2, 2),
                "executor": config.Spmd(gather="layer"),
                "hardware": known()["h100"],
            },
            "each layer gathered in each task that reads it, while the layer before is computed",
            "nothing computed",
        ),
        (
            {"mesh": config.Mesh(), "executor": config.Reference()},
            "the optimizer after all tasks",
            "GB/s each way",
        ),
        (
            {"mesh": config.Mesh(1, 2, 1, tp=2), **TEXT},
            "nothing computed while devices along tp",
            "with nothing computed meanwhile",
        ),
        ({}, "equal microbatches (8 examples a device)", "attention"),
        ({}, "stages whole on each device", "hosts"),
        ({"plan": config.Plan(compile=True)}, "equal layers and devices", "fragmented"),
    ],
)
def test_assumptions_follow_from_the_request(changes, words, others):
    text = said(replace(ROWS, **changes))
    assert words in text
    assert others not in text


OF_ITS_OWN = replace(
    ROWS,
    model=config.CustomModel(target="support.sharded_models.of_config", num_layers=4),
    data=config.Regression(batch_size=64, num_features=6, num_targets=4),
    mesh=config.Mesh(1, 2, tp=2),
    executor=config.Mpmd(),
)


def test_where_xla_puts_collectives_in_the_step_time_is_unknown():
    found = predict_job(assemble(OF_ITS_OWN, only_planned=True))
    assert found.unknown == "XLA divides this model over tp, and its sends cannot be predicted"
    assert (found.step_s, found.bubble) == (None, None)
    assert min(found.total_bytes) > 0


def test_a_search_refuses_stages_that_xla_divides():
    request = replace(OF_ITS_OWN, mesh=config.Mesh(1, 2), hardware=known()["h100"])
    pipe = assemble(request, only_planned=True).pipe
    counted = lambda *sizes: pytest.fail("counted")
    of_model = counted, pipe.stack, pipe.model.x, StageAxes()
    message = r"tune.tp: 2 has XLA divide this model .* Use tune.tp=\[1\]"
    with pytest.raises(ConfigError, match=message):
        stage_divisions(*of_model, {"ep": None, "tp": [2], "cp": None}, 4, 8)


def test_assumed_speeds_and_links_are_the_predictions():
    job = assemble(
        replace(TOKENS, mesh=config.Mesh(2, 4, 2)), only_planned=True, on_one_device=True
    )
    machine = target_of(job).machine
    text = "; ".join(assumptions(job, is_timed=True))
    links = machine.links(job.pipe.meshes.sizes.by_axis)
    assert (links["pp"], links["dp"], links["fsdp"]) == (
        machine.network,
        machine.link,
        machine.link,
    )
    assert "pp between hosts at 50 GB/s each way and 20 us a message" in text
    assert "dp within a host at 450 GB/s each way and 10 us a message" in text
    assert f"{machine.speed.flops_per_s / 1e12:.4g} TFLOP/s in large matrix products" in text
    assert f"{machine.speed.bytes_per_s / 1e9:.4g} GB/s of memory" in text
    assert f"{machine.task_s * 1e6:.3g} us to start a tick" in text


def test_the_kernel_of_attention_is_the_hardwares():
    fast = said(TOKENS)
    assert "attention=cudnn" in fast
    assert "801.4 in attention forward, 474.9 backward" in fast
    other = said(replace(TOKENS, run=config.Run(dtype="float32")))  # cuDNN does not compute it
    assert "attention=xla" in other
    assert "in attention" not in other
    away = config.Plan(compile=False, topology="h100:1x4")
    assert "attention=cudnn" in said(replace(TOKENS, hardware=config.AutoHardware(), plan=away))


def test_the_kernel_of_experts_is_the_hardwares():
    experts = replace(TOKENS.model, moe=Experts(num_experts=4))
    assert "products of experts=triton" in said(replace(TOKENS, model=experts))
    assert "products of experts" not in said(TOKENS)


def test_a_plan_without_a_time_states_no_speeds():
    text = said(ROWS, is_timed=False)
    assert "GB/s" not in text
    assert "no fragmented memory" in text
