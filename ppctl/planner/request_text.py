"""A request as the lines of its plan name it."""

from dataclasses import dataclass
from typing import Self

from ppctl.schedule.mesh_axes import STAGE_AXES
from ppctl.training.pipeline.job import TrainingJob


@dataclass(frozen=True)
class RequestText:
    """The names of a request's parts."""

    model: str
    num_layers: int
    mesh: str  # as typed after mesh=
    axes: str  # with their sizes
    submesh: str  # of a rank
    stage_axes: tuple[str, ...]  # that divide stages
    num_microbatches: int
    executor: str

    @property
    def title(self) -> str:
        return f"{self.model} of {self.num_layers} layers, mesh {self.mesh}"

    @classmethod
    def of(cls, job: TrainingJob) -> Self:
        model, mesh = job.config.model, job.config.mesh
        return cls(
            model.name,
            job.pipe.stack.num_layers,
            mesh.text,
            mesh.axes_text,
            mesh.submesh_text,
            tuple(mesh.sizes.shown(STAGE_AXES)),
            job.config.schedule.num_microbatches,
            job.config.executor.name,
        )
