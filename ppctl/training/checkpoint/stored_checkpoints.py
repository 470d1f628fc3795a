"""Reading of a run's checkpoints: their steps, settings and arrays, each with its checksums.

All processes of a run must call each method. An error of one process is raised in all.
"""

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import jax
from jax.sharding import SingleDeviceSharding
from orbax.checkpoint import v1 as ocp

from ppctl.errors import CheckpointError, DamagedError
from ppctl.model.lora import Lora, merged
from ppctl.model.trainable_parameters import AVERAGE, averaged, is_none, trained_part
from ppctl.reports.foreign_files import check_place
from ppctl.reports.run_files import checkpoint_steps
from ppctl.training.checkpoint import manifest, orbax_io
from ppctl.training.checkpoint.manifest import Manifest

T = TypeVar("T")
Gather = Callable[[str], list[str]]  # a text of this process -> those of all, in process order


def of_one_process(text: str) -> list[str]:
    return [text]


class StoredCheckpoints:
    """The checkpoints below `directory`, for reading. Safe while another job writes.

    Reading truncated, flipped or missing data raises DamagedError.

    directory: shared by all processes; ConfigError if Orbax would misread its path. gather: gathers
    a text of each process.
    """

    def __init__(self, directory: Path | str, gather: Gather = of_one_process):
        self.directory = Path(directory).absolute()  # Orbax refuses relative paths
        check_place(self.directory, "run.dir", saves=False)
        self.current: int | None = None  # the step whose state was last saved or restored
        self.moved = set[int]()  # steps set aside: a shared file system may still list them
        self.reading = orbax_io.context(alone=True)
        self._gather = gather
        orbax_io.silence_orbax()

    def steps(self) -> tuple[int, ...]:
        """Return the steps of the finished checkpoints, ascending."""
        # Orbax's list also holds the step whose save is still under way.
        return tuple(step for step in checkpoint_steps(self.directory) if step not in self.moved)

    def latest(self) -> int | None:
        """Return the step of the newest finished checkpoint, or None."""
        return max(self.steps(), default=None)

    def meta(self, step: int) -> dict[str, Any]:
        """Return the JSON saved with `step`. CheckpointError if missing, DamagedError if faulty."""
        return self._manifest(step).meta

    def unlike(self, step: int, abstract_state: Any) -> list[str]:
        """Return a phrase for each array whose saved dtype or shape differs from the wanted one."""
        wanted = manifest.array_types(abstract_state)
        return manifest.differences(self._manifest(step).arrays, wanted)

    def restore(self, step: int, abstract_state: Any) -> Any:
        """Return the state saved at `step`, in the structure and shardings of `abstract_state`.

        abstract_state: `jax.ShapeDtypeStruct`s with shardings, on any mesh. Call `unlike` first:
        Orbax casts to another dtype silently. DamagedError if files are unreadable or a checksum
        differs, CheckpointError if there is no such checkpoint.
        """
        record = self._manifest(step)
        state = self._load(step, {"state": abstract_state})["state"]
        self._check(step, record, state)
        self.current = step
        return state

    def param_types(self, step: int) -> dict[str, str]:
        """Return dtype and shape of each parameter saved at `step`, by name. Raises as `meta`."""
        arrays, prefix = self._manifest(step).arrays, "params/"
        return {name[len(prefix) :]: arrays[name] for name in arrays if name.startswith(prefix)}

    def restore_params(self, step: int, place: Any, *, average: bool = True) -> Any:
        """Return the parameters saved at `step`, in their saved structure. Raises as `restore`.

        place: a device, or `jax.ShapeDtypeStruct`s with shardings. average: whether to return the
        average in place of the trained parameters, if the run has optim.ema.
        """
        record, prefix = self._manifest(step), f"optimizer/{AVERAGE}/"
        has_average = average and any(name.startswith(prefix) for name in record.arrays)
        try:
            stored = orbax_io.described(self._path(step), self.reading)
            wanted, held = stored["params"], stored["optimizer"][AVERAGE] if has_average else None
        except Exception as error:  # Orbax has no error class for unreadable files
            raise self._damaged(step, "the description of its arrays is damaged") from error
        if isinstance(place, jax.Device):
            on_device = partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(place))
            place = jax.tree.map(lambda a: on_device(a.shape, a.dtype), wanted)
        parts = {"params": place}
        if has_average:  # Orbax does not read arrays whose entry is None
            frozen = jax.tree.map(is_none, held, is_leaf=is_none)
            trained = jax.tree.map(operator.not_, frozen)
            parts = {"params": trained_part(place, frozen)}
            parts["optimizer"] = {AVERAGE: trained_part(place, trained)}
        self.reading.pytree.loading.partial_load = True
        state = self._load(step, {"state": parts})["state"]
        self._check(step, record, state)
        return averaged(state)["params"]

    def aside(self, kind: str) -> tuple[str, ...]:
        """Return the names of the checkpoints that `set_aside` has renamed as `kind`."""
        return tuple(sorted(path.name for path in self.directory.glob(f"*.{kind}*")))

    def went_back(self, step: int) -> bool:
        """Return whether `step` is the last one that the run went back to."""
        return bool(self._gather("yes" if self.mark(step).exists() else "")[0])  # by process 0

    def mark(self, step: int) -> Path:
        return self.directory / f".went-back-to-{step}"

    def _manifest(self, step: int) -> Manifest:
        record = self._load(step, {"meta": None})["meta"]
        try:
            return manifest.from_json(record, step)
        except ValueError as error:  # raised in every process: all read the same file
            raise self._damaged(step, orbax_io.error_reason(error)) from error

    def _check(self, step: int, record: Manifest, state: Any) -> None:
        """Raise DamagedError if the checksum of a restored array differs from the saved one."""
        checksums = manifest.digest(state).checksums
        wrong = [name for name in checksums if checksums[name] != record.checksums[name]]
        if wrong:
            others = f" (the first of {len(wrong)})" if len(wrong) > 1 else ""
            what = f"{wrong[0]} does not have the checksum it was saved with{others}"
            raise self._damaged(step, what)

    def _load(self, step: int, items: dict[str, Any]) -> dict[str, Any]:
        path = self._path(step)

        def failed(reason: str) -> Exception:
            if orbax_io.PASSING.search(reason):
                what = f"Checkpoint {path} cannot be read: {reason}"
                return CheckpointError(f"{what}. Start again once it can.")
            if step not in self.steps():
                what = f"Checkpoint {path} was removed while it was read, by a run that saves"
                return CheckpointError(f"{what}. Name a newer one, or raise run.checkpoint.keep.")
            return self._damaged(step, reason)

        with raised_together(self._gather, failed), self.reading:
            return ocp.load_checkpointables(str(path), items)

    def _path(self, step: int) -> Path:
        """Return the directory of `step`. CheckpointError if there is no such checkpoint."""
        if step not in (steps := self.steps()):
            held = "it holds none. Use another run.dir"
            held = f"it holds {listed(steps)}. Use one of them" if steps else held
            what = f"No checkpoint of step {step} in {self.directory}: {held}"
            raise CheckpointError(f"{what}, or run.resume=auto to take the newest one, if any.")
        return self.directory / str(step)

    def _damaged(self, step: int, reason: str) -> DamagedError:
        older = [other for other in self.steps() if other < step]
        resume = f"resume from step {older[-1]}" if older else "start from the beginning"
        what = f"Checkpoint {self.directory / str(step)} cannot be read: {reason}"
        return DamagedError(step, what, f"Move it away to {resume}.")


