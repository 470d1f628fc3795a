"""From a config to the parts of a run: schedule, mesh, data, model, executor, optimizer, state.

What can be refused is refused here, cheapest check first, before anything is compiled.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ppctl import config as config_module
from ppctl import optim
from ppctl.config import Config
from ppctl.costs import Costs
from ppctl.data import BUILDERS, DataSet
from ppctl.errors import ConfigError
from ppctl.mesh import DATA_AXES, make_mesh
from ppctl.model.mlp import mlp
from ppctl.model.stack import Stack, init
from ppctl.model.transformer import transformer
from ppctl.partition import Partition, balanced, explicit, stage_costs, uniform
from ppctl.request import schedule_of
from ppctl.runtime.flops import end_costs, matmul_flops
from ppctl.runtime.layout import Layout
from ppctl.runtime.reference import reference
from ppctl.runtime.spmd import Options, spmd
from ppctl.schedule import Schedule
from ppctl.schedule.ticks import Ticks, forward_only, ticks
from ppctl.train import init_state, train_step

Tree = Any
DEFAULT_DTYPE = "float32"
UNEVEN_NOTICE = 1.25  # show even stages too where the largest costs more times the mean, as one with a large head does
CPU_FLAGS = (  # XLA aborts the process when one simulated device is 40 s late at a collective, as on a busy machine
    "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    "--xla_cpu_collective_timeout_seconds=600",
)


@dataclass(frozen=True)
class Parts:
    """Everything a command needs, built from one config. State and gradients are staged (`runtime.layout`)."""

    config: Config
    dtype: jnp.dtype  # of compute
    data: DataSet
    stack: Stack
    mesh: Mesh
    schedule: Schedule
    ticks: Ticks | None  # None: executor=reference
    layout: Layout
    lr_schedule: optax.Schedule
    optimizer: optax.GradientTransformation
    loss_and_grads: Callable[[Tree, Tree], tuple[jax.Array, Tree]]
    loss_only: Callable[[Tree, Tree], tuple[jax.Array, None]]

    def init_natural(self) -> Tree:
        """Initial state in natural order: a function of the model and the seed alone."""
        return init_state(init(self.stack, self.config.run.seed), self.optimizer)

    def init_staged(self) -> Tree:
        return self.layout.to_staged(self.init_natural())

    @cached_property
    def natural_state(self) -> Tree:
        """Shapes, dtypes and shardings of the state as checkpoints hold it."""
        return self._described(self.init_natural, self.layout.natural_specs)

    @cached_property
    def staged_state(self) -> Tree:
        """Shapes, dtypes and shardings of the state as training holds it."""
        return self._described(self.init_staged, self.layout.staged_specs)

    def _described(self, function: Callable[[], Tree], specs: Callable[[Tree], Tree]) -> Tree:
        shapes: Tree = jax.eval_shape(function)
        shardings = self.layout.shardings(specs(shapes))
        return jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, shardings)

    def new_state(self) -> Tree:
        """The initial state on the mesh. Nothing is ever whole on one device unless the mesh has one."""
        return jax.jit(self.init_staged, out_shardings=shardings_of(self.staged_state))()

    @cached_property
    def to_natural(self) -> Callable[[Tree], Tree]:
        return jax.jit(self.layout.to_natural, out_shardings=shardings_of(self.natural_state))

    @cached_property
    def to_staged(self) -> Callable[[Tree], Tree]:
        return jax.jit(self.layout.to_staged, out_shardings=shardings_of(self.staged_state))

    @cached_property
    def batch_shapes(self) -> Tree:
        """Shapes, dtypes and shardings of a global batch."""
        batch = next(self.data.batches())
        return {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=self.batch_sharding) for name, a in batch.items()}

    @property
    def batch_sharding(self) -> NamedSharding:
        return NamedSharding(self.mesh, P(DATA_AXES))

    def put(self, batch: Tree) -> Tree:
        """A global batch on the mesh."""
        return jax.device_put(batch, self.batch_sharding)

    @property
    def train_step(self) -> Callable[[Tree, Tree], tuple[Tree, Tree]]:
        return train_step(self.loss_and_grads, self.optimizer, self.lr_schedule)

    def lower_train_step(self) -> jax.stages.Lowered:
        """The traced train step (state, batch) -> (state, metrics), state donated, ready to compile."""
        out = (shardings_of(self.staged_state), NamedSharding(self.mesh, P()))
        step = jax.jit(self.train_step, donate_argnums=0, out_shardings=out)
        return step.lower(self.staged_state, self.batch_shapes)


def shardings_of(tree: Tree) -> Tree:
    return jax.tree.map(lambda a: a.sharding, tree)


def task_costs(remat: str) -> Costs:
    """Relative seconds of a stage's tasks: the input and the weight gradient cost a forward each, recomputing one."""
    return Costs(forward_s=1.0, input_grad_s=1.0 + (remat != "none"), weight_grad_s=1.0)


