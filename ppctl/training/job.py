"""From a config to a training job: data, model and pipeline.

What can be refused is refused here, cheapest check first, before anything is compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from ppctl import config as settings
from ppctl.config import Config
from ppctl.config.schedule_from_config import pipeline_of, trained_share
from ppctl.config.sources import Sources, sources
from ppctl.data import BUILDERS, DataSet
from ppctl.data.sizes import sized
from ppctl.executors.mesh import AXES, check_tp_of_hosts, make_mesh, repeated_mesh
from ppctl.executors.mpmd.tasks import Model
from ppctl.executors.reference import reference
from ppctl.executors.stage.flops import RelativeCosts, matmul_flops, relative_costs
from ppctl.executors.topology import check_gpu_shape, check_size, described_mesh
from ppctl.model.scoring import Scoring
from ppctl.model.stack import Stack, init
from ppctl.schedule import Schedule
from ppctl.schedule.costs import Costs, task_costs
from ppctl.schedule.families.registry import BASELINE, build
from ppctl.schedule.partition.partition import Partition, explicit, stages_text, uniform
from ppctl.schedule.remat import Remat
from ppctl.schedule.search.choice import Choice
from ppctl.schedule.search.ledger import Placed
from ppctl.schedule.ticks import Ticks
from ppctl.training import optim
from ppctl.training.auto_schedule import ModelCosts
from ppctl.training.gpu_memory import check_memory_fraction
from ppctl.training.known_hardware import described_device, gpu_names, gpu_target, host_devices, of_topology
from ppctl.training.models import make_stack
from ppctl.training.pipeline import Pipeline, pipeline
from ppctl.training.request import divided_stack
from ppctl.training.start import start_jax
from ppctl.training.user_code import custom_data

Tree = Any
DEFAULT_DTYPE = "float32"
UNEVEN_NOTICE = 1.25  # show even stages too where the largest costs more times the mean, as one with a large head does


@dataclass(frozen=True)
class TrainingJob:
    """A config's request, built: its data, and its model pipelined over its mesh."""

    config: Config
    data: DataSet
    pipe: Pipeline
    sources: Mapping[str, Sources]  # of the parts (model, data) that are code of the user's, as it was imported
    counted_stack: Stack | None = None  # the model as the hardware of the request runs it, where that is made already
    choice: Choice | None = None  # what schedule=auto chose its schedule from

    @property
    def num_eval_batches(self) -> int:
        """The batches of an evaluation. Those of run.eval_batches=null are at least one, which may be too many."""
        return num_eval_batches(self.config.run, self.data)

    @cached_property
    def counted_model(self) -> Model:
        """The model with the kernels that the hardware of the request takes, to be counted: it need not run here."""
        if self.counted_stack is not None:
            return self._counted(self.counted_stack)
        device, asked = self.pipe.mesh.devices.flat[0], self.config.hardware
        is_of_ours = isinstance(self.config.model, settings.Transformer)
        if not is_of_ours or isinstance(asked, settings.AutoHardware) or device.device_kind in asked.device_kinds:
            return self.pipe.model
        return self._counted(stack_for(asked, self.config, self.data, self.pipe.dtype, device))

    def _counted(self, stack: Stack) -> Model:
        model = self.pipe.model
        return replace(model, stack=divided_stack(stack, model.axes, self.pipe.batch_shapes))

    @cached_property
    def counted_device(self) -> Any:
        """A device as the hardware of the request has them, by which the kernels of `counted_model` are chosen."""
        device, asked = self.pipe.mesh.devices.flat[0], self.config.hardware
        if isinstance(asked, settings.AutoHardware) or device.device_kind in asked.device_kinds:
            return _device_of(self.config, device)
        return described_device(asked) or device


