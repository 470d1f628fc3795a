"""Options of XLA's compiler: which devices get which, what is refused, and what they change in a compiled program."""

import re
from types import SimpleNamespace

import pytest

from ppctl import config
from ppctl.errors import ConfigError
from ppctl.executors import xla_flags
from ppctl.executors.topology import has_plugin
from ppctl.executors.xla_flags import GPU_FLAGS, flags_for, text_of
from ppctl.training.job import assemble

H100 = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
OTHERS = [("cpu", "cpu"), ("tpu", "TPU v5 lite"), ("gpu", "AMD Instinct MI300X")]


def test_nvidia_gpus_get_all_that_this_xla_knows(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    assert {GPU_FLAGS[0], GPU_FLAGS[-1]} <= set(flags_for("auto", H100)) <= set(GPU_FLAGS)  # jaxlib 0.12 has not all
    monkeypatch.setattr(xla_flags, "GPU_FLAGS", (*GPU_FLAGS[:2], ("xla_gpu_of_tomorrow", True)))
    assert flags_for("auto", H100) == GPU_FLAGS[:2]


def test_what_the_environment_sets_is_left_alone(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=true")
    assert "xla_gpu_enable_triton_gemm" not in dict(flags_for("auto", H100))


@pytest.mark.parametrize(("platform", "kind"), OTHERS)
def test_other_devices_get_none(platform, kind):
    assert flags_for("auto", SimpleNamespace(platform=platform, device_kind=kind)) == ()


def test_what_is_asked_for_takes_the_place_of_auto():
    flags = flags_for(["--xla_gpu_enable_triton_gemm=true", "xla_gpu_autotune_level=2"], H100)
    assert flags == (("xla_gpu_enable_triton_gemm", True), ("xla_gpu_autotune_level", "2"))
    assert text_of(flags) == "xla_gpu_enable_triton_gemm=true xla_gpu_autotune_level=2"
    assert flags_for("none", H100) == ()


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        (
            "xla_gpu_foo=true",
            "xla_gpu_foo=True is refused by XLA of jaxlib .*: No such compile option: 'xla_gpu_foo'. L",
        ),
        ("xla_gpu_enable_triton_gemm=maybe", "'maybe' is not a valid bool value. Leave it out, or use executor.xla_fl"),
    ],
)
def test_what_xla_does_not_know_is_refused(flag, reason):
    with pytest.raises(ConfigError, match=reason):
        flags_for([flag], H100)


@pytest.mark.skipif(not has_plugin(), reason="needs XLA's plugin for CUDA: pip install ppctl[cuda12]")
@pytest.mark.parametrize("flags", ["none", "auto"])
def test_what_ranks_hand_on_travels_while_the_backward_computes(flags, monkeypatch):
    request = config.Config(
        model=config.MLP(num_layers=8, d_model=64),
        mesh=config.Mesh(1, 8, 1),
        schedule=config.Schedule("1f1b", 8),
        executor=config.Spmd(xla_flags=flags),
        data=config.Regression(batch_size=8 * 64),
        plan=config.Plan(compile=True, topology="h100:1x8"),
    )
    engine = assemble(request).pipe.engine
    text = engine.compile_program(engine.lower_train_step()).as_text()
    order = []  # of the compiler's schedule
    for line in text.splitlines():
        op = re.search(r" = .* ([a-z-]+)\(", line)
        if op and op[1] in ("send", "send-done", "collective-permute-start"):
            order.append(op[1])
        elif op and op[1] == "conditional" and 'tick_backward/cond"' in line:
            order.append("backward")
    backward = order.index("backward")
    if flags == "none":
        assert "collective-permute-start" in order[backward:]
    else:
        assert "send" in order[:backward]
        assert "send-done" in order[backward:]
        assert "send-done" not in order[:backward]
