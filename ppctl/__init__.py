"""Pipeline-parallel training in JAX.

    pipe = ppctl.pipeline(stack, mesh=ppctl.mesh(dp=2, pp=4), schedule="interleaved", num_chunks=2,
                          num_microbatches=8, batch=batch, optimizer=optax.adamw(1e-3))
    state = pipe.init(seed=0)
    state, metrics = pipe.step(state, batch)

Names are loaded on first use: drawing a schedule does not import JAX.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ppctl.schedule.ir import Schedule, Task

if TYPE_CHECKING:
    from ppctl.config.schedule_from_config import read as read_schedule
    from ppctl.errors import PpctlError
    from ppctl.model import flax_modules as flax, parallel
    from ppctl.model.layer_inputs import attach_loss
    from ppctl.model.layer_reports import report
    from ppctl.model.lora import Lora
    from ppctl.model.network import Network, stage_boundary
    from ppctl.model.random_keys import dropout
    from ppctl.model.stack import DividedStack, Stack, StackOptions, VocabularyParts
    from ppctl.planner.cost.predict_step import PipelinePlan, plan
    from ppctl.planner.search.tune_pipeline import TunedLayout, tune
    from ppctl.reports.charts.draw_schedule import draw
    from ppctl.schedule.costs import Costs
    from ppctl.schedule.families.registry import build as build_schedule, family
    from ppctl.schedule.simulator import Timeline, simulate
    from ppctl.schedule.tick_lowering import Ticks, ticks
    from ppctl.training.pipeline.build_pipeline import pipeline
    from ppctl.training.pipeline.built_in_models import attention, mlp, transformer
    from ppctl.training.pipeline.execution import mpmd, reference, spmd
    from ppctl.training.pipeline.jax_start import mesh
    from ppctl.training.pipeline.pipeline import Pipeline
    from ppctl.training.run.saved_run import SavedRun, load_run
    from ppctl.training.verification.verify_pipeline import Verification, verify

__all__ = [
    "Costs",
    "DividedStack",
    "Lora",
    "Network",
    "Pipeline",
    "PipelinePlan",
    "PpctlError",
    "SavedRun",
    "Schedule",
    "Stack",
    "StackOptions",
    "Task",
    "Ticks",
    "Timeline",
    "TunedLayout",
    "Verification",
    "VocabularyParts",
    "attach_loss",
    "attention",
    "build_schedule",
    "draw",
    "dropout",
    "family",
    "flax",
    "load_run",
    "mesh",
    "mlp",
    "mpmd",
    "parallel",
    "pipeline",
    "plan",
    "read_schedule",
    "reference",
    "report",
    "simulate",
    "spmd",
    "stage_boundary",
    "ticks",
    "transformer",
    "tune",
    "verify",
]

_HOMES = {  # public names by module
    "errors": "PpctlError",
    "model.layer_inputs": "attach_loss",
    "model.layer_reports": "report",
    "model.lora": "Lora",
    "model.network": "Network stage_boundary",
    "model.random_keys": "dropout",
    "model.stack": "DividedStack Stack StackOptions VocabularyParts",
    "planner.cost.predict_step": "PipelinePlan plan",
    "planner.search.tune_pipeline": "TunedLayout tune",
    "reports.charts.draw_schedule": "draw",
    "schedule.costs": "Costs",
    "schedule.families.registry": "family",
    "schedule.simulator": "Timeline simulate",
    "schedule.tick_lowering": "Ticks ticks",
    "training.pipeline.build_pipeline": "pipeline",
    "training.pipeline.built_in_models": "attention mlp transformer",
    "training.pipeline.execution": "mpmd reference spmd",
    "training.pipeline.jax_start": "mesh",
    "training.pipeline.pipeline": "Pipeline",
    "training.verification.verify_pipeline": "Verification verify",
    "training.run.saved_run": "SavedRun load_run",
}
_MODULES = {"flax": "flax_modules", "parallel": "parallel"}  # public modules by name
_RENAMED = {  # public names that differ from the names inside ppctl
    "build_schedule": "schedule.families.registry.build",
    "read_schedule": "config.schedule_from_config.read",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"ppctl.model.{_MODULES[name]}")
    if name in _RENAMED:
        module, _, inside = _RENAMED[name].rpartition(".")
        return getattr(import_module(f"ppctl.{module}"), inside)
    for module, names in _HOMES.items():
        if name in names.split():
            return getattr(import_module(f"ppctl.{module}"), name)
    raise AttributeError(f"module 'ppctl' has no attribute {name!r}")


def _html_of(schedule: Schedule) -> str:
    return import_module("ppctl.reports.charts.draw_schedule").schedule_html(schedule)


Schedule.html = staticmethod(_html_of)  # set here, because ppctl.schedule must not import reports


def __dir__() -> list[str]:
    return sorted(__all__)
