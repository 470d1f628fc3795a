"""XLA compiler options for the devices, and the memory of compiled programs.

Options apply to each compiled program, not to the process. docs/executors-internals.md,
"Compiler options on CPU", has measurements.
"""

import os
from collections.abc import Callable
from functools import cache
from typing import Any, Literal

import jax

Value = bool | str  # XLA also takes numbers, as text
Flags = tuple[tuple[str, Value], ...]

# light: for the initial state: one LLVM module with the least optimization, the same bits as with
# XLA's defaults in 0.4 of the compile time. once: for programs that run a few times: unoptimized.
CompilerPreset = Literal["light", "once"]

EMITTERS = "xla_cpu_use_fusion_emitters"  # MLIR's emitters; no option of jaxlib 0.12
ONE_MODULE = {EMITTERS: False, "xla_cpu_parallel_codegen_split_count": 1}  # one LLVM module
CPU_OPTIONS: dict[CompilerPreset, dict[str, Any]] = {
    "light": {**ONE_MODULE, "xla_backend_optimization_level": 1},
    "once": {**ONE_MODULE, "xla_backend_optimization_level": 0},
}

# Options that other libraries set for pipelines on NVIDIA GPUs. Without Triton's matrix
# products (the last option) a step took 0.393 s instead of 0.411 s on one H100
# (docs/benchmarks.md, "One H100"); the effect of the other options was not measured.
GPU_FLAGS: Flags = (
    ("xla_gpu_enable_latency_hiding_scheduler", True),  # collectives start early and end late
    ("xla_gpu_enable_pipelined_p2p", True),  # hops travel while the next tick computes
    # bytes: permutes of this size or more become a send and a receive
    ("xla_gpu_collective_permute_decomposer_threshold", "1024"),
    ("xla_gpu_enable_pipelined_all_gather", True),
    ("xla_gpu_enable_pipelined_reduce_scatter", True),
    ("xla_gpu_copy_insertion_use_region_analysis", True),  # no copies of gradient sums and slots
    # MB: larger products are not merged, because slices of a merged result would be copied
    ("xla_gpu_dot_merger_threshold_mb", "8"),
    ("xla_gpu_enable_triton_gemm", False),  # matrix products by cuBLAS
)

# CUDA graphs of whole loops, so that a condition does not wait for the host. On one H200 a step
# took 0.3505 s, but 0.365 s with XLA's default graphs and 0.367 s without graphs
# (docs/benchmarks.md).
GRAPHS = "xla_gpu_enable_command_buffer"
GRAPHED = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,WHILE,CONDITIONAL"


def flags_for(request: str, device: Any, *, has_loops: bool = True) -> Flags:
    """Return the compiler options of executor.xla_flags for an attached or described device.

    request: "auto": on NVIDIA GPUs, `GPU_FLAGS` and CUDA graphs, without options that XLA_FLAGS
    sets or this XLA does not know; on other devices (). "traced": the same without CUDA graphs,
    which hide tasks from profiles. "none": (). has_loops: whether the program runs tasks in loops;
    other programs need no graphs.
    """
    is_nvidia = device.platform in ("gpu", "cuda") and "NVIDIA" in device.device_kind
    if request == "none" or not is_nvidia:
        return ()
    of_user = names_in_xla_flags()
    graphs = GRAPHED if has_loops and request == "auto" else ""
    flags = *GPU_FLAGS, (GRAPHS, graphs)
    missing = ((name, value) for name, value in flags if name not in of_user)
    return tuple((name, value) for name, value in missing if _is_known(name, value))


def names_in_xla_flags() -> set[str]:
    """Return the names of the options in the environment variable XLA_FLAGS."""
    words = os.environ.get("XLA_FLAGS", "").split()
    return {word.partition("=")[0].lstrip("-") for word in words}


def add_to_xla_flags(*options: str) -> None:
    """Append options (--NAME=VALUE) to XLA_FLAGS, except those that it has by name already."""
    names = names_in_xla_flags()
    missing = [each for each in options if each.partition("=")[0].lstrip("-") not in names]
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *missing]).strip()


def text_of(flags: Flags) -> str:
    """Return the options in the form of XLA_FLAGS, without dashes."""
    text = lambda value: str(value).lower() if isinstance(value, bool) else value  # noqa: E731
    return " ".join(f"{name}={text(value)}" for name, value in flags)


def cpu_options(preset: CompilerPreset) -> dict[str, Any]:
    """Return a preset's options without those unknown to this jaxlib; {} except on CPUs."""
    if jax.default_backend() != "cpu":
        return {}
    ours = CPU_OPTIONS[preset]
    return {name: ours[name] for name in ours if name != EMITTERS or _is_known(name, False)}


def compiled_quickly(
    function: Callable[..., Any], preset: CompilerPreset = "once", **options: Any
) -> Callable[..., Any]:
    """Return the jitted function, compiled with a preset on CPUs, for programs that run rarely.

    options: arguments of `jax.jit`.
    """
    return jax.jit(function, compiler_options=cpu_options(preset), **options)


@cache
def _is_known(name: str, value: Value) -> bool:
    """Return whether XLA accepts an option; the default backend knows options of all backends."""
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
    """Return a program's bytes on one device: arguments, unaliased results and temporaries."""
    memory: Any = program.memory_analysis()
    made = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + made + memory.temp_size_in_bytes
