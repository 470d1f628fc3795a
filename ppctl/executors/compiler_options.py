"""XLA's compiler: options that suit the devices, presets on CPU, the memory of compiled programs.

Options are those of each compiled program, not of the process. docs/executors-internals.md,
"Compiler presets on CPU", has the presets' measurements.
"""

import os
from functools import cache
from typing import Any, Literal

import jax

Value = bool | str  # XLA takes numbers as text too
Flags = tuple[tuple[str, Value], ...]

CompilerPreset = Literal["full", "quick", "once"]  # once: runs once a step

EMITTERS = "xla_cpu_use_fusion_emitters"  # jaxlib 0.12 has only MLIR's emitters
ONE_MODULE = {EMITTERS: False, "xla_cpu_parallel_codegen_split_count": 1}  # one LLVM module
CPU_OPTIONS: dict[CompilerPreset, dict[str, Any]] = {
    "full": {},
    "quick": ONE_MODULE,
    "once": {**ONE_MODULE, "xla_backend_optimization_level": 0},
}

# Options that others ship for pipelines on NVIDIA GPUs. Without Triton's products a step took 0.393
# s instead of 0.411 on one H100 (docs/benchmarks.md, "One H100"); the others were not timed.
GPU_FLAGS: Flags = (
    ("xla_gpu_enable_latency_hiding_scheduler", True),  # collectives start early and end late
    ("xla_gpu_enable_pipelined_p2p", True),  # hops travel while the next tick computes
    # bytes from which a permute becomes a send and a receive
    ("xla_gpu_collective_permute_decomposer_threshold", "1024"),
    ("xla_gpu_enable_pipelined_all_gather", True),
    ("xla_gpu_enable_pipelined_reduce_scatter", True),
    ("xla_gpu_copy_insertion_use_region_analysis", True),  # no copies of sums and slots in ticks
    ("xla_gpu_dot_merger_threshold_mb", "8"),  # large products unmerged: slices would be copied
    ("xla_gpu_enable_triton_gemm", False),  # matrix products by cuBLAS
)

# CUDA graphs of whole loops: a condition does not wait for the host. On one H200 a step took
# 0.3505 s, where it took 0.365 with XLA's own graphs and 0.367 with none (docs/benchmarks.md).
GRAPHS = "xla_gpu_enable_command_buffer"
GRAPHED = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,WHILE,CONDITIONAL"


def flags_for(request: str, device: Any, *, has_loops: bool = True) -> Flags:
    """Return the compiler options of executor.xla_flags for an attached or described device.

    request: "auto", those of `GPU_FLAGS` that this XLA knows and XLA_FLAGS does not set, on NVIDIA
    GPUs, and () elsewhere; "traced", the same without CUDA graphs, which hide tasks from traces; or
    "none". has_loops: the program runs tasks in loops; others need no graphs.
    """
    is_nvidia = device.platform in ("gpu", "cuda") and "NVIDIA" in device.device_kind
    if request == "none" or not is_nvidia:
        return ()
    of_user = os.environ.get("XLA_FLAGS", "")
    graphs = GRAPHED if has_loops and request == "auto" else ""
    flags = *GPU_FLAGS, (GRAPHS, graphs)
    missing = ((name, value) for name, value in flags if name not in of_user)
    return tuple((name, value) for name, value in missing if _is_known(name, value))


def text_of(flags: Flags) -> str:
    """Return options as XLA_FLAGS has them, without dashes."""
    text = lambda value: str(value).lower() if isinstance(value, bool) else value  # noqa: E731
    return " ".join(f"{name}={text(value)}" for name, value in flags)


def cpu_options(preset: CompilerPreset) -> dict[str, Any]:
    """Return the options of XLA's CPU compiler for a preset, those that this jaxlib has."""
    ours = CPU_OPTIONS[preset]
    return {name: ours[name] for name in ours if name != EMITTERS or _is_known(name, False)}


@cache
def _is_known(name: str, value: Value) -> bool:
    """Return whether XLA takes an option. Each backend knows all options."""
    try:
        jax.jit(lambda: 0).lower().compile({name: value})
    except jax.errors.JaxRuntimeError:
        return False
    return True


def temp_bytes(program: jax.stages.Compiled) -> int:
    """Return a program's temporary bytes on one device, without its arguments and results."""
    memory: Any = program.memory_analysis()
    return memory.temp_size_in_bytes


def total_bytes(program: jax.stages.Compiled) -> int:
    """Return a program's bytes on one device: arguments, unshared results, temporaries."""
    memory: Any = program.memory_analysis()
    made = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + made + memory.temp_size_in_bytes
