"""The record of a run, for scripts and notebooks: settings, numbers, parameters, and the model that they make."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ppctl import config as settings
from ppctl.config import Config
from ppctl.config.sources import changed_modules, recorded_sources, sources
from ppctl.config.stored import model_and_data
from ppctl.data import DataSet
from ppctl.data.description import described
from ppctl.errors import CheckpointError, ConfigError
from ppctl.executors.reference import outputs_of, reference
from ppctl.model.lora import Lora
from ppctl.model.stack import Stack, init
from ppctl.reports import run_status
from ppctl.reports.foreign import read_settings
from ppctl.reports.run_files import read_lines
from ppctl.training.adapters import merged_params, stored_lora
from ppctl.training.checkpoint.checkpoint import Checkpoints
from ppctl.training.checkpoint.manifest import array_types, differences
from ppctl.training.job import DEFAULT_DTYPE, open_data
from ppctl.training.models import make_stack

Tree = Any
UNROLL = 16  # layers, as executors do; more are scanned


@dataclass(frozen=True)
class SavedRun:
    """A run directory. Made by `load_run`; nothing of it is read before it is asked for.

    The code of a model of one's own is imported as `ppctl train` does it, from the current directory first; where it is
    not found, the error names the directory in which the run was started. What was trained is not read again: shapes of
    the examples stand in the checkpoints.
    """

    directory: Path

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """All settings of the run, as its last start wrote them: {"model": {...}, "mesh": {...}, ...}."""
        try:
            return read_settings(self.directory / "config.yaml")
        except ValueError as error:
            raise ConfigError(f"{self.directory / 'config.yaml'} cannot be read: {error}.") from error

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """One record a step, oldest first: step, loss, grad_norm, lr, step_time_s, ...; units are in the names."""
        return _records(self.directory / "metrics.jsonl")

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """One record an evaluation: step, eval_loss."""
        return _records(self.directory / "eval.jsonl")

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of the finished checkpoints, ascending."""
        return Checkpoints(self.directory / "checkpoints", keep=None).steps()

    @cached_property
    def data(self) -> DataSet:
        """The data set of the run: `next(run.data.batches())`, `run.data.eval_batches(1)`. Opened when it is used."""
        with self._own_code():
            return open_data(self._config)

    def params(self, step: int | None = None) -> Tree:
        """Return the parameters of a checkpoint, whole, on the first device.

        Of a `Network`, the tree that its `init` returns. Of any other model {"ends": embedding and head, "layers":
        arrays [L, ...] in model order}. Both whatever the layout of the run. step: None for the newest. Adapters of
        optim.train=lora are merged in.

        Raises:
            CheckpointError: There is no such checkpoint, it is damaged, or the model's code now has other parameters.
            ConfigError: The model's code cannot be imported.
        """
        natural = self._natural(self._step(step))
        if not isinstance(self._config.model, settings.CustomModel):
            return natural
        export = self._fitting(self._step(step), natural).export
        return natural if export is None else export(natural)

    def adapters(self, step: int | None = None) -> tuple[Lora, Tree] | None:
        """Return (settings, parameters with adapters beside their kernels) of a checkpoint; None: it has no adapters.

        step, errors: as `params`.
        """
        number = self._step(step)
        with Checkpoints(self.directory / "checkpoints", keep=None) as checkpoints:
            lora = stored_lora(checkpoints, number)
            return None if lora is None else (lora, checkpoints.restore_params(number, jax.devices()[0]))

    def predict(self, inputs: Any, step: int | None = None) -> Tree:
        """Return the outputs of the model for a batch of inputs [examples, ...], in the dtype that it was trained in.

        Compiled once for each shape. step: of the checkpoint; None for the newest.

        Raises:
            ConfigError: The model is a `Stack` without `outputs`.
            CheckpointError: As `params`.
        """
        stack, params = self._trained(step)
        if stack.outputs is None:
            raise ConfigError(
                f"model.target={self.settings['model'].get('target')} returns a Stack without outputs, only with a "
                "loss. Give it outputs=..., a function (ends, x), or use run.loss(batch)."
            )
        predict = self._call("predict", outputs_of(stack, unroll=UNROLL, dtype=self._dtype))
        return predict(params, jnp.asarray(inputs))

    def loss(self, batch: Mapping[str, Any], step: int | None = None) -> float:
        """Return the mean loss of a batch, {"inputs", "targets"}: arrays [examples, ...]. step, errors: as `params`."""
        stack, params = self._trained(step)
        mean = reference(stack, num_microbatches=1, remat="none", unroll=UNROLL, dtype=self._dtype, with_grads=False)
        given = {name: jnp.asarray(batch[name]) for name in ("inputs", "targets")}
        return float(self._call("loss", mean)(params, given)[0])

    # what it is made of

    @cached_property
    def _config(self) -> Config:
        return model_and_data(self.settings)

    @cached_property
    def _dtype(self) -> jnp.dtype:
        name = self._config.run.dtype or DEFAULT_DTYPE
        if name == "float64" and jnp.zeros(0, float).dtype != jnp.float64:
            raise ConfigError(
                f"{self.directory} is a run of run.dtype=float64, and JAX has 32 bits: "
                'call jax.config.update("jax_enable_x64", True) first.'
            )
        return jnp.dtype(name)

    @cached_property
    def _calls(self) -> dict[str, Callable[..., Any]]:
        return {}

    @cached_property
    def _held(self) -> dict[int, Tree]:
        """The parameters last used, in natural order, by their step."""
        return {}

    def _call(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return self._calls.setdefault(name, jax.jit(function))

    def _step(self, step: int | None) -> int:
        steps = self.steps
        if not steps or step not in (None, *steps):
            found = f"of steps {', '.join(map(str, steps))}" if steps else "none"
            raise CheckpointError(f"{self.directory} has no checkpoint of step {step}; there are {found}.")
        return steps[-1] if step is None else step

    def _natural(self, step: int) -> Tree:
        _ = self._dtype  # refuses
        with Checkpoints(self.directory / "checkpoints", keep=None) as checkpoints:
            return merged_params(checkpoints, step, jax.devices()[0])

    def _trained(self, step: int | None) -> tuple[Stack, Tree]:
        """Return the model, and parameters of a checkpoint that fit it."""
        step = self._step(step)
        if step not in self._held:
            natural = self._natural(step)
            self._fitting(step, natural)
            self._held.clear()
            self._held[step] = natural
        return self._stack, self._held[step]

    def _fitting(self, step: int, natural: Tree) -> Stack:
        """Return the model. CheckpointError where its code now has other parameters than these of a checkpoint."""
        stack = self._stack
        wanted = jax.eval_shape(lambda: init(stack, 0))
        unlike = differences(array_types(natural), array_types(wanted))
        if unlike:
            raise CheckpointError(
                f"The model of {self.directory} has other parameters now than at step {step}: {unlike[0]} (the first "
                f"of {len(unlike)}). Its code or cut has changed: restore {self.settings['model'].get('target')}."
            )
        return stack

    @cached_property
    def _stack(self) -> Stack:
        """The model of the newest checkpoint's data. Warns where its code is not what was trained."""
        config = self._config
        with Checkpoints(self.directory / "checkpoints", keep=None) as checkpoints:
            meta = checkpoints.meta(self._step(None))
        data = described(meta["data"]) if "example" in meta["data"] else self.data
        if isinstance(config.model, settings.Transformer):  # any kernel computes the same, and not each runs here
            config = replace(config, model=replace(config.model, attention="auto"))
        with self._own_code():
            stack = make_stack(config, data, self._dtype, jax.devices()[0])
        if isinstance(config.model, settings.CustomModel):
            before = recorded_sources(meta).get("model", {})
            changed = changed_modules(before, sources(config.model.target))
            if changed:
                warnings.warn(
                    f"{', '.join(changed)} changed after {self.directory} was trained; it may compute something else.",
                    stacklevel=4,
                )
        return stack

    @contextmanager
    def _own_code(self) -> Iterator[None]:
        """Add to an error about a missing module the directory in which the run was started."""
        try:
            yield
        except ConfigError as error:
            starts = read_lines(self.directory / run_status.FILE, [])
            directories = [str(each[run_status.DIRECTORY]) for each in starts if run_status.DIRECTORY in each]
            if not directories or not isinstance(error.__cause__, ModuleNotFoundError):
                raise
            raise ConfigError(
                f"{error} {self.directory} was started in {directories[-1]}: go there, or name it in PYTHONPATH."
            ) from error.__cause__


def load_run(directory: str | Path) -> SavedRun:
    """Return a run by its directory.

    Raises:
        ConfigError: The directory holds no run.
    """
    path = Path(directory)
    if not (path / "config.yaml").is_file():
        raise ConfigError(f"{path} is no run: it has no config.yaml. `ppctl runs` lists runs.")
    return SavedRun(path)


def _records(path: Path) -> list[dict[str, Any]]:
    """Return the whole records in a file of JSON lines; a kill may leave half of one."""
    return [*read_lines(path, [])]