def plan(config: Config) -> tuple[Schedule, Ticks | None, Partition]:
    """Schedule, ticks (None: executor=reference) and partition of a config. Neither JAX nor data is touched.

    With partition=balanced the partition is that of a model whose embedding and head cost nothing.
    """
    settings, executor = config.schedule, config.executor
    costs = task_costs(executor.remat)
    most_chunks = max(1, config.model.num_layers // config.mesh.pp)
    lower = partial(ticks, costs=costs, **Options(remat=executor.remat).lowering)
    in_lockstep = (lambda schedule: lower(schedule).makespan_s(costs)) if executor.name == "spmd" else None
    schedule = schedule_of(settings, config.mesh.pp, costs, most_chunks, in_lockstep).schedule
    partition = divide(config, schedule)
    return schedule, None if executor.name == "reference" else lower(schedule), partition


def divide(config: Config, schedule: Schedule, *, embed: float = 0.0, head: float = 0.0) -> Partition:
    """The layers of each stage. embed, head: what partition=balanced is to count for the ends, in layers."""
    num_layers = config.model.num_layers
    if config.partition.name == "explicit":
        return explicit(num_layers, schedule.num_stages, config.partition.layers)
    if config.partition.name == "balanced":
        return balanced(num_layers, schedule.rank_of, embed=embed, head=head)
    return uniform(num_layers, schedule.num_stages)


def partition_text(parts: Parts) -> str | None:
    """The layers of each stage and how even their costs are, in a line; None for even stages nobody asked for."""
    name, partition = parts.config.partition.name, parts.layout.partition
    ends = _end_costs(parts.config, parts.stack, parts.data)

    def unevenness(partition: Partition) -> float:
        costs = stage_costs(partition, **ends)
        return max(costs) * len(costs) / sum(costs)

    text = f"largest stage {unevenness(partition):.2f} times the mean"
    if name == "uniform":
        if parts.layout.is_even and unevenness(partition) <= UNEVEN_NOTICE:
            return None
        best = unevenness(balanced(parts.stack.num_layers, parts.schedule.rank_of, **ends))
        text += f", {best:.2f} with partition=balanced" if best < unevenness(partition) else ""
    return (
        f"{' '.join(str(len(layers)) for layers in partition)} layers ({name}; embedding worth {ends['embed']:.1f}, "
        f"head {ends['head']:.1f} layers; {text})"
    )


def _end_costs(config: Config, stack: Stack, data: DataSet) -> dict[str, float]:
    return end_costs(stack, next(data.batches()), recompute=config.executor.remat != "none")


def start_jax(config: Config, dtype: str) -> None:
    """Nothing; sets what JAX reads when it first looks for devices. Simulated CPU devices follow from the mesh."""
    flags = os.environ.get("XLA_FLAGS", "")
    missing = [flag for flag in CPU_FLAGS if flag.split("=")[0] not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *missing]).strip()
    simulated: int = jax.config.jax_num_cpu_devices  # pyright: ignore[reportAttributeAccessIssue] made at run time
    if simulated < config.mesh.num_devices:
        # where JAX has started already, in a program of the user's, make_mesh counts what is there
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", config.mesh.num_devices)
    if config.run.platform is not None:
        jax.config.update("jax_platforms", config.run.platform)
    if dtype == "float64":
        jax.config.update("jax_enable_x64", True)


