"""The work and the sizes of a pipeline's step, counted from its model."""

from dataclasses import replace

from ppctl.config import Hardware
from ppctl.executors.model_shapes import Model, tree_bytes
from ppctl.executors.work.parameter_bytes import param_bytes
from ppctl.executors.work.planned_step import Machine, Microbatch, PlannedLayout, Step
from ppctl.executors.work.task_flops import work_of
from ppctl.model.stack import Stack
from ppctl.training.pipeline.known_hardware import described_device
from ppctl.training.pipeline.layer_optimizers import LayerOptimizer
from ppctl.training.pipeline.pipeline import Pipeline
from ppctl.training.pipeline.pipeline_request import divided_stack


def model_on(
    pipe: Pipeline, hardware: Hardware | None, stack: Stack | None = None, imbalance: float = 1.0
) -> Model:
    """Return a pipeline's model on one device, with the kernels of `hardware`.

    hardware: None for the hardware of the mesh. stack: the model with those kernels, if already
    made. imbalance: as in `StackOptions.counted`.
    """
    if stack is None:
        stack, on_device = pipe.stack, pipe.stack.options.on_device
        if hardware is not None and on_device is not None:
            stack = on_device(described_device(hardware) or pipe.meshes.device)
        stack = stack.counted(imbalance)
        if stack is pipe.stack:
            return pipe.model
    divided = divided_stack(stack, pipe.model.axes, pipe.batch_shapes)
    return replace(pipe.model, stack=stack.in_shards(divided), parts=divided.parts)


def pipeline_step(
    pipe: Pipeline, counted: Model, machine: Machine | None = None, *, adds: bool = False
) -> Step:
    """Return the step of a pipeline.

    counted: its model with the kernels to count. machine, adds: as in `Step`.
    """
    execution, model, schedule = pipe.execution, pipe.model, pipe.schedule
    examples, number = model.microbatch["inputs"].shape[0], schedule.num_microbatches
    example_bytes = tree_bytes(model.microbatch) // examples
    sizes = [len(layers) for layers in pipe.partition]
    largest = execution.engine.rank_layers(sizes, schedule.rank_of)
    # executor=reference adds whole gradients after each microbatch, and casts parameters before it
    is_alone = not execution.engine.is_pipelined
    optimizer = pipe.optimizer
    flops = optimizer.layer_flops if isinstance(optimizer, LayerOptimizer) else 0
    return Step(
        work_of(counted),
        param_bytes(pipe.states.natural, model, pipe.layout.of_rank.shards, flops),
        PlannedLayout(pipe.meshes.sizes, largest, max(sizes), schedule.vocab_parts),
        Microbatch(examples, number, example_bytes, execution.remat),
        machine,
        execution.gather,
        execution.unroll,
        adds=adds and not is_alone,
        casts=number if is_alone else 1,
    )
