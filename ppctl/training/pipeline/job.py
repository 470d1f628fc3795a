"""Build the training job of a config: data, model and pipeline.

Impossible requests are rejected before any compilation, cheapest check first.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from ppctl import config as settings
from ppctl.config import Config, Uniform
from ppctl.config.code_digests import Sources, sources
from ppctl.config.config_dirs import user_cache_dir
from ppctl.config.groups.data_settings import CustomData, Mixture
from ppctl.config.groups.layout_settings import Balanced, Explicit
from ppctl.config.schedule_from_config import Planned, pipeline_of, trained_share
from ppctl.data import DataSet, mixture, regression, stdlib, synthetic, text, tokens
from ppctl.data.dataset import with_held_out
from ppctl.errors import DataError, as_setting, written_as
from ppctl.executors.described_devices import check_gpu_shape, check_size, described_mesh
from ppctl.executors.device_mesh import all_devices, check_hosts, repeated_mesh
from ppctl.executors.model_shapes import Model, tree_bytes
from ppctl.executors.rank_meshes import RankMeshes
from ppctl.executors.stage.jaxpr_flops import RelativeCosts, relative_costs
from ppctl.model.stack import Stack, shapes_like
from ppctl.schedule.costs import task_costs
from ppctl.schedule.families.registry import BASELINE, build
from ppctl.schedule.partition.partition import Partition, explicit, stages_text, uniform
from ppctl.schedule.placement_costs import Placed
from ppctl.schedule.remat import Remat
from ppctl.schedule.search.auto_choice import Choice
from ppctl.training.pipeline import known_hardware as hardware_of
from ppctl.training.pipeline.build_pipeline import pipeline
from ppctl.training.pipeline.built_in_models import lora_of, make_stack
from ppctl.training.pipeline.engines.make_engine import Engine
from ppctl.training.pipeline.jax_start import check_memory_fraction, mesh_of_settings, start_jax
from ppctl.training.pipeline.known_hardware import described_device
from ppctl.training.pipeline.optimizers import make_optimizer
from ppctl.training.pipeline.pipeline import Pipeline
from ppctl.training.pipeline.pipeline_step import ModelCosts, model_on
from ppctl.training.pipeline.user_code import custom_data

Tree = Any
DEFAULT_DTYPE = "float32"  # dtype of imported models; others: `known_hardware.default_dtype`
UNEVEN_NOTICE = 1.25  # largest / mean stage cost; above it, partition=uniform gets a notice


@dataclass(frozen=True)
class TrainingJob:
    """A built config: its data, and its model pipelined over its mesh."""

    config: Config
    data: DataSet
    pipe: Pipeline
    sources: Mapping[str, Sources]  # user's code by part: model, data, optim
    counted_stack: Stack | None = None  # model with the requested kernels, if made
    choice: Choice | None = None  # result of the search of schedule=auto

    @property
    def settled(self) -> Config:
        """The config with the compute dtype filled in: run.dtype may leave it to the devices."""
        return replace(self.config, run=replace(self.config.run, dtype=str(self.pipe.dtype)))

    @property
    def counted_model(self) -> Model:
        """The model with the kernels of the requested hardware, to count FLOPs, not to run."""
        return self.counted_on(0)

    @cached_property
    def _counted(self) -> dict[tuple[int, str], Model]:
        """The models of `counted_on` by group of ranks and hardware, made at the first call."""
        return {}

    def counted_on(self, rank: int) -> Model:
        """Return `counted_model` for a rank, with the kernels of the rank's hardware."""
        request, meshes = self.hardware_of(rank), self.pipe.meshes
        key = meshes.group_of[rank], request.name
        if key not in self._counted:
            other = hardware_of.described_only(request, meshes.device.device_kind)
            imbalance = self.config.costs.expert_imbalance
            of_rank = model_on(self.pipe, other, self.counted_stack, imbalance, rank)
            self._counted[key] = of_rank
        return self._counted[key]

    def hardware_of(self, rank: int) -> hardware_of.Request:
        """Return the hardware requested for a rank."""
        return hardware_of.of_rank(self.config.hardware, rank)

    @cached_property
    def counted_device(self) -> Any:
        """A device of the requested hardware; it decides the kernels of `counted_model`."""
        device, other = self.pipe.meshes.device, self._other_hardware
        if other is None:
            return _device_of(self.config, device)
        return described_device(other) or device

    @property
    def _other_hardware(self) -> settings.Hardware | None:
        """The requested hardware if the mesh has other devices, else None."""
        return hardware_of.described_only(self.hardware_of(0), self.pipe.meshes.device.device_kind)


