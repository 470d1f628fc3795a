"""Where a run starts: anew, or after its newest whole checkpoint, if that is of the same data and the same model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ppctl.config import Config
from ppctl.config.changes import Change, changes
from ppctl.config.sources import changed_modules, recorded_sources
from ppctl.errors import CheckpointError, DamagedError
from ppctl.training.checkpoint.checkpoint import Checkpoints
from ppctl.training.job import TrainingJob
from ppctl.training.kept_tokenizer import changed_tokenizer
from ppctl.training.process_group import compare

Tree = Any


class Resumed(NamedTuple):
    """The start of a run: its first step, and what it goes on with."""

    step: int  # finished ones; 0: a new run
    state: Tree | None  # in natural order; None: a new run
    changed: Sequence[Change] = ()  # settings since the checkpoint

    def lines(self) -> Iterator[str]:
        """Yield a line for each setting that has changed."""
        for change in self.changed:
            yield f"changed   since step {self.step}: {change.arrow}"

    def records(self) -> list[dict[str, Any]]:
        """Return the changes as status.jsonl has them."""
        return [change._asdict() for change in self.changed]


def resume(config: Config, job: TrainingJob, checkpoints: Checkpoints, say: Callable[[str], None]) -> Resumed:
    """Return where to go on from.

    A damaged checkpoint is moved aside for the one before it, in every process alike.

    Raises:
        CheckpointError: run.resume or run.resume_with does not let the run go on so.
    """
    while True:
        try:
            step, changed = _newest(config, job, checkpoints)
            compare({"the data's fingerprint": job.data.fingerprint, "the step to go on from": step})
            state = checkpoints.restore(step, job.pipe.states.natural) if step else None
            return Resumed(step, state, changed)
        except DamagedError as error:
            name = checkpoints.set_aside(error.step)
            older = checkpoints.latest()
            say(f"{error.what}. It is now {name}; " + ("none is older" if older is None else f"trying step {older}"))


def _newest(config: Config, job: TrainingJob, checkpoints: Checkpoints) -> tuple[int, list[Change]]:
    """Return the step to go on from, 0 for a new run, and the settings that have changed since."""
    step = checkpoints.latest()
    where = f"in {checkpoints.directory}"
    if step is None:
        damaged = checkpoints.damaged()
        if damaged and config.run.resume != "never":
            raise CheckpointError(
                f"There is no good checkpoint {where}, only {', '.join(damaged)}. "
                "Use run.resume=never to start anew beside them, or another run.dir."
            )
        if config.run.resume == "must":
            raise CheckpointError(f"run.resume=must, but there is no checkpoint {where}. Use run.resume=auto.")
        return 0, []
    if config.run.resume == "never":
        raise CheckpointError(
            f"run.resume=never, but there is a checkpoint of step {step} {where}. "
            "Use run.resume=auto or another run.dir."
        )
    if step == 0:
        raise CheckpointError(
            f"The checkpoint of step 0 {where} is a model that was imported. Train it into another run.dir, with "
            f"run.start_from={config.run.dir}."
        )
    if step > config.run.num_steps:
        raise CheckpointError(
            f"The checkpoint of step {step} {where} is past run.num_steps={config.run.num_steps}. "
            f"Use run.num_steps={step} or more, or another run.dir."
        )
    meta = _meta(checkpoints, step)
    changed = [*changes(meta["config"], config), *_code_changes(job, meta)]
    which = f"The checkpoint of step {step} {where}"
    _check_data(job, meta, changed, which)
    _check_arrays(checkpoints.unlike(step, job.pipe.states.natural), changed, which)
    _check_function(config, changed, which)
    return step, changed


def _meta(checkpoints: Checkpoints, step: int) -> dict[str, Any]:
    """Return what a run saved with a checkpoint. CheckpointError where another program did, in ppctl's form."""
    meta = checkpoints.meta(step)
    match meta:
        case {"config": {"data": {}, "model": {}, "run": {}}, "data": {"fingerprint": str(), "next_step": int()}}:
            return meta
    raise CheckpointError(
        f"The checkpoint of step {step} in {checkpoints.directory} was not saved by `ppctl train`: its meta/data.json "
        "has no config, or no data with fingerprint and next_step. Use another run.dir."
    )


def _code_changes(job: TrainingJob, meta: Mapping[str, Any]) -> Iterator[Change]:
    """Yield the modules of the user's model and data whose code has changed; older checkpoints have none recorded."""
    for part, before in recorded_sources(meta).items():
        now = job.sources.get(part, {})
        for module in changed_modules(before, now):
            old, new = (digests[module][1] if module in digests else None for digests in (before, now))
            yield Change(f"{part}.code({module})", old, new)


def _check_data(job: TrainingJob, meta: Mapping[str, Any], changed: Sequence[Change], which: str) -> None:
    if meta["data"]["fingerprint"] == job.data.fingerprint:
        return
    tokenizer = changed_tokenizer(job.config)
    of_data = [] if tokenizer is None else [tokenizer]
    of_data += [each.text for each in changed if each.part == "data" or each.name in ("model.seq_len", "run.seed")]
    raise CheckpointError(
        f"{which} was trained on other data or another order ({'; '.join(of_data) or 'the files have changed'}), so "
        f"its position {meta['data']['next_step']} means nothing here. Restore that, or use another run.dir."
    )


def _check_arrays(unlike: Sequence[str], changed: Sequence[Change], which: str) -> None:
    """Raise CheckpointError where the checkpoint holds other arrays than the job needs, by the settings that differ."""
    if not unlike:
        return
    others = f" (the first of {len(unlike)} arrays that differ)" if len(unlike) > 1 else ""
    found = [*(each.text for each in changed if each.is_of_arrays), unlike[0] + others]
    raise CheckpointError(f"{which} holds other arrays: {'; '.join(found)}. Restore that, or use another run.dir.")


def _check_function(config: Config, changed: Sequence[Change], which: str) -> None:
    """Raise CheckpointError where the model computes something else from the same arrays, unless that is asked for."""
    found = [each.text for each in changed if each.is_of_function]
    if found and config.run.resume_with != "changed":
        raise CheckpointError(
            f"{which} is of another model: {'; '.join(found)}. Restore that, use another run.dir, or insist with "
            "run.resume_with=changed, which goes on from its parameters."
        )
