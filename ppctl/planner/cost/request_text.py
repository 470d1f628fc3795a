"""A request in the words of plans and rehearsals, and the message of a device that is too small."""

from dataclasses import dataclass
from typing import Self

from ppctl.schedule.mesh_axes import STAGE_AXES
from ppctl.training.pipeline.job import TrainingJob


@dataclass(frozen=True)
class RequestText:
    """The parts of a request that a plan prints."""

    model: str
    num_layers: int
    mesh: str  # text after mesh=
    axes: str  # axes with their sizes
    stage_axes: tuple[str, ...]  # axes that divide stages
    num_microbatches: int
    executor: str
    dtype: str  # compute dtype
    batch_size: int  # examples a step
    seq_len: int | None  # tokens an example; None: the data are not text

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
            tuple(mesh.sizes.shown(STAGE_AXES)),
            job.config.schedule.num_microbatches,
            job.config.executor.name,
            str(job.pipe.dtype),
            job.data.batch_size,
            None if job.data.vocab_size is None else job.pipe.batch_shapes["inputs"].shape[1],
        )

    @property
    def sizes(self) -> str:
        """Return the compute dtype, the batch and its sequence length as text."""
        return sizes_text(self.dtype, self.batch_size, self.seq_len)


def sizes_text(dtype: str, batch_size: int, seq_len: int | None) -> str:
    """Return the compute dtype, the batch and its sequence length as text.

    >>> sizes_text("bfloat16", 128, 2048)
    'bfloat16 compute, batch of 128 sequences of 2,048 tokens'
    """
    of_what = "rows" if seq_len is None else f"sequences of {seq_len:,} tokens"
    return f"{dtype} compute, batch of {batch_size:,} {of_what}"


def out_of_memory(error: Exception) -> str | None:
    """Return the out-of-memory message of a compiler or device; None for other errors."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        return None
    return " ".join(str(error).split("\n")[0].split()).removeprefix("RESOURCE_EXHAUSTED: ")
