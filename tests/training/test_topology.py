"""Absent GPUs: their description for the compiler, refusals, and programs compiled for them."""

import json
import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest
from support.cuda_plugin import needs_cuda_plugin
from support.plans import planned

from ppctl import cli, config
from ppctl.cli.commands.plan import plan as run_plan
from ppctl.config.groups.hardware_settings import PER_CORE
from ppctl.errors import ConfigError
from ppctl.executors import described_devices as topology, rank_meshes
from ppctl.executors.described_devices import described_mesh, has_plugin, target_config
from ppctl.model.attention.cudnn_attention import CALLS
from ppctl.schedule.mesh_axes import MeshSizes
from ppctl.training.pipeline.job import assemble
from ppctl.training.pipeline.known_hardware import gpu_names, gpu_target, known

GPUS = gpu_names()
REQUEST = config.Config(
    model=config.MLP(num_layers=4, d_model=16),
    mesh=config.Mesh(1, 4, 1),
    schedule=config.Schedule("1f1b", 8),
    executor=config.Spmd(remat="full"),
    data=config.Regression(batch_size=16),
    plan=config.Plan(compile=True, topology="h100:2x2"),
)

DISPATCHED = replace(
    REQUEST,
    executor=config.Mpmd(remat="none"),
    schedule=config.Schedule("zb_h1", 8),
    run=config.Run(dtype="float32"),
)


def described(monkeypatch):
    """Return a plugin that describes four attached devices, and its requests."""
    asked = {}

    def describe(**given):
        asked.update(given)
        return SimpleNamespace(devices=jax.devices()[4:])

    monkeypatch.setattr(topology, "has_plugin", lambda: True)
    monkeypatch.setattr(topology.topologies, "get_topology_desc", describe)
    return asked


def test_all_nvidia_gpus_are_described():
    names = {name for name, hardware in known().items() if "NVIDIA" in hardware.device_kinds[0]}
    assert set(GPUS) == names


@pytest.mark.parametrize("name", GPUS)
def test_a_described_gpu_has_the_numbers_of_its_kind(name):
    hardware = known()[name]
    cuda, text = hardware.gpu, target_config(gpu_target(hardware))
    assert cuda is not None
    assert hardware.memory_gib is not None
    found = dict(re.findall(r"(\w+): (\S+)", text))
    assert float(found["memory_bandwidth"]) == hardware.memory_bytes_per_s
    assert int(found["core_count"]) == cuda.cores
    assert (found["major"], found["minor"]) != ("0", "0")
    assert text.count("{") == text.count("}")
    # without versions, products in 8 bits silently become products of bfloat16
    assert {"driver_version", "runtime_version", "compile_time_toolkit_version"} <= found.keys()
    assert ("ACCELERATED_FEATURES" in text) == (float(cuda.capability) >= 9)
    assert hardware.device_kinds[0] in text
    # float32 lanes at two operations a clock reach no more than the tensor cores' float32
    assert (
        0.02
        < 2e9
        * cuda.cores
        * PER_CORE[cuda.capability][0]
        * cuda.clock_ghz
        / hardware.peak_flops["float32"]
        < 1
    )
    # programs can use three quarters
    assert cuda.memory_bytes * 0.75 / 2**30 == pytest.approx(hardware.memory_gib, rel=0.02)


