"""Presets of the compiler, from full optimization to none, and the memory of a compiled program.

On CPU most of a compile is a fixed cost for each fused kernel (MLIR contexts, LLVM's passes). A program that runs once
a step can do without most of it; so can one that never runs, being compiled for the memory that it would take. Seen of
XLA (jax 0.10.2, 27 requests: all executors, remat settings and dtypes, 1 to 16 layers a stage): buffers are planned
before code is generated, so that without optimization of the code the plan is the same to the byte, for 0.6 of the CPU
seconds; without MLIR's emitters too it is the same within 0.01%, for 0.2 to 0.7 of them.

Tried and rejected, for memory: live values of the jaxpr, element-wise work counted as fused (total +4% with remat=none,
-9% with layer, -18% with full, -25% in bfloat16, which CPUs widen). A whole step with 2 and with 3 layers a stage, and
the line through both: within 1% for spmd (bytes grow evenly from the second layer on), but two compiles cost as much
as the whole of 16 layers; with mpmd up to 6% too little.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import jax

CompilerPreset = Literal["full", "quick", "once"]  # once: for what runs once a step, or is compiled for its memory only

# In mpmd, where every rank pays for its own programs. Bench model, jax 0.10.2, step over the reference's, compile over
# spmd's, CPU s:
#   all at XLA's own options            step 0.97, compile 2.10
#   once: what runs once a step         step 1.03, compile 1.85
#   and quick: tasks                    step 1.03 to 1.11, compile 1.26 to 1.54, median 1.4
#   and quick: tasks that recompute     step 1.24 (1.14 before) with remat=full, 1.30 (1.18) with layer: not done
# Rejected: finish as `once` (copies all gradients in 10 ms, not 5); level 0 for tasks (F takes 55 ms, not 34); level 1
# or 2 for them (no gain), xla_cpu_opt_preset, xla_llvm_disable_expensive_passes, xla_cpu_prefer_vector_width (none),
# xla_disable_hlo_passes=fusion (2.4 times as long).
CPU_OPTIONS: dict[CompilerPreset, dict[str, Any]] = {
    "full": {},
    "quick": {"xla_cpu_use_fusion_emitters": False, "xla_cpu_parallel_codegen_split_count": 1},  # one LLVM module
    "once": {
        "xla_cpu_use_fusion_emitters": False,
        "xla_cpu_parallel_codegen_split_count": 1,
        "xla_backend_optimization_level": 0,
    },
}
NOT_EVERYWHERE = "xla_cpu_use_fusion_emitters"  # newer compilers (jaxlib 0.12) have MLIR's emitters alone


def cpu_options(preset: CompilerPreset) -> dict[str, Any]:
    """Return the preset's options of XLA's CPU compiler, of those that it has."""
    ours = CPU_OPTIONS[preset]
    return {name: ours[name] for name in ours if name != NOT_EVERYWHERE or _is_known(name)}


@cache
def _is_known(option: str) -> bool:
    """Return whether the compiler of this jaxlib has an option that is true or false."""
    try:
        jax.jit(lambda: 0).lower().compile({option: False})
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return False
    return True


def temp_bytes(program: jax.stages.Compiled) -> int:
    """Return the bytes of one device that a program needs in addition to its arguments and results."""
    memory = program.memory_analysis()
    assert memory is not None, "every backend of ours reports memory"
    return memory.temp_size_in_bytes


def total_bytes(program: jax.stages.Compiled) -> int:
    """Return the bytes of one device of a program: arguments, results that are not in their memory, temporaries."""
    memory = program.memory_analysis()
    assert memory is not None, "every backend of ours reports memory"
    made = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + made + memory.temp_size_in_bytes
