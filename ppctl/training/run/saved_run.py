"""A recorded run for scripts and notebooks: settings, numbers, parameters and the model."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ppctl import config as settings
from ppctl.config import Config
from ppctl.config.changed_settings import model_and_data
from ppctl.config.code_digests import changed_modules, sources
from ppctl.data import DataSet
from ppctl.data.dataset import described
from ppctl.errors import CheckpointError, ConfigError
from ppctl.executors.device_mesh import all_devices
from ppctl.executors.reference import outputs_of, reference
from ppctl.model.stack import Stack
from ppctl.reports import run_status
from ppctl.reports.foreign_files import read_settings
from ppctl.reports.recorded_settings import with_paths
from ppctl.reports.run_files import read_lines
from ppctl.training.checkpoint import stored_checkpoints as stored
from ppctl.training.checkpoint.manifest import array_types, differences
from ppctl.training.pipeline.built_in_models import lora_of, make_stack
from ppctl.training.pipeline.call_checks import arrays_of, check_by_model
from ppctl.training.pipeline.job import DEFAULT_DTYPE, open_data
from ppctl.training.pipeline.whole_model import flax_model_of
from ppctl.user_files import path_of

Tree = Any


@dataclass(frozen=True)
class SavedRun:
    """A run directory, made by `load_run`. Files are read on first use.

    The user's model code is imported as by `ppctl train`, from the current directory first. If it
    is not found, the error names the directory where the run was started. No training data is read.
    """

    directory: Path

    @cached_property
    def settings(self) -> Mapping[str, Any]:
        """All settings of the run's newest start: {"model": {...}, "mesh": {...}, ...}."""
        file = self.directory / "config.yaml"
        try:
            return read_settings(file)
        except ValueError as error:
            raise ConfigError(f"{file} cannot be read: {error}.") from error

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """One record for each step, oldest first: step, loss, grad_norm, lr, step_time_s, ..."""
        return [*read_lines(self.directory / "metrics.jsonl", [])]

    @cached_property
    def evaluations(self) -> list[dict[str, Any]]:
        """One record for each evaluation, oldest first: step, eval_loss, ..."""
        return [*read_lines(self.directory / "eval.jsonl", [])]

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps of the finished checkpoints, ascending."""
        return self._checkpoints.steps()

    def step(self, step: int | None) -> int:
        """Return `step`, or the newest checkpoint's for None. CheckpointError if it is missing."""
        if not (steps := self.steps) or step not in (None, *steps):
            found = f"steps {', '.join(map(str, steps))}" if steps else "none"
            wanted = "" if step is None else f" of step {step}"
            raise CheckpointError(f"{self.directory} has no checkpoint{wanted}; it has {found}.")
        return steps[-1] if step is None else step

    def read(self, step: int | None, read: Callable[[int], stored.T]) -> stored.T:
        """Return read(step). None reads the newest checkpoint, even if a run replaces it."""
        if step is None:
            return stored.read_newest(lambda: self.step(None), read)
        return read(self.step(step))

    @cached_property
    def data(self) -> DataSet:
        """The data set of the run: `next(run.data.batches())`, `run.data.eval_batches(1)`."""
        with _own_code(self):
            return open_data(self.config)

    def params(self, step: int | None = None, *, average: bool = True) -> Tree:
        """Return all parameters of a checkpoint on the first device, with adapters merged.

        Args:
            step: Step of the checkpoint; None for the newest.
            average: Whether to use the average of a run with optim.ema, as other methods do.

        Returns:
            For a `Network`, the tree that its `init` returns. For any other model, {"embed_head":
            embedding and head, "layers": arrays [L, ...] in model order}.

        Raises:
            CheckpointError: The checkpoint is missing, damaged, or does not fit the model's code.
            ConfigError: The model's code cannot be imported.
        """

        def read(step: int) -> Tree:
            natural = self._natural(step, average=average)
            if not isinstance(self.config.model, settings.CustomModel):
                return natural
            network = self._fitting(step, natural).options.network
            return natural if network is None else network.parameters.from_parts(natural)

        return self.read(step, read)

    def predict(self, inputs: Any, step: int | None = None) -> Tree:
        """Return the model's outputs for inputs [examples, ...], in the run's dtype.

        Compiles once for each shape. step: as in `params`. Raises as `params`, and ConfigError for
        a `Stack` without `outputs`.
        """
        stack, params = self.read(step, self._trained)
        if stack.options.outputs is None:
            raise ConfigError(
                f"model.target={self.settings['model'].get('target')} returns a Stack without "
                "outputs, only with a loss. Give it outputs=..., a function (embed_head, x), or "
                "use run.loss(batch)."
            )
        arrays = arrays_of({"inputs": inputs}, ("inputs",))
        check_by_model(stack, arrays)
        return self._outputs(params, jax.tree.map(jnp.asarray, arrays["inputs"]))

    def flax_model(self, step: int | None = None) -> Any:
        """Return the model as a Flax module (`Pipeline.flax_model`). step: as in `params`."""
        return flax_model_of(self._stack, self.params(step))

    def loss(self, batch: Mapping[str, Any], step: int | None = None) -> float:
        """Return the mean loss of a batch {"inputs", "targets"}, arrays [examples, ...]."""
        stack, params = self.read(step, self._trained)
        arrays = arrays_of(batch)
        check_by_model(stack, arrays)
        return float(self._mean_loss(params, jax.tree.map(jnp.asarray, arrays))[0])

    @cached_property
    def _checkpoints(self) -> stored.StoredCheckpoints:
        all_devices()  # raises the reason if JAX cannot start
        return stored.StoredCheckpoints(self.directory / "checkpoints")

    @cached_property
    def config(self) -> Config:
        """Model, data and run settings of the newest start.

        Relative paths are resolved from the directory where the run was started. If the path
        of the run directory ends with run.dir, that is the part before run.dir; otherwise it is
        the recorded directory.
        """
        found, place = model_and_data(self.settings), self.directory.resolve()
        parts, root = Path(found.run.dir).parts, self.started_in
        if parts and place.parts[-len(parts) :] == parts:
            root = Path(*place.parts[: -len(parts)])
        if root is None or root == Path.cwd():
            return found
        resolved = with_paths(self.settings, lambda path: str(root / Path(path).expanduser()))
        return model_and_data(resolved)

    @property
    def started_in(self) -> Path | None:
        """The directory where the run was last started, as recorded."""
        key, starts = run_status.DIRECTORY, read_lines(self.directory / run_status.FILE, [])
        places = [each[key] for each in starts if isinstance(each.get(key), str)]
        return Path(places[-1]) if places else None

    @cached_property
    def dtype(self) -> str:
        """The compute dtype recorded with the newest checkpoint; float32 for imported models."""
        return self._checkpoints.meta(self.step(None))["config"]["run"]["dtype"] or DEFAULT_DTYPE

    @cached_property
    def _dtype(self) -> jnp.dtype:
        name = self.dtype
        if name == "float64" and jnp.zeros(0, float).dtype != jnp.float64:
            raise ConfigError(
                f"{self.directory} was trained with run.dtype=float64, but JAX is set to 32 "
                'bits: call jax.config.update("jax_enable_x64", True) first.'
            )
        return jnp.dtype(name)

    @cached_property
    def _outputs(self) -> Callable[..., Any]:
        return jax.jit(outputs_of(self._stack, dtype=self._dtype))

    @cached_property
    def _mean_loss(self) -> Callable[..., Any]:
        of_batch = partial(reference, self._stack, num_microbatches=1, remat="none")
        return jax.jit(of_batch(dtype=self._dtype, with_grads=False))

    def _natural(self, step: int, *, average: bool = True) -> Tree:
        _ = self._dtype  # raises for float64 if JAX has 32 bits
        return stored.merged_params(self._checkpoints, step, all_devices()[0], average=average)

    @cached_property
    def _trained(self) -> Callable[[int], tuple[Stack, Tree]]:
        """The function step -> (model, its parameters), which caches the result for one step."""

        def trained(step: int) -> tuple[Stack, Tree]:
            natural = self._natural(step)
            return self._fitting(step, natural), natural

        return lru_cache(maxsize=1)(trained)

    def _fitting(self, step: int, natural: Tree) -> Stack:
        """Return the model. CheckpointError if parameters of a checkpoint do not fit it."""
        unlike = differences(array_types(natural), array_types(self._stack.param_shapes))
        if unlike:
            raise CheckpointError(
                f"The model of {self.directory} has other parameters now than at step {step}: "
                f"{unlike[0]} (the first of {len(unlike)}). Its code or its cut into "
                f"layers has changed: restore {self.settings['model'].get('target')}."
            )
        return self._stack

    @cached_property
    def _stack(self) -> Stack:
        """The model, built for the data of the newest checkpoint. Warns if its code changed."""
        meta = self.read(None, self._checkpoints.meta)
        model, device = self.config.model, all_devices()[0]
        if isinstance(model, settings.Transformer):  # this device may lack the run's kernels
            model = replace(model, attention="auto", moe=replace(model.moe, kernel="auto"))
        lora, data = lora_of(self.config.optim), described(meta["data"])
        with _own_code(self):
            stack = make_stack(model, data, self._dtype, device, lora=lora)
        if isinstance(model, settings.CustomModel):
            before = meta["sources"].get("model", {})
            if changed := changed_modules(before, sources(model.target)):
                text = f"{', '.join(changed)} changed after {self.directory} was trained"
                warnings.warn(f"{text}; its results may differ now.", stacklevel=4)
        return stack


@contextmanager
def _own_code(run: SavedRun) -> Iterator[None]:
    """Add the directory where the run was started to an error about a missing module."""
    try:
        yield
    except ConfigError as error:
        place = run.started_in
        if place is None or not isinstance(error.__cause__, ModuleNotFoundError):
            raise
        where = f"{error} {run.directory} was started in {place}"
        raise ConfigError(f"{where}: go there, or name it in PYTHONPATH.") from error.__cause__


def load_run(directory: str | Path) -> SavedRun:
    """Return the run in a directory.

    Args:
        directory: run.dir of the run.

    Raises:
        ConfigError: The directory has no config.yaml, or `directory` is not a path.

    Example:
        run = ppctl.load_run("runs/tiny")
        loss, logits = run.metrics[-1]["loss"], run.predict(inputs)
    """
    path = path_of("directory", directory)
    if not (path / "config.yaml").is_file():
        raise ConfigError(f"{path} is no run: it has no config.yaml. `ppctl runs` lists runs.")
    return SavedRun(path)
