"""A planned step of given work and sizes."""

from ppctl.executors.work.planned_step import Microbatch, Step
from ppctl.schedule.remat import Remat


def planned_step(work, params, machine, layout, *, examples=1, number=1, remat="none", **how):
    """A `Step` with microbatches of `examples` examples, of a byte each."""
    microbatch = Microbatch(examples, number, 1, Remat.of(remat))
    return Step(work, params, layout, microbatch, machine, **how)
