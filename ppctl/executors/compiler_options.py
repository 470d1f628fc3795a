"""Compiler presets for programs that run rarely or never, and the memory of compiled programs.

docs/executors-internals.md, "Compiler presets on CPU", has their measurements.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import jax

CompilerPreset = Literal["full", "quick", "once"]  # once: runs once a step

EMITTERS = "xla_cpu_use_fusion_emitters"  # jaxlib 0.12 has only MLIR's emitters
ONE_MODULE = {EMITTERS: False, "xla_cpu_parallel_codegen_split_count": 1}  # one LLVM module
CPU_OPTIONS: dict[CompilerPreset, dict[str, Any]] = {
    "full": {},
    "quick": ONE_MODULE,
    "once": {**ONE_MODULE, "xla_backend_optimization_level": 0},
}


def cpu_options(preset: CompilerPreset) -> dict[str, Any]:
    """Return the options of XLA's CPU compiler for a preset, those that this jaxlib has."""
    ours = CPU_OPTIONS[preset]
    return {name: ours[name] for name in ours if name != EMITTERS or _is_known(name)}


@cache
def _is_known(option: str) -> bool:
    """Return whether the compiler of this jaxlib has a boolean option."""
    try:
        jax.jit(lambda: 0).lower().compile({option: False})
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return False
    return True


def temp_bytes(program: jax.stages.Compiled) -> int:
    """Return a program's temporary bytes on one device, without its arguments and results."""
    memory = program.memory_analysis()
    assert memory is not None, "every backend of ours reports memory"
    return memory.temp_size_in_bytes


def total_bytes(program: jax.stages.Compiled) -> int:
    """Return a program's bytes on one device: arguments, unshared results, temporaries."""
    memory = program.memory_analysis()
    assert memory is not None, "every backend of ours reports memory"
    made = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + made + memory.temp_size_in_bytes
