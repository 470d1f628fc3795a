"""Predicted seconds of a step: its pieces, its tasks, and its ticks or free-running ranks.

A rehearsal measures the tasks, and takes only `exchange_s` from this file. Standard library only.
"""

from dataclasses import dataclass, replace
from math import inf

from ppctl.executors.work.planned_step import Step
from ppctl.executors.work.roofline import Op, PieceWork
from ppctl.schedule.costs import Costs, LayerGathers, OpTimes, PieceTimes
from ppctl.schedule.ir import Schedule
from ppctl.schedule.lockstep_ticks import Counted, rows_s
from ppctl.schedule.lower_bounds import rank_work_s
from ppctl.schedule.simulator import free_running, together_s


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step: tasks with their bubble, and per-step overhead."""

    pipeline_s: float
    overhead_s: float
    tasks_s: float  # device-seconds of all tasks, each at a device's full speed
    width: float  # number of devices that can work at full speed at the same time

    @property
    def total_s(self) -> float:
        return self.pipeline_s + self.overhead_s

    @property
    def bubble_fraction(self) -> float:
        """Return the share of the devices' joint capacity that tasks leave unused, 0..1."""
        return max(0.0, 1 - self.tasks_s / (self.pipeline_s * self.width))


def step_time(
    op_times: OpTimes, schedule: Schedule, counted: Counted | None, costs: Costs, copies: int
) -> StepTime:
    """Return the time of a step. copies: number of a rank's devices, which run the same tasks.

    counted: the phases of ticks; a phase lasts as long as its slowest rank, plus a hop. None: ranks
    run freely. The bubble is the unused share of the ranks' joint `capacity`. With full speed for
    every rank this is their idle share.
    """
    tasks_s = sum(rank_work_s(schedule, costs))
    capacity, hop_s = op_times.capacity / copies, costs.transfer_s
    if counted is None:
        pipeline_s = free_running(schedule, costs, capacity).makespan_s
    else:
        rows = rows_s(counted, costs, schedule.num_chunks)
        pipeline_s = sum(n * together_s([s + hop_s for s in row], capacity) for row, n in rows)
    width = min(schedule.num_ranks, capacity) * copies
    return StepTime(pipeline_s, op_times.overhead_s, tasks_s * copies, width)


def op_times(step: Step) -> OpTimes:
    """Return the seconds of a step's pieces, transfers and overhead."""
    # 1. pieces
    machine, examples, layer = step.known_machine, step.microbatch.examples, step.work.layer
    speed = replace(machine.speed, adds=step.adds_in_place(step.layout.rank_layers))

    def seconds(piece: PieceWork, again: tuple[Op, ...] = ()) -> PieceTimes:
        parts = piece.forward, (*again, *piece.input_grad), piece.weight_grad
        f, i, w = ((speed.seconds(ops, examples), sum(map(step.sent_s, ops))) for ops in parts)
        # products wait for collectives, except in W, whose gathers may overlap other products
        return PieceTimes(sum(f), sum(i), max(w) if machine.gathers_ahead else sum(w))

    remat, again = step.microbatch.remat, ()
    # remat=full recomputes whole forwards, because it keeps only the input of the stage
    if remat.recomputes:
        again = layer.forward if layer.redo is None or remat.keeps_input_only else layer.redo

    # 2. transfers, gathers and per-step overhead
    ranks, x_bytes = step.ring(("pp",)), examples * step.work.x_bytes
    (link, size), gathers = step.ring(("fsdp",)), None
    if step.gather == "layer" and size > 1:
        layer_s = link.gather_s(step.params.gathered_layer, size)
        is_scanned = step.layout.rank_layers > step.unroll
        gathers = LayerGathers(layer_s, machine.gathers_ahead, once_more=is_scanned)
    times = OpTimes(
        embed=seconds(step.work.embed),
        layer=seconds(layer, again),
        head=seconds(step.work.head),
        task_s=machine.task_s,
        hop_s=ranks.link.hop_s(x_bytes) if ranks.size > 1 else 0.0,
        overhead_s=overhead_s(step),
        capacity=inf if machine.cores is None else float(machine.cores),
        gathers=gathers,
    )
    return times.in_parts(step.layout.vocab_parts) if step.layout.vocab_parts else times


def overhead_s(step: Step) -> float:
    """Return the seconds of per-step overhead: `exchange_s` and the optimizer."""
    # 1. read and write parameters and moments; read gradients twice, once for their norm
    update = step.trained_bytes * (2 * (1 + step.params.moments) + 2)
    seconds = exchange_s(step) + update / step.known_machine.speed.bytes_per_s
    if not step.params.update_flops:
        return seconds
    # 2. optimizers of whole matrices: each device of a rank gathers and updates all its matrices
    num_layers = step.layout.rank_layers
    for axes in (("fsdp",), ("ep", "tp")):
        link, size = step.ring(axes)
        seconds += link.gather_s(num_layers * step.params.trained_layer, size)
    return seconds + num_layers * step.params.update_flops / step.known_machine.speed.flops_per_s


def exchange_s(step: Step) -> float:
    """Return the seconds to cast and gather parameters, and to sum gradients over replicas.

    Parameters travel in the compute dtype, gradients in the dtype of the parameters. Embedding and
    head are divided over pp and fsdp (a part of a divided vocabulary over fsdp), a rank's layers
    over fsdp. The collectives of all arrays count as one, because compilers combine them.
    """
    # 1. all-gathers of parameters, reduce-scatters of gradients
    params, layout = step.params, step.layout
    layers, embed_head = layout.rank_layers * params.layer, params.embed_head

    def moved_s(axes: tuple[str, ...], there: float | None, back: float) -> float:
        link, size = step.ring(axes)
        there_s = 0.0 if there is None else link.gather_s(there, size)
        return there_s + (link.gather_s(back, size) if back else 0.0)

    gathered = layout.rank_layers * params.gathered_layer if step.gather == "step" else None
    trained = layout.rank_layers * params.trained_layer
    seconds = moved_s(("fsdp",), gathered, trained)
    seconds += moved_s(
        layout.embed_head_axes, embed_head * params.compute_ratio, params.trained_embed_head
    )

    # 2. sums over replicas, and casts
    sum_s = sum(ring.link.sum_s(each, ring.size) for ring, each in step.summed_bytes)
    copied = layers / layout.mesh.fsdp if step.gather == "layer" else layers
    cast = step.casts * (copied + embed_head) * (1 + params.compute_ratio)
    return seconds + sum_s + cast / step.known_machine.speed.bytes_per_s