def test_a_plan_requests_hosts_with_gpus_and_takes_its_limit_from_the_description(
    monkeypatch, capsys
):
    asked = described(monkeypatch)
    assert run_plan(REQUEST, as_json=True) == 0
    found = json.loads(capsys.readouterr().out)
    assert (asked["platform"], asked["topology"]) == ("cuda", "1x2x2")
    assert asked["target_config"] == target_config(gpu_target(known()["h100"]))
    assert found["hardware"] == "h100"
    assert found["fits"] is True
    assert found["limit_bytes"] == round(
        known()["h100"].memory_gib * 2**30
    )  # the compiler refuses nothing
    assert run_plan(replace(REQUEST, run=config.Run(memory_fraction=0.9)), as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["limit_bytes"] == round(
        known()["h100"].memory_gib * 0.9 / 0.75 * 2**30
    )
    small = replace(
        REQUEST, plan=replace(REQUEST.plan, memory_gib=max(found["total_bytes"]) / 2**30 - 1e-6)
    )
    assert run_plan(small, as_json=True) == 1


def test_custom_hardware_is_described(monkeypatch):
    asked = described(monkeypatch)
    mine = replace(
        known()["h100"], name="mine", cuda=known()["h100"].cuda | {"cores": 99}, memory_gib=10.0
    )
    found = planned(
        replace(REQUEST, hardware=mine, plan=replace(REQUEST.plan, topology="mine:1x4"))
    )
    assert "core_count: 99" in asked["target_config"]
    assert (found.hardware, found.limit_bytes) == ("mine", 10 * 2**30)


def test_the_flag_against_timing_is_set_once_and_never_over_the_users(monkeypatch):
    described(monkeypatch)
    h100 = gpu_target(known()["h100"])
    monkeypatch.setenv("XLA_FLAGS", "--xla_some=1")
    for _ in range(2):
        described_mesh(MeshSizes(dp=1, pp=4), "h100:2x2", h100)
        assert topology.os.environ["XLA_FLAGS"] == "--xla_some=1 --xla_gpu_autotune_level=0"
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=4")
    described_mesh(MeshSizes(dp=1, pp=4), "h100:2x2", h100)
    assert topology.os.environ["XLA_FLAGS"] == "--xla_gpu_autotune_level=4"


def test_other_shapes_and_sizes_are_refused(monkeypatch):
    described(monkeypatch)
    h100 = gpu_target(known()["h100"])
    with pytest.raises(
        ConfigError,
        match=r"^plan.topology=h100:1x2x2 names GPUs, but not as hosts x GPUs per host. .*h100:2x8",
    ):
        described_mesh(MeshSizes(dp=1, pp=4), "h100:1x2x2", h100)
    with pytest.raises(
        ConfigError, match=r"1\*2\*1 = 2, but plan.topology=h100:1x4 has 4 devices. Use a mesh"
    ):
        described_mesh(MeshSizes(dp=1, pp=2), "h100:1x4", h100)


@pytest.mark.full
def test_programs_of_mpmd_are_compiled_once_each_and_each_rank_has_its_memory(monkeypatch):
    here = assemble(replace(DISPATCHED, plan=config.Plan())).pipe.engine.compile(evaluate=False)
    described(monkeypatch)
    monkeypatch.setattr(rank_meshes, "is_described", lambda mesh: True)
    engine = assemble(DISPATCHED).pipe.engine
    assert engine.compile(evaluate=False).total_bytes == here.total_bytes
    built = list(engine.compiled.compiled)
    assert len(built) == len({program for program, _ in built}) < sum(map(len, engine.dispatched()))
    assert engine.runtime.turns == [None] * 4  # no array lies on a device that is not here


@pytest.mark.skipif(has_plugin(), reason="XLA's plugin for CUDA is installed")
def test_without_the_plugin_it_is_named(capsys):
    assert cli.main(["plan", "mesh=2x2", "plan.topology=h100:1x4"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "needs XLA's plugin for CUDA" in line
    assert line.endswith("Or predict only, which takes no compiler: plan.compile=false.")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"capability": "9"}, "hardware.cuda.capability=9 is not one of 8.0, 8.6"),
        ({"cores": 0}, "hardware.cuda.cores=0"),
        ({"clock_ghz": float("nan")}, "hardware.cuda.clock_ghz=nan"),
    ],
)
def test_a_gpu_that_cannot_be_is_refused(changes, message):
    hardware = known()["h100"]
    with pytest.raises(ConfigError, match=message):
        replace(hardware, cuda=hardware.cuda | changes).check()


@needs_cuda_plugin
def test_a_program_is_compiled_for_gpus():
    found = planned(REQUEST)
    assert found.is_compiled
    assert found.fits
    assert found.devices == "4 x NVIDIA H100 80GB HBM3, 2 processes: pp over 2"