def assemble(config: Config, *, default_dtype: str = DEFAULT_DTYPE) -> Parts:
    """The parts of a run. ConfigError, ScheduleError or DataError for what cannot be."""
    schedule, lowered, partition = plan(config)
    dtype_name = config.run.dtype or default_dtype
    start_jax(config, dtype_name)
    mesh = make_mesh(config.mesh.dp, config.mesh.pp, config.mesh.fsdp)
    data = open_data(config)
    dtype = jnp.dtype(dtype_name)
    stack = make_stack(config, data, jnp.promote_types(dtype, jnp.float32))
    if config.partition.name == "balanced":
        partition = divide(config, schedule, **_end_costs(config, stack, data))
    layout = Layout(mesh, partition, schedule.rank_of)
    loss_and_grads, loss_only = make_executor(config, stack, layout, schedule, lowered, dtype)
    settings = asdict(config.optim)
    schedule_settings = {key: settings.pop(key) for key in ("lr", "min_lr_fraction", "warmup_steps")}
    lr_schedule = optim.lr_schedule(**schedule_settings, num_steps=config.run.num_steps)
    del settings["name"]
    optimizer = optim.adamw(lr_schedule, **settings)
    return Parts(
        config, dtype, data, stack, mesh, schedule, lowered, layout, lr_schedule, optimizer, loss_and_grads, loss_only
    )


def open_data(config: Config) -> DataSet:
    """The data set that the config names."""
    settings = {**asdict(config.data), "seed": config.run.seed}
    if config.model.name == "transformer":
        settings["seq_len"] = config.model.seq_len
    return BUILDERS[settings.pop("name")](**settings)


def make_stack(config: Config, data: DataSet, dtype: jnp.dtype) -> Stack:
    """The model that the config names, of the size that the data needs. `dtype` is that of the parameters."""
    settings = asdict(config.model)
    name = settings.pop("name")
    if name == "mlp":
        input_dim, target_dim = data.input_dim, data.target_dim
        assert input_dim is not None, "config.check pairs an mlp with rows"
        assert target_dim is not None, "config.check pairs an mlp with rows"
        return mlp(**settings, input_dim=input_dim, target_dim=target_dim, dtype=dtype)
    settings.pop("seq_len")
    num_ids = data.vocab_size
    assert num_ids is not None, "config.check pairs a transformer with tokens"
    vocab_size = settings.pop("vocab_size") or num_ids
    if vocab_size < num_ids:
        raise ConfigError(
            f"model.vocab_size={vocab_size} is less than the {num_ids} token ids of data={data.name}. "
            f"Use model.vocab_size=null, which takes the data's, or {num_ids} or more."
        )
    return transformer(**settings, vocab_size=vocab_size, dtype=dtype)


def make_executor(
    config: Config, stack: Stack, layout: Layout, schedule: Schedule, lowered: Ticks | None, dtype: jnp.dtype
) -> tuple[Callable, Callable]:
    """(loss_and_grads, loss_only) of the executor that the config names, both on staged parameters."""
    executor = config.executor
    if lowered is None:
        build_reference = partial(
            reference,
            stack,
            num_microbatches=schedule.num_microbatches,
            remat=executor.remat,
            unroll=executor.unroll,
            dtype=dtype,
        )
        gradients, loss = (_on_staged(build_reference(with_grads=flag), layout) for flag in (True, False))
        return gradients, loss
    options = Options(
        remat=executor.remat,
        skip_idle=executor.idle != "compute",
        gather_each_tick=executor.gather == "tick",
        unroll=executor.unroll,
        dtype=dtype,
    )
    evaluation = ticks(forward_only(schedule), task_costs(executor.remat), **options.lowering)
    return spmd(stack, layout, lowered, options), spmd(stack, layout, evaluation, options)


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
