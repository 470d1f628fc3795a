"""Pipeline-parallel training in JAX.

    pipe = ppctl.pipeline(stack, mesh=ppctl.mesh(dp=2, pp=4), schedule="interleaved", num_chunks=2, num_microbatches=8,
                          batch=batch, optimizer=optax.adamw(1e-3))
    state = pipe.init(seed=0)
    state, metrics = pipe.step(state, batch)

Names are loaded when they are used: drawing a schedule starts no JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ppctl.errors import PpctlError
    from ppctl.model import parallel
    from ppctl.model.lora import Lora
    from ppctl.model.network import Network, stage_boundary
    from ppctl.model.stack import Stack, VocabularyParts
    from ppctl.reports.charts.draw import draw
    from ppctl.schedule.costs import Costs
    from ppctl.schedule.families.registry import build as build_schedule
    from ppctl.schedule.ir import Schedule, Task
    from ppctl.schedule.simulate import Timeline, simulate
    from ppctl.training.models import attention, mlp, transformer
    from ppctl.training.pipeline import Pipeline, pipeline
    from ppctl.training.saved_run import SavedRun, load_run
    from ppctl.training.start import mesh

__all__ = [
    "Costs",
    "Lora",
    "Network",
    "Pipeline",
    "PpctlError",
    "SavedRun",
    "Schedule",
    "Stack",
    "Task",
    "Timeline",
    "VocabularyParts",
    "attention",
    "build_schedule",
    "draw",
    "load_run",
    "mesh",
    "mlp",
    "parallel",
    "pipeline",
    "simulate",
    "stage_boundary",
    "transformer",
]

_HOMES = {
    "Costs": "schedule.costs",
    "Lora": "model.lora",
    "Network": "model.network",
    "Pipeline": "training.pipeline",
    "PpctlError": "errors",
    "SavedRun": "training.saved_run",
    "Schedule": "schedule.ir",
    "Stack": "model.stack",
    "Task": "schedule.ir",
    "Timeline": "schedule.simulate",
    "VocabularyParts": "model.stack",
    "attention": "training.models",
    "build_schedule": "schedule.families.registry:build",
    "draw": "reports.charts.draw",
    "load_run": "training.saved_run",
    "mesh": "training.start",
    "mlp": "training.models",
    "parallel": "model.parallel:",  # a module
    "pipeline": "training.pipeline",
    "simulate": "schedule.simulate",
    "stage_boundary": "model.network",
    "transformer": "training.models",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ppctl' has no attribute {name!r}")
    place, colon, attribute = _HOMES[name].partition(":")
    module = import_module(f"ppctl.{place}")
    return module if colon and not attribute else getattr(module, attribute or name)


def __dir__() -> list[str]:
    return sorted(__all__)
