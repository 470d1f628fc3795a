"""From a config to the parts of a run: schedule, mesh, data, model, executor, optimizer, state.

What can be refused is refused here, cheapest check first, before anything is compiled.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from ppctl import config as config_module
from ppctl.config import Config
from ppctl.config.schedule_from_config import pipeline_of
from ppctl.data import BUILDERS, DataSet
from ppctl.errors import ConfigError
from ppctl.executors.layout import Layout
from ppctl.executors.mesh import make_mesh
from ppctl.executors.mpmd.tasks import Model
from ppctl.executors.reference import reference
from ppctl.executors.spmd.program import Options, spmd
from ppctl.executors.stage.flops import RelativeCosts, matmul_flops, relative_costs
from ppctl.executors.topology import described_mesh
from ppctl.launch import distributed, xla_stderr
from ppctl.model.mlp import mlp
from ppctl.model.stack import Stack, init
from ppctl.model.transformer import transformer
from ppctl.schedule import Schedule
from ppctl.schedule.costs import task_costs
from ppctl.schedule.ir import Task
from ppctl.schedule.partition.partition import Partition, explicit, uniform
from ppctl.schedule.remat import Remat
from ppctl.schedule.simulate import simulate
from ppctl.schedule.ticks import Ticks, forward_only, ticks
from ppctl.training import optim
from ppctl.training.engines import Engine
from ppctl.training.engines.mpmd import Mpmd
from ppctl.training.engines.one_program import OneProgram
from ppctl.training.engines.post_validation import PostValidated
from ppctl.training.engines.states import States
from ppctl.training.known_hardware import gpu_names, gpu_target, of_topology
from ppctl.training.train_step import init_state
from ppctl.training.user_code import custom_data, custom_stack

Tree = Any
DEFAULT_DTYPE = "float32"
UNEVEN_NOTICE = 1.25  # show even stages too where the largest costs more times the mean, as one with a large head does
CPU_FLAGS = (  # XLA aborts the process when one simulated device is 40 s late at a collective, as on a busy machine
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    "--xla_cpu_collective_timeout_seconds=600",
)


@dataclass
class Parts:
    """Everything a command needs, built from one config."""

    config: Config
    dtype: jnp.dtype  # of compute
    data: DataSet
    stack: Stack
    mesh: Mesh
    schedule: Schedule
    ticks: Ticks | None  # of executor=spmd
    states: States
    optimizer: optax.GradientTransformation
    lr_schedule: optax.Schedule
    engine: Engine = field(init=False)  # made at once: it refuses what its executor cannot do

    def __post_init__(self) -> None:
        if self.config.executor.name != "reference":
            _check_split(self)
        self.engine = _mpmd(self) if self.config.executor.name == "mpmd" else _one_program(self)

    @cached_property
    def batch_shapes(self) -> Tree:
        """Shapes and dtypes of a global batch."""
        return _batch_shapes(self.data)

    @cached_property
    def model(self) -> Model:
        """The model as the tasks of one device see it."""
        params, mesh, executor = self.states.natural["params"], self.config.mesh, self.config.executor
        m = self.schedule.num_microbatches
        layer = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape[1:], a.dtype), params["layers"])
        rows = self.config.data.batch_size // (mesh.dp * mesh.fsdp * m)
        microbatch = jax.tree.map(lambda a: jax.ShapeDtypeStruct((rows, *a.shape[1:]), a.dtype), self.batch_shapes)
        ends = params["ends"]
        return Model(self.stack, ends, layer, microbatch, m, Remat.of(executor.remat), executor.unroll, self.dtype)

    @property
    def bubble_fraction(self) -> float | None:
        """Idle share of all ranks that the schedule predicts for this executor, 0..1; None without a pipeline."""
        costs = task_costs(self.config.executor.remat)
        if self.config.executor.name == "reference":
            return None
        return (
            simulate(self.schedule, costs).bubble_fraction if self.ticks is None else self.ticks.bubble_fraction(costs)
        )


def plan(config: Config) -> tuple[Schedule, Ticks | None, Partition]:
    """Schedule, ticks (of executor=spmd) and partition of a config. Neither JAX nor data is touched.

    With partition=balanced the partition is that of a model whose embedding and head cost nothing.
    """
    found = pipeline_of(config.schedule, config.executor, config.mesh.pp, config.model.num_layers)
    return found.schedule, found.ticks, divide(config, found.schedule)


def divide(config: Config, schedule: Schedule, costs: RelativeCosts | None = None) -> Partition:
    """The layers of each stage. costs: what partition=balanced is to count; None: equal layers and no ends."""
    num_layers = config.model.num_layers
    if config.partition.name == "explicit":
        return explicit(num_layers, schedule.num_stages, config.partition.layers)
    if config.partition.name == "balanced":
        return (costs or RelativeCosts((1.0,) * num_layers, 0.0, 0.0)).balanced(schedule.rank_of)
    return uniform(num_layers, schedule.num_stages)


def partition_text(parts: Parts) -> str | None:
    """The layers of each stage and how even their costs are, in a line; None for even stages nobody asked for."""
    name, partition = parts.config.partition.name, parts.states.layout.partition
    pieces = relative_costs_of(parts.config, parts.stack, parts.data)

    def unevenness(partition: Partition) -> float:
        costs = pieces.of_stages(partition)
        return max(costs) * len(costs) / sum(costs)

    text = f"largest stage {unevenness(partition):.2f} times the mean"
    if name == "uniform":
        if parts.states.layout.is_even and unevenness(partition) <= UNEVEN_NOTICE:
            return None
        best = unevenness(pieces.balanced(parts.schedule.rank_of))
        text += f", {best:.2f} with partition=balanced" if best < unevenness(partition) else ""
    return (
        f"{' '.join(str(len(layers)) for layers in partition)} layers ({name}; embedding worth {pieces.embed:.1f}, "
        f"head {pieces.head:.1f} layers; {text})"
    )


def relative_costs_of(config: Config, stack: Stack, data: DataSet) -> RelativeCosts:
    """What the pieces of the model cost, in layers."""
    return relative_costs(stack, _batch_shapes(data), recompute=Remat.of(config.executor.remat).recomputes)


def _batch_shapes(data: DataSet) -> Tree:
    """Shapes and dtypes of a global batch, of which one row is read."""
    row = next(data.batches(rows=(0,)))
    return {name: jax.ShapeDtypeStruct((data.batch_size, *a.shape[1:]), a.dtype) for name, a in row.items()}


def start_jax(config: Config, dtype: str) -> None:
    """Nothing; sets what JAX reads when it first looks for devices, and joins the other processes of the run, if any.

    Simulated CPU devices follow from the mesh.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    missing = [flag for flag in CPU_FLAGS if flag.split("=")[0] not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *missing]).strip()
    is_away = config.plan.topology is not None  # no device of this machine's is used then
    platform = config.run.platform or ("cpu" if is_away else None)
    if platform is not None:
        jax.config.update("jax_platforms", platform)
    if dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    if config.run.distributed != "off":
        _join(config)
        return
    if is_away:
        return
    simulated: int = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue] made at run time
    if simulated < config.mesh.num_devices:
        # where JAX has started already, in a program of the user's, make_mesh counts what is there
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", config.mesh.num_devices)


