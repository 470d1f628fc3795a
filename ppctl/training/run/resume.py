"""The start of a run: anew, after its newest good checkpoint, or from another run's parameters."""

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from ppctl.config import Config
from ppctl.config.changed_settings import Change, changes
from ppctl.config.code_digests import changed_modules
from ppctl.errors import CheckpointError, DamagedError
from ppctl.model.lora import with_base, without_adapters
from ppctl.model.stack import init
from ppctl.training.checkpoint.checkpoint import Checkpoints, aside_name
from ppctl.training.checkpoint.manifest import array_types, differences
from ppctl.training.checkpoint.stored_checkpoints import StoredCheckpoints, read_newest, stored_lora
from ppctl.training.pipeline.built_in_models import lora_of
from ppctl.training.pipeline.engines.train_states import shardings_of
from ppctl.training.pipeline.job import TrainingJob
from ppctl.training.pipeline.optimizers import init_state, rates_of
from ppctl.training.run.kept_tokenizer import changed_tokenizer
from ppctl.training.run.metrics import FILES as METRICS, SKIPPED
from ppctl.training.run.process_group import compare

Tree = Any
LR_NOTICE = 0.01  # relative change of the learning rate above which a resume prints it


class Resumed(NamedTuple):
    """The start of a run: finished steps, state, and settings changed since the checkpoint."""

    step: int  # finished steps; 0: a new run
    state: Tree | None  # arrays in natural order; None: a new run
    changed: Sequence[Change] = ()  # settings, code and learning rate


def resume(job: TrainingJob, checkpoints: Checkpoints, say: Callable[[str], None]) -> Resumed:
    """Return the start of a run, from its newest good checkpoint if there is one.

    Damaged checkpoints are set aside. CheckpointError if run.resume or run.resume_with forbids it.
    """
    if (back := job.config.run.resume_step) is not None:
        _go_back(back, checkpoints, say)
    while True:
        try:
            step, changed = _newest(job, checkpoints.stored)
            fingerprint = job.data.fingerprint
            compare({"the data's fingerprint": fingerprint, "the step to go on from": step})
            state = checkpoints.stored.restore(step, job.pipe.states.natural) if step else None
            return Resumed(step, state, changed)
        except DamagedError as error:
            name = checkpoints.set_aside(error.step)
            older = checkpoints.stored.latest()
            then = "no checkpoint is older" if older is None else f"trying step {older}"
            say(f"{error.what}. It is now {name}; {then}")


def _go_back(step: int, checkpoints: Checkpoints, say: Callable[[str], None]) -> None:
    """Set aside the checkpoints after `step`, unless the last start that did went back to it."""
    stored, where = checkpoints.stored, checkpoints.directory
    steps, is_done = stored.steps(), stored.went_back(step)
    if step not in steps and not (is_done and steps):
        held = f"it holds {', '.join(map(str, steps))}" if steps else "it holds none"
        what = f"run.resume={step}: no checkpoint of this step in {where}, {held}"
        raise CheckpointError(f"{what}. Use a step of one, or run.resume=auto.")
    if is_done:
        say(
            f"note      run.resume={step}: an earlier start went back, and this one goes on from "
            f"it. To go back again, remove {where}/.went-back-to-{step}"
        )
        return
    if steps[-1] > step and jax.process_index() == 0:
        for file in (where.parent / name for name in (*METRICS, SKIPPED)):
            if file.exists() and file.stat().st_size:
                name = aside_name(where, f"{file.stem}.after-{step}", file.suffix)
                shutil.copyfile(file, where / name)
    if names := checkpoints.go_back(step):
        say(f"going back to step {step}; later checkpoints are kept as {', '.join(names)}")


def _newest(job: TrainingJob, checkpoints: StoredCheckpoints) -> tuple[int, list[Change]]:
    """Return the step to go on from (0: a new run) and the changes since its checkpoint."""
    step, run = checkpoints.latest(), job.config.run
    where = f"in {checkpoints.directory}"
    # 1. no checkpoint: a new run
    if step is None:
        damaged = checkpoints.aside("damaged")
        if damaged and run.resume != "never":
            raise CheckpointError(
                f"There is no good checkpoint {where}, only {', '.join(damaged)}. "
                "Use run.resume=never to start anew next to them, or another run.dir."
            )
        if run.resume == "must":
            what = f"run.resume=must, but there is no checkpoint {where}"
            raise CheckpointError(f"{what}. Use run.resume=auto.")
        return 0, []
    # 2. checkpoints that this request cannot go on from
    which = f"The checkpoint of step {step} {where}"
    if run.resume == "never":
        what = f"run.resume=never, but there is a checkpoint of step {step} {where}"
        raise CheckpointError(f"{what}. Use run.resume=auto or another run.dir.")
    if step == 0:
        use = f"Train it into another run.dir, with run.start_from={run.dir}"
        raise CheckpointError(f"{which} is an imported model. {use}.")
    if step > run.num_steps:
        what = f"{which} is past run.num_steps={run.num_steps}"
        raise CheckpointError(f"{what}. Use run.num_steps={step} or more, or another run.dir.")
    # 3. changes of settings and code
    meta = checkpoints.meta(step)
    changed = [*changes(meta["config"], job.settled)]
    for part, before in meta["sources"].items():  # the user's model and data
        now = job.sources.get(part, {})
        modules = changed_modules(before, now)
        changed += [Change(f"{part}.code({m})", before.get(m), now.get(m)) for m in modules]
    changed += lr_changes(meta["config"], job.config, step)
    _check(job, checkpoints, step, changed, which)
    return step, changed