@needs_cuda_plugin
@pytest.mark.parametrize("remat", ["none", "layer"])
@pytest.mark.parametrize(
    ("schedule", "backward"), [("1f1b", ["bwd"]), ("zb_h1", ["bwd_i", "bwd_w"])]
)
def test_a_stages_programs_run_cudnns_kernels_once_a_layer(schedule, backward, remat):
    layers, again = 2, int(remat == "layer")  # layers of a stage; whether its backward recomputes
    request = replace(
        REQUEST,
        model=config.Transformer(
            num_layers=2 * layers, d_model=128, num_heads=2, seq_len=128, attention="cudnn"
        ),
        mesh=config.Mesh(1, 2, 1),
        schedule=config.Schedule(schedule, 4),
        executor=config.Mpmd(remat=remat),
        data=config.Synthetic(vocab_size=64, batch_size=8),
        run=config.Run(dtype="bfloat16"),
        plan=config.Plan(compile=True, topology="h100:1x2"),
    )
    engine = assemble(request).pipe.engine
    tasks = [each for each in engine.programs().programs if re.match(r"fwd|bwd", each.name)]
    runs = {
        task.name: tuple(task.hlo.count(f'custom_call_target="{call}"') for call in CALLS)
        for task in tasks
    }
    wanted = {"fwd": (layers, 0), backward[0]: (again * layers, layers), "bwd_w": (0, 0)}
    assert runs == {
        f"{kind} of stage {stage}": wanted[kind]
        for stage in range(2)
        for kind in ["fwd", *backward]
    }


@needs_cuda_plugin
@pytest.mark.parametrize(
    ("executor", "schedule", "mesh"),
    [
        (config.Mpmd(remat="none"), "zb_h1", config.Mesh(1, 2, 1)),
        (config.Mpmd(remat="layer"), "1f1b", config.Mesh(1, 2, 1)),
        (config.Spmd(remat="none", gather="layer"), "zb_h1", config.Mesh(1, 2, 2)),
    ],
    ids=["split", "whole", "ticks"],
)
def test_linear_maps_are_products_in_8_bits(executor, schedule, mesh):
    request = replace(
        REQUEST,
        model=config.Transformer(
            num_layers=4, d_model=256, num_heads=2, mlp_width=512, seq_len=128, attention="cudnn"
        ),
        mesh=mesh,
        schedule=config.Schedule(schedule, 4),
        executor=executor,
        data=config.Synthetic(vocab_size=64, batch_size=8),
        run=config.Run(dtype="bfloat16"),
        plan=config.Plan(compile=True, topology=f"h100:1x{mesh.num_devices}"),
    )
    call = 'custom_call_target="__cublas$lt$matmul'

    def products(linear_dtype):
        model = replace(request.model, linear_dtype=linear_dtype)
        programs = assemble(replace(request, model=model)).pipe.programs().programs
        tasks = [each for each in programs if re.match(r"fwd|bwd|step", each.name)]
        return {each.name: (each.hlo.count(f'{call}"'), each.hlo) for each in tasks}

    plain, ours = products(None), products("fp8")
    for name, (number, text) in ours.items():
        in_8_bits, of_all = text.count(f'{call}$f8"'), plain[name][0]
        assert in_8_bits + number == of_all, name  # nothing is computed twice for its scales
        if name == "step":  # embedding and head stay, and the gradients of matrices with fp8
            assert in_8_bits == of_all - 3 - 8
            assert re.search(r"f8e4m3fn\[[\d,]+\]\S* all-gather", text)
        elif "bwd_w" in name:
            assert in_8_bits == 0, name
        elif "bwd_i" in name or "fwd" in name:
            head = 0 if name.endswith("0") or "fwd" not in name else 3
            assert (in_8_bits, number) == (of_all - head, head), name


@needs_cuda_plugin
def test_a_plan_of_mpmd_is_compiled_for_gpus():
    found = planned(DISPATCHED)
    assert found.is_compiled
    assert found.fits
    assert len(found.total_bytes) == 4


@needs_cuda_plugin
@pytest.mark.parametrize(
    ("num_layers", "stacked"), [(8, "[1,1,2,512,512]"), (24, "[1,1,6,512,512]")]
)
def test_the_update_of_layers_is_one_pass(num_layers, stacked):
    request = replace(REQUEST, model=config.MLP(num_layers=num_layers, d_model=512))
    program = assemble(request).pipe.engine.compile(evaluate=False).text.partition("\nENTRY")[2]
    kernels = re.findall(r" = (\S+|\(.*?\)) (?:fusion|copy)\(", program)
    assert [made.count(stacked) for made in kernels if stacked in made] == [
        3
    ]  # parameters and both moments