def num_eval_batches(run: settings.Run, data: DataSet) -> int:
    """Return the batches of an evaluation: those requested, or as many as are held out up to run.EVAL_BATCHES."""
    if run.eval_batches is not None:
        return run.eval_batches
    return max(1, min(run.EVAL_BATCHES, data.num_eval_examples // data.batch_size))


def stack_for(hardware: settings.Hardware, config: Config, data: DataSet, dtype: jnp.dtype, device: Any) -> Stack:
    """Return the model as devices of this hardware would run it; `device`, which is here, where it is none of those."""
    return make_stack(config, data, dtype, described_device(hardware) or device)


def _mesh_of(config: Config, *, on_one_device: bool) -> Mesh:
    """Return the mesh of a config: of devices here, or of a topology. ConfigError where these are not as many."""
    axes, order, topology = config.mesh.sizes, config.mesh.order, config.plan.topology
    if on_one_device:
        return repeated_mesh(*axes)
    if topology is None:
        return make_mesh(*axes, order=order)
    gpu = gpu_target(of_topology(config.hardware, topology))
    if not config.plan.only_predicts_topology:
        return described_mesh(axes, topology, gpu, gpu_names(), order)
    if gpu is not None:
        check_gpu_shape(topology, gpu.name)
    check_size(axes, topology, math.prod(config.plan.topology_shape))
    return repeated_mesh(*axes)  # for its shapes alone


def _device_of(config: Config, device: Any) -> Any:
    """Return the device that kernels are chosen by: one of a topology that is only predicted for, else `device`."""
    if not config.plan.only_predicts_topology or config.plan.topology is None:
        return device
    hardware = of_topology(config.hardware, config.plan.topology)
    return device if hardware is None else described_device(hardware) or device


def _check_hosts(config: Config) -> None:
    """Raise ConfigError where tp would go over several hosts of the hardware that is described."""
    hardware, number = config.hardware, config.mesh.num_devices
    of_host = host_devices(hardware, config.plan.topology) if isinstance(hardware, settings.Hardware) else None
    if of_host is not None and number > of_host:
        check_tp_of_hosts(dict(zip(AXES, config.mesh.sizes, strict=True)), config.mesh.order, number, of_host)


def assemble(
    config: Config, *, default_dtype: str = DEFAULT_DTYPE, on_one_device: bool = False, only_planned: bool = False
) -> TrainingJob:
    """Return the training job of a config. ConfigError, ScheduleError or DataError for what cannot be.

    only_planned: nothing of it trains here, so that settings may be of the hardware that hardware= describes.
    on_one_device: the first device here stands for all of the mesh; the job's shapes and programs of one device are
    those of the mesh, but it does not train.
    """
    is_auto = isinstance(config.schedule, settings.Auto) and config.executor.IS_PIPELINED
    by_costs = is_auto or (config.schedule.vocab == "parallel" and config.executor.DISPATCHES_TASKS)
    planned = None if by_costs else plan(config)
    _check_hosts(config)
    dtype_name = config.run.dtype or default_dtype
    start_jax(config, dtype_name, num_devices=1 if on_one_device else None)
    mesh = _mesh_of(config, on_one_device=on_one_device)
    device = _device_of(config, mesh.devices.flat[0])
    check_memory_fraction(config, device, only_planned=only_planned)
    data = open_data(config)
    dtype = jnp.dtype(dtype_name)
    optimizer, lr_schedule = make_optimizer(config)
    how = {key: value for key, value in asdict(config.executor).items() if key != "name"}
    stack = make_stack(config, data, dtype, device)
    pipelined = partial(
        pipeline,
        stack,
        mesh=mesh,
        batch=batch_shapes(data),
        optimizer=optimizer,
        executor=config.executor.name,
        dtype=dtype,
        clip_norm=config.optim.clip_norm,
        lr_schedule=lr_schedule,
        seed=config.run.seed,
        **how,
    )
    if planned is None and not is_auto:
        planned = plan(config, costs_of_parts(config, stack, data, dtype))
    planned = planned or plan_auto(config, pipelined)
    sizes = [len(layers) for layers in planned.partition] if isinstance(config.partition, settings.Explicit) else None
    pipe = pipelined(
        schedule=planned.schedule if planned.ticks is None else planned.ticks,
        partition=config.partition.name if sizes is None else sizes,
    )
    own = {part: getattr(config, part).target for part in ("model", "data") if getattr(config, part).name == "custom"}
    parts = {part: sources(target) for part, target in own.items()}
    return TrainingJob(config, data, pipe, parts, choice=planned.choice)


class Planned(NamedTuple):
    """What runs when, and where the layers are."""

    schedule: Schedule
    ticks: Ticks | None  # of executor=spmd
    partition: Partition
    choice: Choice | None  # of schedule=auto


def plan(config: Config, costs: Costs | None = None) -> Planned:
    """Return schedule, ticks and partition of a config. Neither JAX nor data is touched.

    With partition=balanced the partition is that of a model whose embedding and head cost nothing.
    costs: of tasks, by which ranks with programs of their own order those of parts of the vocabulary.
    """
    trained = trained_share(config.model, config.optim)
    of = None if costs is None else lambda rank_of: Placed(costs)
    found = pipeline_of(config.schedule, config.executor, config.mesh.pp, config.model.num_layers, trained, of)
    return Planned(found.schedule, found.ticks, divide(config, found.schedule.rank_of), None)


def costs_of_parts(config: Config, stack: Stack, data: DataSet, dtype: jnp.dtype) -> Costs:
    """Return the costs of tasks where every rank has a part of embedding and head, by FLOPs."""
    remat = Remat.of(config.executor.remat)
    costs = task_costs(remat, trained_share(config.model, config.optim))
    return relative_costs(stack, batch_shapes(data), dtype, recompute=remat.recomputes).with_parts(costs)


def plan_auto(config: Config, pipelined: Callable[..., Pipeline]) -> Planned:
    """Return the same for schedule=auto: by the costs of the model's stages, and what ranks hold of it.

    pipelined: makes the request's pipeline of a schedule and a partition.
    """
    pp, request = config.mesh.pp, config.schedule
    assert isinstance(request, settings.Auto), "other schedules follow from their settings"
    probe = pipelined(schedule=build(BASELINE, pp, request.num_microbatches), partition="balanced")
    costs = ModelCosts(
        probe, lambda rank_of: divide(config, rank_of, probe.relative_costs), may_split=request.split_backward
    )
    is_capped, in_ticks = request.max_memory_gib is not None, config.executor.IN_TICKS
    found = pipeline_of(
        request,
        config.executor,
        pp,
        config.model.num_layers,
        trained_share(config.model, config.optim),
        costs.layers(with_bytes=is_capped and not in_ticks).on,
        costs.in_ticks_bytes if is_capped and in_ticks else None,
    )
    partition = divide(config, found.schedule.rank_of, probe.relative_costs)
    return Planned(found.schedule, found.ticks, partition, found.choice)


def divide(config: Config, rank_of: Sequence[int], costs: RelativeCosts | None = None) -> Partition:
    """Return the layers of each stage; costs: for partition=balanced, None: equal layers, embedding and head free."""
    num_layers = config.model.num_layers
    if isinstance(config.partition, settings.Explicit):
        return explicit(num_layers, len(rank_of), config.partition.layers)
    if isinstance(config.partition, settings.Balanced):
        return (costs or RelativeCosts((1.0,) * num_layers, 0.0, 0.0)).balanced(rank_of)
    return uniform(num_layers, len(rank_of))


def partition_text(job: TrainingJob) -> str | None:
    """Return the layers of each stage and how even their costs are, in a line; None for the default and even stages."""
    name, pipe = job.config.partition.name, job.pipe
    partition, costs = pipe.partition, pipe.relative_costs

    def unevenness(partition: Partition) -> float:
        of_stages = costs.of_stages(partition)
        return max(of_stages) * len(of_stages) / sum(of_stages)

    text = f"largest stage {unevenness(partition):.2f} times the mean"
    if name == "uniform":
        if pipe.layout.is_even and unevenness(partition) <= UNEVEN_NOTICE:
            return None
        best = unevenness(costs.balanced(pipe.schedule.rank_of))
        text += f", {best:.2f} with partition=balanced" if best < unevenness(partition) else ""
    return (
        f"{stages_text([len(layers) for layers in partition])}; {name} (embedding {costs.embed:.1f}, "
        f"head {costs.head:.1f} times a layer; {text})"
    )


def batch_shapes(data: DataSet) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes and dtypes of a global batch, of which one example is read."""
    example = next(data.batches(rows=(0,)))
    shape = lambda a: jax.ShapeDtypeStruct((data.batch_size, *a.shape[1:]), a.dtype)  # noqa: E731
    return {name: shape(example[name]) for name in ("inputs", "targets")}


def make_optimizer(config: Config) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Return the optimizer that the config asks for, without its clipping, and its learning rates."""
    given = asdict(config.optim)
    schedule_settings = {key: given.pop(key) for key in ("lr", "min_lr_fraction", "warmup_steps")}
    lr_schedule = optim.lr_schedule(**schedule_settings, num_steps=config.run.num_steps)
    for key in ("clip_norm", "train", "lora_rank", "lora_alpha", "lora_targets"):
        del given[key]
    return optim.OPTIMIZERS[given.pop("name")](lr_schedule, **given), lr_schedule


def open_data(config: Config, *, sizes_only: bool = False) -> DataSet:
    """Return the data set that the config names; sizes_only: made as quickly as its sizes can be known."""
    given = {**asdict(config.data), "seed": config.run.seed}
    name = given.pop("name")
    if name not in ("regression", "custom"):
        assert not isinstance(config.model, settings.MLP), "config.check refuses text for an MLP"
        given["seq_len"] = config.model.seq_len
    if name == "custom":
        return custom_data(**given)
    return sized(name, **given) if sizes_only else BUILDERS[name](**given)


@dataclass(frozen=True)
class ModelFlops:
    """FLOPs of the model in one step: matrix products of a forward and its backward, nothing recomputed."""

    full: int  # each token attends to all of its sequence, as most publications count
    causal: int  # each token attends to itself and those before it in its window: all that a kernel need compute


def model_flops(job: TrainingJob) -> ModelFlops:
    """Return the FLOPs of a step, the same whatever computes attention: counted in its plain form."""
    pipe, model = job.pipe, job.config.model
    stack, masked = pipe.stack, 0
    if isinstance(model, settings.Transformer):
        if model.attention != "xla":
            plain = replace(job.config, model=replace(model, attention="xla"))
            stack = make_stack(plain, job.data, pipe.dtype, pipe.mesh.devices.flat[0])
        num_examples, num_tokens = pipe.batch_shapes["inputs"].shape
        pairs = sum(num_tokens**2 - Scoring(window=window).num_pairs(num_tokens) for window in model.windows)
        # scores and their product with values: 4 FLOPs a pair of tokens and unit of width, twice as many backward
        masked = 12 * num_examples * model.num_heads * model.head_width * pairs
    loss_and_grads = reference(stack, num_microbatches=1, remat="none", unroll=0, dtype=pipe.dtype)
    params = jax.eval_shape(lambda: init(stack, 0))
    full = matmul_flops(loss_and_grads, params, pipe.batch_shapes)
    return ModelFlops(full, full - masked)


def state_bytes(job: TrainingJob) -> int:
    """Return the bytes of a whole state, as a checkpoint of it takes: parameters and what the optimizer keeps."""
    return sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(job.pipe.states.natural))


def unit_of_work(job: TrainingJob) -> tuple[str, int]:
    """Return the metric of speed, and the units of work of a step: tokens of text, examples of all else."""
    inputs = job.pipe.batch_shapes["inputs"].shape
    is_text = job.data.vocab_size is not None
    return ("tokens_per_s", math.prod(inputs)) if is_text else ("rows_per_s", inputs[0])


def without_pipeline(config: Config) -> Config:
    """Return the same request for the reference executor: one device, the same model, data and microbatches."""
    executor = settings.Reference(unroll=config.executor.unroll)
    return replace(config, mesh=settings.Mesh(), partition=settings.Uniform(), executor=executor)