def lr_changes(before: Mapping[str, Any], config: Config, step: int) -> list[Change]:
    """Return a Change if changed settings make the learning rate jump after `step` steps."""
    old = rates_of(before["optim"], before["run"]["num_steps"])
    now = rates_of(asdict(config.optim), config.run.num_steps)
    values = old(step - 1), old(step), now(step)
    last, planned, first = (np.asarray(value).item() for value in values)
    if math.isclose(planned, first, rel_tol=LR_NOTICE):
        return []
    return [Change("lr", f"{last:.1e} at step {step}", f"{first:.1e} at step {step + 1}")]


def _check(
    job: TrainingJob, checkpoints: StoredCheckpoints, step: int, changed: list[Change], which: str
) -> None:
    """Raise CheckpointError, naming changed settings, if a run cannot go on from this step."""
    config, of_data = job.config, checkpoints.meta(step)["data"]
    # 1. the data
    if of_data["fingerprint"] != job.data.fingerprint:
        tokenizer = changed_tokenizer(Path(config.run.dir), config.data)
        reasons = [] if tokenizer is None else [tokenizer]
        others = "model.seq_len", "run.seed"
        reasons += [each.text for each in changed if each.part == "data" or each.name in others]
        raise CheckpointError(
            f"{which} was trained on other data or another order "
            f"({'; '.join(reasons) or 'the files have changed'}), so its position "
            f"{of_data['next_step']} is invalid for these data. Restore that, or use another "
            "run.dir."
        )
    # 2. the arrays
    if unlike := checkpoints.unlike(step, job.pipe.states.natural):
        others = f" (the first of {len(unlike)} arrays that differ)" if len(unlike) > 1 else ""
        phrases = [*(each.text for each in changed if each.is_of_arrays), unlike[0] + others]
        what = f"{which} holds other arrays: {'; '.join(phrases)}"
        raise CheckpointError(f"{what}. Restore that, or use another run.dir.")
    # 3. the model
    phrases = [each.text for each in changed if each.is_of_function]
    if phrases and config.run.resume_with != "changed":
        raise CheckpointError(
            f"{which} is of another model: {'; '.join(phrases)}. Restore that, use another "
            "run.dir, or insist with run.resume_with=changed, which goes on from its parameters."
        )


# --- parameters of another run --------------------------------------------------------------------


def state_from(job: TrainingJob) -> Tree | None:
    """Return the state before step 1 with the newest parameters of run.start_from.

    It has natural order and a new optimizer state; None if run.start_from is null. A run with
    optim.ema gives its average, as to exports. With optim.train=lora, parameters without adapters
    become the base of new adapters. CheckpointError if the parameters are missing or do not fit.
    """
    # 1. the parameters
    lora, directory = lora_of(job.config.optim), job.config.run.start_from
    if directory is None:
        return None
    natural, stack = job.pipe.states.natural, job.pipe.stack
    checkpoints = StoredCheckpoints(Path(directory) / "checkpoints")

    def newest() -> int:
        step = checkpoints.latest()
        if step is None:
            what = f"run.start_from={directory} has no checkpoint"
            raise CheckpointError(f"{what}. Name a run directory, as `ppctl import` writes one.")
        return step

    def read(step: int) -> tuple[Tree, bool]:
        # all must read the same step, because each process reads a part of each array
        compare({"the step of run.start_from": step})
        stored, is_base = stored_lora(checkpoints, step), False
        if stored is None:
            is_base = lora is not None
        elif lora is None or stored != replace(lora, dropout=stored.dropout):
            raise CheckpointError(
                f"run.start_from={directory} has adapters, {stored}, and this run trains "
                f"{'none' if lora is None else lora}. Use the same optim.train and optim.lora "
                f"settings, or merge them: ppctl export {directory} --out MODEL, ppctl import "
                "MODEL --out RUN_DIR."
            )
        wanted = without_adapters(natural["params"]) if is_base else natural["params"]
        fault = start_fault(checkpoints.param_types(step), array_types(wanted))
        if fault is not None:
            raise CheckpointError(f"run.start_from={directory} has {fault}")
        return checkpoints.restore_params(step, wanted), is_base

    params, is_base = read_newest(newest, read)

    # 2. a new state with these parameters
    def fresh(params: Tree) -> Tree:
        params = with_base(init(stack, job.config.run.seed), params) if is_base else params
        return init_state(params, job.pipe.optimizer, stack.options.trainable)

    return jax.jit(fresh, out_shardings=shardings_of(natural))(params)


def start_fault(stored: Mapping[str, str], wanted: Mapping[str, str]) -> str | None:
    """Return the reason why a model cannot start from stored parameters; None if it can.

    >>> start_fault({"w": "float32[2]"}, {"w": "float64[2]"}).partition(": ")[0]
    'another dtype'
    """
    unlike = differences(stored, wanted)
    if not unlike:
        return None
    what, use = "another model", "its recipe, or the model settings in its config.yaml"
    shapes = [{k: each.partition("[")[2] for k, each in of.items()} for of in (stored, wanted)]
    if shapes[0] == shapes[1]:
        name = next(name for name in sorted(stored) if stored[name] != wanted[name])
        what, use = "another dtype", f"run.dtype={stored[name].partition('[')[0]}"
    return f"{what}: {unlike[0]} (the first of {len(unlike)}). Use {use}."