@contextlib.contextmanager
def raised_together(gather: Gather, failed: Callable[[str], Exception]) -> Iterator[None]:
    """Raise failed(reason) in all processes if the body fails in one."""
    error, reason, late = None, "", f"not finished after {orbax_io.SAVE_TIMEOUT_S} s"
    try:
        yield
    except Exception as failure:
        error = failure
        reason = late if orbax_io.is_timeout(error) else orbax_io.error_reason(error)
    reasons = gather(reason)
    # a time-out comes last: it follows from another process's failure
    failures = sorted((why == late, number) for number, why in enumerate(reasons) if why)
    if failures:
        _, number = failures[0]
        process = f" (process {number})" if len(reasons) > 1 else ""
        raise failed(f"{reasons[number]}{process}") from error


def read_newest(newest: Callable[[], int], read: Callable[[int], T]) -> T:
    """Return read(step) of the newest checkpoint; repeat if a save has replaced it meanwhile."""
    step = newest()
    while True:
        try:
            return read(step)
        except CheckpointError:
            before, step = step, newest()
            if step == before:
                raise


def listed(steps: Sequence[int]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, steps))}"


def stored_lora(checkpoints: StoredCheckpoints, step: int) -> Lora | None:
    """Return the adapters of a checkpoint, from its run's settings; None if it has no adapters."""
    optim = checkpoints.meta(step).get("config", {}).get("optim", {})
    if not isinstance(optim, Mapping) or optim.get("train") != "lora":
        return None
    targets = None if optim["lora_targets"] is None else tuple(optim["lora_targets"])
    return Lora(optim["lora_rank"], optim["lora_alpha"], targets, optim["lora_dropout"])


def merged_params(
    checkpoints: StoredCheckpoints, step: int, device: Any, *, average: bool = True
) -> Any:
    """Return a checkpoint's parameters on one device, in natural order, with adapters merged.

    average: as in `StoredCheckpoints.restore_params`.
    """
    lora = stored_lora(checkpoints, step)
    params = checkpoints.restore_params(step, device, average=average)
    return params if lora is None else jax.jit(partial(merged, scale=lora.scale))(params)