def _join(config: Config) -> None:
    """Nothing; joins the other processes, each with its share of simulated devices (at least one, to be heard)."""
    run = config.run
    if distributed.is_joined():
        return
    if run.platform in (None, "cpu"):
        count = distributed.known_count(run.num_processes, is_cpu=run.platform == "cpu")
        if count is not None:
            jax.config.update("jax_num_cpu_devices", max(1, config.mesh.num_devices // count))
    name = f"on {socket.gethostname()}" if run.process_id is None else run.process_id
    xla_stderr.divert(name)
    distributed.join(run.coordinator, run.num_processes, run.process_id, join_s=run.join_s, heartbeat_s=run.heartbeat_s)


def assemble(config: Config, *, default_dtype: str = DEFAULT_DTYPE) -> Parts:
    """The parts of a run. ConfigError, ScheduleError or DataError for what cannot be."""
    schedule, lowered, partition = plan(config)
    dtype_name = config.run.dtype or default_dtype
    start_jax(config, dtype_name)
    sizes = config.mesh.dp, config.mesh.pp, config.mesh.fsdp
    topology = config.plan.topology
    if topology is None:
        mesh = make_mesh(*sizes)
    else:
        gpu = gpu_target(of_topology(config.hardware, topology))
        mesh = described_mesh(*sizes, topology, gpu, gpu_names())
    data = open_data(config)
    dtype = jnp.dtype(dtype_name)
    stack = make_stack(config, data, dtype)
    if config.partition.name == "balanced":
        partition = divide(config, schedule, relative_costs_of(config, stack, data))
    layout = Layout(mesh, partition, schedule.rank_of)
    optimizer, lr_schedule = make_optimizer(config)
    states = States(layout, lambda: init_state(init(stack, config.run.seed), optimizer))
    return Parts(config, dtype, data, stack, mesh, schedule, lowered, states, optimizer, lr_schedule)


def make_optimizer(config: Config) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """The optimizer that the config asks for, and its learning rates."""
    settings = asdict(config.optim)
    schedule_settings = {key: settings.pop(key) for key in ("lr", "min_lr_fraction", "warmup_steps")}
    lr_schedule = optim.lr_schedule(**schedule_settings, num_steps=config.run.num_steps)
    return optim.OPTIMIZERS[settings.pop("name")](lr_schedule, **settings), lr_schedule


def open_data(config: Config) -> DataSet:
    """The data set that the config names."""
    settings = {**asdict(config.data), "seed": config.run.seed}
    name = settings.pop("name")
    if name not in ("regression", "custom"):
        settings["seq_len"] = config.model.seq_len
    return custom_data(**settings) if name == "custom" else BUILDERS[name](**settings)


def make_stack(config: Config, data: DataSet, compute: jnp.dtype) -> Stack:
    """The model that the config names, of the size that the data needs. `compute` is the dtype of compute."""
    dtype = jnp.promote_types(compute, jnp.float32)  # of parameters
    settings = asdict(config.model)
    name = settings.pop("name")
    if name == "custom":
        settings.pop("seq_len")
        return custom_stack(**settings, data=data, dtype=dtype, compute=compute)
    if name == "mlp":
        input_dim, target_dim = data.input_dim, data.target_dim
        if input_dim is None or target_dim is None:
            raise ConfigError(
                f"model=mlp needs rows of numbers, but data={data.name} states no input_dim and no target_dim."
            )
        return mlp(**settings, input_dim=input_dim, target_dim=target_dim, dtype=dtype)
    settings.pop("seq_len")
    num_ids = data.vocab_size
    if num_ids is None:
        raise ConfigError(f"model=transformer needs token ids, but data={data.name} states no vocab_size.")
    vocab_size = settings.pop("vocab_size") or num_ids
    if vocab_size < num_ids:
        raise ConfigError(
            f"model.vocab_size={vocab_size} is less than the {num_ids} token ids of data={data.name}. "
            f"Use model.vocab_size=null, which takes the data's, or {num_ids} or more."
        )
    return transformer(**settings, vocab_size=vocab_size, dtype=dtype)


def _check_split(parts: Parts) -> None:
    """ConfigError that names the first stage whose backward the schedule splits, where the layer's cannot be."""
    stages = sorted({task.stage for rank in parts.schedule.ranks for task in rank if task.kind == "I"})
    layers = parts.states.layout.partition
    for s in stages:
        if not layers[s]:
            continue
        try:
            for l in layers[s]:
                _ = parts.model.stage.layers[0 if parts.stack.are_alike else l].split
        except ConfigError as error:
            which = f"layer {layers[s][0]}" if len(layers[s]) == 1 else f"layers {layers[s][0]}-{layers[s][-1]}"
            raise ConfigError(f"stage {s} ({which}): {error}") from error
        if parts.stack.are_alike:
            return  # all stages run the same layer


def _one_program(parts: Parts) -> OneProgram:
    """The engine of executor=spmd, and of executor=reference."""
    stack, schedule, dtype, lowered = parts.stack, parts.schedule, parts.dtype, parts.ticks
    executor, layout = parts.config.executor, parts.states.layout
    if lowered is None:
        build_reference = partial(
            reference,
            stack,
            num_microbatches=schedule.num_microbatches,
            remat=Remat.of(executor.remat),
            unroll=executor.unroll,
            dtype=dtype,
        )
        gradients, loss = (_on_staged(build_reference(with_grads=flag), layout) for flag in (True, False))
    else:
        options = Options(
            remat=Remat.of(executor.remat),
            skip_idle=executor.idle != "compute",
            gather_each_tick=executor.gather == "tick",
            unroll=executor.unroll,
            dtype=dtype,
        )
        evaluation = ticks(forward_only(schedule), task_costs(executor.remat), options.remat)
        gradients, loss = spmd(stack, layout, lowered, options), spmd(stack, layout, evaluation, options)
    return OneProgram(parts.states, parts.batch_shapes, gradients, loss, parts.optimizer, parts.lr_schedule)


def _mpmd(parts: Parts) -> Mpmd | PostValidated:
    """The engine of executor=mpmd. The host dispatches tasks in the order in which the simulator starts them."""
    config, schedule, executor, model = parts.config, parts.schedule, parts.config.executor, parts.model
    training, evaluation = ((each, dispatch_order(each, executor.remat)) for each in (schedule, forward_only(schedule)))
    engine = Mpmd(parts.states, parts.batch_shapes, model, (training, evaluation), parts.optimizer, parts.lr_schedule)
    if not executor.post_validation:
        return engine
    return PostValidated(engine, partial(optim.needs_no_clipping, max_norm=config.optim.clip_norm))


def dispatch_order(schedule: Schedule, remat: str) -> list[Task]:
    """The tasks by their start on free-running ranks; a task comes after those that it reads from."""
    start_s = simulate(schedule, task_costs(remat)).start_s  # in an order that ranks can run: ties keep it
    return sorted(start_s, key=start_s.__getitem__)


def _on_staged(loss_and_grads: Callable, layout: Layout) -> Callable:
    """The reference, which knows layers in natural order only, on staged parameters."""

    def function(params: Tree, batch: Tree) -> tuple[jax.Array, Tree]:
        loss, grads = loss_and_grads(layout.to_natural(params), batch)
        return loss, None if grads is None else layout.to_staged(grads)

    return function


def model_flops(parts: Parts) -> int:
    """FLOPs of the model in one step: matrix products of a forward and its backward, nothing recomputed."""
    loss_and_grads = reference(parts.stack, num_microbatches=1, remat="none", unroll=0, dtype=parts.dtype)
    params = jax.eval_shape(lambda: init(parts.stack, 0))
    return matmul_flops(loss_and_grads, params, parts.batch_shapes)


def without_pipeline(config: Config) -> Config:
    """The same request for the reference executor: one device, the same model, data and microbatches."""
    executor = config_module.Reference(unroll=config.executor.unroll)
    return replace(config, mesh=config_module.Mesh(), partition=config_module.Uniform(), executor=executor)


def unit_of_work(parts: Parts) -> tuple[str, int]:
    """What a speed counts, and how many of these a step has: tokens of text, rows of all else."""
    inputs = parts.batch_shapes["inputs"].shape
    is_text = parts.data.vocab_size is not None
    return ("tokens_per_s", math.prod(inputs)) if is_text else ("rows_per_s", inputs[0])