def num_eval_batches(run: settings.Run, data: DataSet) -> int:
    """Return run.eval_batches; by default the held-out batches, from 1 to run.EVAL_BATCHES."""
    if run.eval_batches is not None:
        return run.eval_batches
    return max(1, min(run.EVAL_BATCHES, data.num_eval_examples // data.batch_size))


def stack_for(config: Config, data: DataSet, dtype: jnp.dtype, device: Any) -> Stack:
    """Return the model of a config, with the kernels of a device."""
    lora = lora_of(config.optim)
    return make_stack(config.model, data, dtype, device, lora=lora, cp=config.mesh.cp)


def evaluate(engine: Engine, data: DataSet, num_batches: int, state: Tree) -> float:
    """Return the mean loss of the first held-out batches, by the average if the state has one.

    Requires `engine.compile(evaluate=True)`. Batches are weighted by their number of losses,
    which is smaller with prompts or padding. DataError if no batch has a loss.
    """
    batches = data.eval_batches(num_batches, engine.batches.examples)
    state = engine.averaged(state)
    means = [engine.loss(state, engine.batches.put(batch)) for batch in batches]
    pairs = [(float(loss), float(number)) for loss, number in means]
    total = sum(number for _, number in pairs)
    if not total:
        raise no_targets(data, num_batches)
    return sum(loss * number for loss, number in pairs) / total


def no_targets(data: DataSet, num_batches: int) -> DataError:
    """Return the error of an evaluation without targets."""
    return DataError(
        f"data={data.name} has no targets in the {num_batches} batches of an evaluation, so there "
        "is no loss. Use more batches (run.eval_batches), a longer model.seq_len, or "
        "run.eval_every=null."
    )


def _started(
    config: Config, dtype: str, *, on_one_device: bool, only_planned: bool
) -> tuple[RankMeshes, Any]:
    """Start JAX; return meshes and the device that decides kernels. Arguments: as `assemble`."""
    topology, number = config.plan.topology, config.mesh.num_devices
    is_counted = only_planned and not config.plan.compiles  # compiles no program
    start = 1 if on_one_device or is_counted else number
    start_jax(config.run, dtype, start, is_away=topology is not None)
    is_too_large = is_counted and topology is None and number > len(all_devices())
    meshes = RankMeshes.of(_mesh_of(config, on_one_device=on_one_device or is_too_large))
    device, there = _device_of(config, meshes.device), None
    if only_planned or topology is not None:
        request = hardware_of.of_rank(config.hardware, 0)
        there = hardware_of.planned_for(request, device.device_kind, topology)
    check_memory_fraction(config.run.memory_fraction, device, there)
    return meshes, device


def _mesh_of(config: Config, *, on_one_device: bool) -> Mesh | RankMeshes:
    """Return a mesh of attached devices or of a topology. ConfigError if it has too few devices."""
    plan, topology = config.plan, config.plan.topology
    sizes, order = config.mesh.sizes, config.mesh.order
    if on_one_device and config.mesh.ranks:
        devices = all_devices()[:1] * config.mesh.num_devices
        return RankMeshes.of_sizes(devices, config.mesh.by_rank)
    if on_one_device:
        return repeated_mesh(sizes)
    if topology is None:
        return mesh_of_settings(config.mesh)
    gpu = hardware_of.gpu_target(hardware_of.of_topology(config.hardware, topology))
    if not plan.only_predicts_topology:
        return described_mesh(sizes, topology, gpu, hardware_of.gpu_names(), order)
    if gpu is not None:
        check_gpu_shape(topology, gpu.name)
    check_size(sizes, topology, math.prod(plan.topology_shape))
    return repeated_mesh(sizes)  # only shapes are needed


def _device_of(config: Config, device: Any) -> Any:
    """Return the device that decides kernels: that of a predicted topology, else `device`."""
    if not config.plan.only_predicts_topology or config.plan.topology is None:
        return device
    hardware = hardware_of.of_topology(config.hardware, config.plan.topology)
    return device if hardware is None else described_device(hardware) or device


@written_as(as_setting)
def assemble(
    config: Config,
    *,
    default_dtype: str | None = None,
    on_one_device: bool = False,
    only_planned: bool = False,
) -> TrainingJob:
    """Return the training job of a config. ConfigError, ScheduleError or DataError if impossible.

    default_dtype: compute dtype if run.dtype is not set; None: the default of the devices.
    on_one_device: the first device stands for all devices of the mesh: shapes and programs are the
    same, but the job cannot train. only_planned: the job will not train, so settings may be for
    described hardware, and a plan without compilation may have any number of devices.
    """
    # 1. before JAX starts: a schedule that does not depend on the model's costs
    traits = config.executor.ENGINE
    is_auto = isinstance(config.schedule, settings.Auto) and traits.is_pipelined
    by_costs = is_auto or (config.schedule.vocab == "parallel" and traits.dispatches_tasks)
    counted = config.model.num_layers  # None: a custom model, made below
    planned = None if by_costs or counted is None else plan(config, counted)
    _check_hosts(config)
    # 2. devices and the compute dtype
    requested = config.run.dtype or default_dtype
    meshes, device = _started(
        config, requested or DEFAULT_DTYPE, on_one_device=on_one_device, only_planned=only_planned
    )
    request = hardware_of.of_rank(config.hardware, 0), meshes.device, config.plan.topology
    dtype = jnp.dtype(requested or hardware_of.default_dtype(*request))
    # 3. data, model and optimizer
    data = open_data(config)
    stack = stack_for(config, data, dtype, device)
    of_run = config.run.num_steps, stack, config.run.on_nonfinite
    optimizer, rates = make_optimizer(config.optim, *of_run)
    how: dict[str, Any] = {"executor": _traced_if_profiled(config), "dtype": dtype}
    how["seed"] = config.run.seed
    how |= {"clip_norm": config.optim.clip_norm, "ema": config.optim.ema, "lr_schedule": rates}
    shapes = batch_shapes(data)
    pipelined = partial(pipeline, stack, mesh=meshes, batch=shapes, optimizer=optimizer, **how)
    # 4. schedules that depend on the model's costs; the pipeline
    if is_auto:
        planned = plan_auto(config, stack.num_layers, pipelined)
    elif by_costs:
        remat = Remat.of(config.executor.remat)
        relative = relative_costs(stack, shapes, dtype, recompute=remat.recomputes)
        costs = relative.with_parts(task_costs(remat, trained_share(config.model, config.optim)))
        planned = plan(config, stack.num_layers, lambda rank_of: Placed(costs))
    elif planned is None:
        planned = plan(config, stack.num_layers)
    schedule, partition = planned.step.schedule, config.partition.name
    if partition == "explicit":
        partition = [*map(len, divide(config.partition, stack.num_layers, schedule.rank_of))]
    pipe = pipelined(schedule=schedule, partition=partition)
    # 5. digests of the user's code
    parts = {"model": config.model, "data": config.data, "optim": config.optim}
    code = {name: sources(each.target) for name, each in parts.items() if each.name == "custom"}
    return TrainingJob(config, data, pipe, code, choice=planned.choice)


def _check_hosts(config: Config) -> None:
    """Raise ConfigError if an axis inside a stage spans hosts of the described hardware."""
    ranks = config.mesh.by_rank if config.mesh.ranks else (config.mesh.sizes,)
    for rank, sizes in enumerate(ranks):
        hardware = hardware_of.of_rank(config.hardware, rank)
        if isinstance(hardware, settings.Hardware):
            of_host = hardware_of.host_devices(hardware, config.plan.topology)
            if of_host is not None and sizes.num_devices > of_host:
                check_hosts(sizes, config.mesh.order, sizes.num_devices, of_host)


def _traced_if_profiled(config: Config) -> settings.AnyExecutor:
    """Return the executor; with run.profile, xla_flags=auto becomes traced, to show tasks."""
    is_profiled = config.run.profile is not None and config.executor.xla_flags == "auto"
    return replace(config.executor, xla_flags="traced") if is_profiled else config.executor


def plan(config: Config, num_layers: int, *costs: Any) -> Planned:
    """Return the schedule of a config and check its partition, without starting JAX.

    costs: the last arguments of `pipeline_of`, costs_of and in_ticks_bytes, for schedule=auto.
    """
    trained = trained_share(config.model, config.optim)
    request = config.schedule, config.executor, config.mesh.pp, num_layers, trained
    planned = pipeline_of(*request, *costs)
    divide(config.partition, num_layers, planned.step.schedule.rank_of)
    return planned


def plan_auto(config: Config, num_layers: int, pipelined: Callable[..., Pipeline]) -> Planned:
    """Return `plan` for schedule=auto; pipelined: makes the pipeline for (schedule, partition)."""
    request = config.schedule
    assert isinstance(request, settings.Auto), "other schedules follow from their settings"
    baseline = build(BASELINE, config.mesh.pp, request.num_microbatches)
    executor = config.executor
    if isinstance(executor, settings.Mpmd):  # the found schedule may have pairs, the probe need not
        executor = replace(executor, fuse="none")
    probe = pipelined(schedule=baseline, partition="balanced", executor=executor)
    relative, vocab_parts = probe.relative_costs, 0
    if request.vocab == "parallel":
        relative, vocab_parts = relative.without_embed_head, config.mesh.pp
    layers = partial(divide, config.partition, num_layers, costs=relative)
    costs = ModelCosts(probe, layers, vocab_parts)
    is_capped, in_ticks = request.max_memory_gib is not None, config.executor.ENGINE.in_ticks
    seconds_of = costs.layers(with_bytes=is_capped and not in_ticks).on
    bytes_of = costs.in_ticks_bytes if is_capped and in_ticks else None
    return plan(config, num_layers, seconds_of, bytes_of)


def divide(
    request: Uniform, num_layers: int, rank_of: Sequence[int], costs: RelativeCosts | None = None
) -> Partition:
    """Return the layers of each stage; costs: for partition=balanced; None: equal layers."""
    if isinstance(request, Explicit):
        return explicit(num_layers, len(rank_of), request.layers)
    if isinstance(request, Balanced):
        return (costs or RelativeCosts((1.0,) * num_layers, 0.0, 0.0)).balanced(rank_of)
    return uniform(num_layers, len(rank_of))


def partition_text(job: TrainingJob) -> str | None:
    """Return a line on the stages' layers and costs; None for uniform stages of similar cost."""
    name, pipe = job.config.partition.name, job.pipe
    partition, costs = pipe.partition, pipe.relative_costs

    def unevenness(partition: Partition) -> float:
        of_stages = costs.of_stages(partition)
        return max(of_stages) * len(of_stages) / sum(of_stages)

    largest, parts = unevenness(partition), pipe.schedule.vocab_parts
    text = f"largest stage {largest:.2f} times the mean"
    if name == "uniform":
        if pipe.layout.placement.is_even and largest <= UNEVEN_NOTICE:
            return None
        best = unevenness(costs.balanced(pipe.schedule.rank_of))
        text += f", {best:.2f} with partition=balanced" if best < largest else ""
    embed_head = f"embedding {costs.embed:.1f}, head {costs.head:.1f} times a layer"
    embed_head = "embedding and head on all ranks" if parts else embed_head
    return f"{stages_text([*map(len, partition)], parts)}; {name} ({embed_head}; {text})"


def batch_shapes(data: DataSet) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and dtypes of a global batch, from its first example."""
    example = shapes_like(next(data.batches(rows=(0,))), data.batch_size, first=1)
    return {name: example[name] for name in ("inputs", "targets")}


def open_data(config: Config, *, sizes_only: bool = False) -> DataSet:
    """Return the config's data set; sizes_only: without reading the ids of a token file."""
    data = config.data
    how: dict[str, Any] = {"batch_size": data.batch_size, "eval_fraction": data.eval_fraction}
    how["seed"] = config.run.seed
    # 1. custom data, and rows of numbers
    if isinstance(data, CustomData):
        return custom_data(data.target, options=data.options, **how)
    if isinstance(data, settings.Regression):
        sizes = {"num_features": data.num_features, "num_targets": data.num_targets}
        return regression(**sizes, num_rows=data.num_rows, **how)
    # 2. sequences of token ids
    assert not isinstance(config.model, settings.MLP), "config.check refuses text for an MLP"
    how["seq_len"] = config.model.seq_len
    if isinstance(data, settings.Synthetic):
        return synthetic(vocab_size=data.vocab_size, num_sequences=data.num_sequences, **how)
    if isinstance(data, settings.Tokens):
        ids = {"dtype": data.dtype, "tokenizer": data.tokenizer, "sizes_only": sizes_only}
        opened = partial(tokens, **ids)  # sizes_only: reading all ids of a file may take long
        return _held_out(opened, data.path, data.eval_path, vocab_size=data.vocab_size, **how)
    # 3. text
    how |= {"tokenizer": data.tokenizer, "end_token": data.end_token, "packing": data.packing}
    how["cache_dir"] = str(user_cache_dir()) if data.cache_dir == "auto" else data.cache_dir
    if isinstance(data, settings.Text):
        fields = {"field": data.field, "prompt_field": data.prompt_field, "document": data.document}
        opened = partial(text, **fields, on_error=data.on_error)
        return _held_out(opened, data.path, data.eval_path, **how)
    if isinstance(data, Mixture):
        return mixture(parts=[vars(each) for each in data.parts], on_error=data.on_error, **how)
    return stdlib(**how)


def _held_out(opened: Callable, path: str, eval_path: str | None, **how: Any) -> DataSet:
    """Return the data set of `path`; all of `eval_path`, if given, becomes its held-out part."""
    if eval_path is None:
        return opened(path=path, **how)
    how |= {"eval_fraction": 0.0}
    data = opened(path=path, **how)
    how |= {"vocab_size": data.vocab_size} if "vocab_size" in how else {}
    how |= {"batch_size": 1}  # a short file too: an evaluation states how much it needs
    return with_held_out(data, opened(path=eval_path, source=f"data.eval_path={eval_path}", **how))


def state_bytes(job: TrainingJob) -> int:
    """Return the bytes of the state on all devices, which is the size of a checkpoint."""
    return tree_bytes(job.pipe.states.natural)


def unit_of_work(job: TrainingJob) -> tuple[str, int]:
    """Return (name of the speed metric, units per step): tokens of text, else examples."""
    inputs = job.pipe.batch_shapes["inputs"].shape
    is_text = job.data.vocab_size is not None
    return ("tokens_per_s", math.prod(inputs)) if is_text else ("rows_per_s", inputs[0])


def without_pipeline(config: Config) -> Config:
    """Return the config with executor=reference on one device."""
    mesh, partition = settings.Mesh(), settings.Uniform()
    return replace(config, mesh=mesh, partition=partition, executor=settings.Reference())
