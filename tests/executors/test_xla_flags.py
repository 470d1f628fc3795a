"""Options of XLA's compiler: by device, refused ones, and their effect on a compiled program."""

import os
import re
from types import SimpleNamespace

import pytest
from support.cuda_plugin import needs_cuda_plugin

from ppctl import config
from ppctl.executors import compiler_options
from ppctl.executors.compiler_options import (
    GPU_FLAGS,
    GRAPHED,
    GRAPHS,
    add_to_xla_flags,
    flags_for,
    text_of,
    total_bytes,
)
from ppctl.planner.cost.predict_step import predict_job
from ppctl.training.pipeline import execution
from ppctl.training.pipeline.job import assemble

H100 = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100 80GB HBM3")
OTHERS = [("cpu", "cpu"), ("tpu", "TPU v5 lite"), ("gpu", "AMD Instinct MI300X")]


def test_nvidia_gpus_get_all_that_this_xla_knows(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")
    wanted = *GPU_FLAGS, (GRAPHS, GRAPHED)
    found = set(flags_for("auto", H100))
    assert {GPU_FLAGS[0], *wanted[-2:]} <= found <= set(wanted)  # jaxlib 0.12 has not all
    monkeypatch.setattr(
        compiler_options, "GPU_FLAGS", (*GPU_FLAGS[:2], ("xla_gpu_of_tomorrow", True))
    )
    assert flags_for("auto", H100)[:-1] == GPU_FLAGS[:2]


@pytest.mark.parametrize(("request_", "has_loops"), [("traced", True), ("auto", False)])
def test_traced_programs_with_loops_have_no_cuda_graphs(request_, has_loops):
    assert dict(flags_for(request_, H100, has_loops=has_loops))[GRAPHS] == ""


@pytest.mark.parametrize(("profile", "graphs"), [(None, GRAPHED), ("3", "")])
def test_a_run_that_is_profiled_has_no_cuda_graphs(profile, graphs, monkeypatch):
    asked = []
    spy = lambda *request, **how: asked.append(flags_for(request[0], H100, **how)) or ()
    monkeypatch.setattr(execution, "flags_for", spy)
    assemble(tiny(run=config.Run(profile=profile)))
    assert dict(asked[-1])[GRAPHS] == graphs


def test_flags_of_the_environment_are_kept(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm=true")
    assert "xla_gpu_enable_triton_gemm" not in dict(flags_for("auto", H100))
    # a longer option that begins alike is another one
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_triton_gemm_any=true")
    assert "xla_gpu_enable_triton_gemm" in dict(flags_for("auto", H100))


def test_options_are_added_once_and_never_over_the_users(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--a=1 --longer_b=2")
    for _ in range(2):
        add_to_xla_flags("--a=9", "--b=3")
    assert os.environ["XLA_FLAGS"] == "--a=1 --longer_b=2 --b=3"
    monkeypatch.delenv("XLA_FLAGS")
    add_to_xla_flags("--b=3")
    assert os.environ["XLA_FLAGS"] == "--b=3"


@pytest.mark.parametrize(("platform", "kind"), OTHERS)
def test_other_devices_get_no_flags(platform, kind):
    assert flags_for("auto", SimpleNamespace(platform=platform, device_kind=kind)) == ()


def test_xla_flags_none_is_empty_and_options_are_printed_as_in_xla_flags():
    assert flags_for("none", H100) == ()
    text = text_of((("xla_gpu_enable_triton_gemm", True), ("xla_gpu_autotune_level", "2")))
    assert text == "xla_gpu_enable_triton_gemm=true xla_gpu_autotune_level=2"


def tiny(**groups):
    model, data = config.MLP(num_layers=1, d_model=8), config.Regression(batch_size=8)
    schedule = config.Schedule("1f1b", 1)
    return config.Config(
        model=model, mesh=config.Mesh(1, 1, 1), data=data, schedule=schedule, **groups
    )


def compiled_for_gpus(schedule="1f1b", ranks=8, flags="auto"):
    """The text of a train step compiled for H100s that are not here."""
    request = config.Config(
        model=config.MLP(num_layers=2 * ranks, d_model=64),
        mesh=config.Mesh(1, ranks, 1),
        schedule=config.Schedule(schedule, ranks),
        executor=config.Spmd(xla_flags=flags, remat="none"),
        data=config.Regression(batch_size=ranks * 32),
        plan=config.Plan(compile=True, topology=f"h100:1x{ranks}"),
    )
    engine = assemble(request).pipe.engine
    return engine.compile_program(engine.lower_train_step()).as_text()


@needs_cuda_plugin
@pytest.mark.parametrize("flags", ["none", "auto"])
def test_sends_between_ranks_overlap_the_backward(flags):
    order = []  # instructions in the compiler's order
    for line in compiled_for_gpus(flags=flags).splitlines():
        op = re.search(r" = .* ([a-z-]+)\(", line)
        if op and op[1] in ("send", "send-done", "collective-permute-start", "collective-permute"):
            order.append(op[1])
        elif op and op[1] == "while" and 'tick_backward/while"' in line:
            order.append("backward")
    backward = order.index("backward")
    if flags == "none":
        assert {"collective-permute-start", "collective-permute"} & {*order[backward:]}
    else:
        assert "send" in order[:backward]
        assert "send-done" in order[backward:]
        assert "send-done" not in order[:backward]


@needs_cuda_plugin
@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_no_tick_copies_sums_of_gradients(schedule):
    """Square weights of the layers are 64 x 64; outside of the loops they are copied where they
    begin as zeros.
    """
    text, inside = compiled_for_gpus(schedule, ranks=4), []
    for part in re.split(r"\n(?=%|ENTRY )", text):
        name = part.split(" ", 1)[0]
        inside += (
            [name]
            * (not name.startswith(("ENTRY", "%fused")))
            * len(re.findall(r"= f32\[64,64\]\S* copy\(", part))
        )
    assert "tick_" in text
    assert inside == []


@needs_cuda_plugin
def test_gathers_of_weight_gradients_over_tp_overlap_products():
    """In a backward of two layers: gathers for weight gradients start before a product and end after
    it.
    """
    request = config.Config(
        model=config.Transformer(
            num_layers=4, d_model=512, num_heads=4, seq_len=512, attention="xla"
        ),
        mesh=config.Mesh(1, 2, 1, tp=4),
        schedule=config.Schedule("1f1b", 4),
        executor=config.Spmd(remat="none"),
        data=config.Synthetic(vocab_size=1024, batch_size=4),
        run=config.Run(dtype="bfloat16"),
        plan=config.Plan(compile=True, topology="h100:1x8"),
    )
    engine = assemble(request).pipe.engine
    text = engine.compile_program(engine.lower_train_step()).as_text()
    most = 0
    for part in re.split(r"\n(?=%|ENTRY )", text):
        open_gathers: dict[str, bool] = {}  # whether a product has run since
        beside = 0
        for line in part.splitlines():
            op = re.search(
                r"%?(\S+) = .* (all-gather-start|all-gather-done|custom-call)\(%?([\w.\-]+)", line
            )
            if op is None:
                continue
            if op[2] == "all-gather-start":
                open_gathers[op[1]] = False
            elif op[2] == "all-gather-done":
                beside += open_gathers.pop(op[3])
            elif "cublas" in line:
                open_gathers = dict.fromkeys(open_gathers, True)
        most = max(most, beside)
    assert most >= 2  # a layer has two such gathers, the inputs of its columns


@needs_cuda_plugin
@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 1), ("zb_h1", 2)])
def test_layers_are_recomputed_one_at_a_time_and_cublas_adds_all_weight_gradients(schedule, ranks):
    tokens, vocab_size = 4096, 16384  # rows of a microbatch
    request = config.Config(
        model=config.Transformer(num_layers=8, d_model=1024, num_heads=8, seq_len=tokens // 2),
        mesh=config.Mesh(1, ranks, 1),
        schedule=config.Schedule(schedule, 4),
        executor=config.Spmd(remat="layer"),
        data=config.Synthetic(vocab_size=vocab_size, batch_size=8),
        run=config.Run(dtype="bfloat16"),
        plan=config.Plan(compile=True, topology=f"h100:1x{ranks}"),
    )
    job = assemble(request)
    compiled = job.pipe.engine.compile_program(job.pipe.engine.lower_train_step())
    assert sum(predict_job(job).memory[0].values()) == pytest.approx(
        total_bytes(compiled), rel=0.05
    )
    products = [
        line for line in compiled.as_text().splitlines() if "cublas" in line and " = (f32[" in line
    ]
    assert any(
        f" = (f32[1024,{vocab_size}]" in line for line in products
    )  # the gradient of the head
    alone = [line for line in products if "output_to_operand_aliasing={{0}: (2, {})}" not in line]
    assert all(f" = (f32[{tokens},{vocab_size}]" in line for line in alone)  # the logits
