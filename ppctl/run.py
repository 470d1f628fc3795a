"""`ppctl train`: the loop around the train step, and all that a run leaves behind.

A run directory holds config.yaml, metrics.jsonl, eval.jsonl, tensorboard/, profile/ and checkpoints/<step>/.
"""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import yaml
from rich.console import Console

from ppctl import profile, timeline
from ppctl.assemble import Parts, assemble, model_flops, partition_text, task_costs
from ppctl.checkpoint import Checkpoints
from ppctl.config import Config
from ppctl.costs import peak_flops
from ppctl.errors import CheckpointError, ConfigError, NonFiniteError
from ppctl.metrics import Metrics
from ppctl.schedule.simulate import peak_activations, simulate

Tree = Any
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
TIMELINE_AFTER = 2  # steps that warm up before the one that run.timeline measures
LOCKSTEP_NOTICE = 1.05  # say so when lockstep ticks stretch the schedule by more than this


def train(config: Config, *, as_json: bool) -> int:
    """The exit code: 0 trained to run.num_steps, 130 or 143 interrupted after saving.

    Raises PpctlError for what the user asked wrong, NonFiniteError when the loss or a gradient is not finite.
    """
    console = Console(stderr=as_json)
    say = lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True)  # noqa: E731
    parts = assemble(config)
    run_dir = Path(config.run.dir)
    with Checkpoints(run_dir / "checkpoints", keep=config.run.checkpoint.keep) as checkpoints:
        start = resume_step(config, parts, checkpoints)
        if config.run.eval_every is not None:
            parts.data.eval_batches(config.run.eval_batches)  # refuses now what it would refuse later
        restored = checkpoints.restore(start, parts.states.natural) if start else None  # refuses another model
        if start == config.run.num_steps:
            say(f"{run_dir} has finished all run.num_steps={start} steps. Use a larger run.num_steps to go on.")
            if as_json:
                print(json.dumps({"status": "finished", "run_dir": config.run.dir, "step": start}))
            return 0
        for line in describe(parts, start):
            say(line)
        with _writing(run_dir):
            (run_dir / "config.yaml").write_text(yaml.safe_dump(asdict(config), sort_keys=False))
        program_text, compile_time_s = compile_steps(parts, console)
        say(f"compiled in {compile_time_s:.1f} s")
        state = parts.engine.new_state() if restored is None else parts.engine.from_natural(restored)
        del restored
        with Metrics(
            run_dir,
            num_steps=config.run.num_steps,
            start_step=start,
            log_every=config.run.log_every,
            tensorboard=config.run.tensorboard,
            console=console,
        ) as metrics:
            loop = _Loop(parts, program_text, compile_time_s, checkpoints, metrics)
            with _stop_requests(console) as stop:
                exit_code = loop.run(state, start, stop)
    summary = loop.summary(exit_code)
    say(f"{summary['status']} at step {summary['step']}; checkpoints, metrics and logs are in {run_dir}")
    if as_json:
        print(json.dumps(summary))
    return exit_code


def resume_step(config: Config, parts: Parts, checkpoints: Checkpoints) -> int:
    """The step to go on from, 0 for a new run. CheckpointError when that is not what run.resume asks for."""
    latest = checkpoints.latest()
    where = f"in {checkpoints.directory}"
    if latest is None:
        if config.run.resume == "must":
            raise CheckpointError(f"run.resume=must, but there is no checkpoint {where}. Use run.resume=auto.")
        return 0
    if config.run.resume == "never":
        raise CheckpointError(
            f"run.resume=never, but there is a checkpoint of step {latest} {where}. "
            "Use run.resume=auto or another run.dir."
        )
    if latest > config.run.num_steps:
        raise CheckpointError(
            f"The checkpoint of step {latest} {where} is past run.num_steps={config.run.num_steps}. "
            f"Use run.num_steps={latest} or more, or another run.dir."
        )
    meta = checkpoints.meta(latest)
    if meta["data"]["fingerprint"] != parts.data.fingerprint:
        before, now = meta["config"], asdict(config)
        keys = [("data", key) for key in before["data"] if key != "cache_dir"]
        changed = [
            f"{part}.{key}: {before[part].get(key)} then, {now[part].get(key)} now"
            for part, key in (*keys, ("model", "seq_len"), ("run", "seed"))
            if before[part].get(key) != now[part].get(key)
        ]
        raise CheckpointError(
            f"The checkpoint of step {latest} {where} was trained on other data or another order "
            f"({'; '.join(changed) or 'the files have changed'}), so its position {meta['data']['next_step']} means "
            "nothing here. Restore that, or use another run.dir."
        )
    return latest


def describe(parts: Parts, start: int) -> Iterator[str]:
    """What is about to run, a line each."""
    config, schedule, ticks = parts.config, parts.schedule, parts.ticks
    num_params = sum(math.prod(a.shape) for a in jax.tree.leaves(parts.states.natural["params"]))
    device = parts.mesh.devices.flat[0]
    model, mesh = config.model, config.mesh
    yield f"model     {model.name}, {model.num_layers} layers, {num_params:,} parameters, {parts.dtype} compute"
    yield f"data      {parts.data.source}"
    yield f"mesh      dp={mesh.dp} pp={mesh.pp} fsdp={mesh.fsdp} on {parts.mesh.size} x {device.device_kind}"
    if parts.bubble_fraction is None:
        yield f"executor  reference (no pipeline), {schedule.num_microbatches} microbatches"
    else:
        many_ticks = "" if ticks is None else f"{ticks.num_ticks} ticks, "
        yield (
            f"schedule  {schedule.name}, {schedule.num_microbatches} microbatches, {schedule.num_chunks} "
            f"chunk{'s' if schedule.num_chunks > 1 else ''} a rank, {many_ticks}bubble "
            f"{parts.bubble_fraction:.1%}, at most {max(peak_activations(schedule)):g} live activations"
        )
    if config.executor.name == "mpmd":
        barrier = ", no barrier before the optimizer" if config.executor.post_validation else ""
        yield f"executor  mpmd: a program for each stage and kind of task, dispatched by the host{barrier}"
    if ticks is not None:
        costs = task_costs(config.executor.remat)
        stretch = ticks.makespan_s(costs) / simulate(schedule, costs).makespan_s
        if stretch > LOCKSTEP_NOTICE:
            yield (
                f"note      {schedule.name} takes {stretch:.2f} times as long in the lockstep ticks of executor=spmd "
                "as on free-running ranks; schedule=eager_1f1b and interleaved take 1.00 times, with more activations"
            )
    text = partition_text(parts)
    if text is not None:
        yield f"partition {text}"
    yield f"run       {config.run.dir}, " + (f"resuming after step {start}" if start else "from the start")


def compile_steps(parts: Parts, console: Console) -> tuple[str, float]:
    """(text of the compiled step, "" if it is many programs; seconds of compiling), with a sign of life meanwhile."""
    began = time.perf_counter()
    with _alive(console, "compiling"):
        footprint = parts.engine.compile(evaluate=parts.config.run.eval_every is not None)
    return footprint.text, time.perf_counter() - began


@contextmanager
def _alive(console: Console, what: str, every_s: float = 15.0) -> Iterator[None]:
    """Shows a spinner on a terminal, elsewhere a line now and then, while the body runs."""
    if console.is_interactive:
        with console.status(f"{what} ..."):
            yield
        return
    console.print(f"{what} ...", markup=False, highlight=False)
    began, done = time.perf_counter(), threading.Event()

    def beat() -> None:
        while not done.wait(every_s):
            console.print(f"{what} ... {time.perf_counter() - began:.0f} s", markup=False, highlight=False)

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def _writing(run_dir: Path) -> Iterator[None]:
    """ConfigError where the body cannot write to run_dir, as on a full disk."""
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"run.dir={run_dir} cannot be written: {error.strerror}. Free the disk, or use another run.dir."
        ) from error


@contextmanager
def _stop_requests(console: Console) -> Iterator[list[int]]:
    """A list that receives the signals that ask the run to end. The second one of a kind ends the process at once."""
    received: list[int] = []

    def handle(number: int, _frame: Any) -> None:
        received.append(number)
        signal.signal(number, signal.SIG_DFL)  # Python's own handler would still wait for the step and the save
        console.show_cursor()  # a progress bar hides it

    before = {number: signal.signal(number, handle) for number in STOP_SIGNALS}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@jax.jit
def _is_finite(tree: Tree) -> jax.Array:
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()


@dataclass
class _Loop:
    """The training loop. Numbers of a step are read one step later, so that the devices never wait for the host."""

    parts: Parts
    program_text: str  # of the compiled step
    compile_time_s: float
    checkpoints: Checkpoints
    metrics: Metrics
    last: dict[str, Any] = field(default_factory=dict)  # the newest record
    _unread: tuple[int, Tree, float] | None = None  # finished steps, numbers, when dispatched
    _ready_s: float = 0.0

    def run(self, state: Tree, start: int, stop: list[int]) -> int:
        """The exit code, after the last step or a signal in `stop`; the last finished step is saved."""
        config = self.parts.config.run
        directory, every, eval_every = Path(config.dir) / "profile", config.checkpoint.every, config.eval_every
        batches = self.parts.data.batches(start, self.parts.engine.rows)
        window = profile.Window(directory, config.profile.start, config.profile.num_steps)
        self.last = {"step": start}
        with profile.traced(window):
            for step in range(start, config.num_steps):
                batch = self.parts.engine.put(next(batches))
                if step == window.start:
                    self._read()  # no step before the window in its trace
                dispatched_s = time.perf_counter()
                if config.timeline and step == min(start + TIMELINE_AFTER, config.num_steps - 1):
                    self._read()
                    state, numbers = self._measure(state, batch)
                else:
                    with window.step(step):
                        state, numbers = self.parts.engine.step(state, batch)
                self._read(dispatched_s)
                self._unread = (step + 1, numbers, dispatched_s)
                finished = step + 1
                if window.is_due(finished):
                    self._read()
                    self._show_profile(window.finish())
                if eval_every is not None and finished % eval_every == 0:
                    self._read()
                    self._evaluate(state, finished)
                leaving = stop[0] if stop else None  # read once: a signal that comes later finds nothing saved
                if leaving or finished == config.num_steps or (every is not None and finished % every == 0):
                    self._read()
                    if leaving is not None:
                        self.metrics.note(f"{signal.Signals(leaving).name}: saving step {finished} and leaving")
                    self._save(state, finished)
                if leaving is not None:
                    self.checkpoints.wait()
                    return 128 + leaving
            self.checkpoints.wait()
        return 0

    def summary(self, exit_code: int) -> dict[str, Any]:
        """The run in one JSON object."""
        config = self.parts.config
        return {
            "status": "interrupted" if exit_code else "finished",
            "run_dir": config.run.dir,
            "compile_time_s": self.compile_time_s,
            **self.last,
        }

    def _read(self, next_dispatched_s: float | None = None) -> None:
        """Waits for the step in flight, checks its numbers and logs them.

        next_dispatched_s: when the next step's dispatch began, if it has. A step that is done by its end counts as done
        at its beginning: a dispatch may take as long as a step.
        """
        if self._unread is None:
            return
        (finished, numbers, dispatched_s), self._unread = self._unread, None
        was_ready = next_dispatched_s is not None and all(a.is_ready() for a in jax.tree.leaves(numbers))
        loss, grad_norm, lr = (float(numbers[name]) for name in ("loss", "grad_norm", "lr"))
        now = next_dispatched_s if was_ready and next_dispatched_s is not None else time.perf_counter()
        step_time_s = now - max(self._ready_s, dispatched_s)
        self._ready_s = now
        self.last = {"step": finished, "loss": loss, "grad_norm": grad_norm, "lr": lr, "step_time_s": step_time_s}
        self.last |= self._speeds(step_time_s)
        with _writing(Path(self.parts.config.run.dir)):
            self.metrics.log(self.last)
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            # neither depends on the learning rate of this step: the state before it is lost too
            raise self._non_finite(finished, f"loss={loss}, grad_norm={grad_norm}", newest_good=finished - 2)

    def _non_finite(self, finished: int, what: str, *, newest_good: int) -> NonFiniteError:
        """The error for step `finished`, with the checkpoint to go back to."""
        self.checkpoints.wait()
        good = [step for step in self.checkpoints.steps() if step <= newest_good]
        kept = f"the checkpoint of step {good[-1]} is good" if good else "there is no checkpoint to go back to"
        lost = [str(step) for step in self.checkpoints.steps() if step > newest_good]
        away = f"; move {', '.join(lost)} away, which leads here with any settings" if lost else ""
        optim = self.parts.config.optim
        return NonFiniteError(
            f"step {finished}: {what}. Training stopped; {kept} ({self.checkpoints.directory}){away}. "
            f"Try a smaller optim.lr (now {optim.lr}), more optim.warmup_steps (now {optim.warmup_steps}) or a "
            f"smaller optim.clip_norm (now {optim.clip_norm})."
        )

    def _speeds(self, step_time_s: float) -> dict[str, Any]:
        unit, count, flops, peak, bubble = self._work
        return {
            unit: count / step_time_s,
            "model_flops_per_s": flops / step_time_s,
            "mfu_fraction": None if peak is None else flops / step_time_s / peak,
            "compile_time_s": self.compile_time_s,
            "predicted_bubble_fraction": bubble,
        }

    @cached_property
    def _work(self) -> tuple[str, int, int, float | None, float | None]:
        """Of one step: unit of speed, its number, FLOPs; FLOP/s of all devices; predicted bubble."""
        parts, config = self.parts, self.parts.config
        inputs = parts.batch_shapes["inputs"].shape
        is_text = parts.data.vocab_size is not None
        unit, count = ("tokens_per_s", math.prod(inputs)) if is_text else ("rows_per_s", inputs[0])
        device = parts.mesh.devices.flat[0]
        peak = config.run.peak_flops or peak_flops(device.device_kind, str(parts.dtype))
        all_peak = None if peak is None else peak * parts.mesh.size
        return unit, count, model_flops(parts), all_peak, parts.bubble_fraction

    def _evaluate(self, state: Tree, finished: int) -> None:
        engine = self.parts.engine
        batches = self.parts.data.eval_batches(self.parts.config.run.eval_batches, engine.rows)
        losses = [engine.loss(state, engine.put(batch)) for batch in batches]
        with _writing(Path(self.parts.config.run.dir)):
            self.metrics.log_eval(finished, {"eval_loss": sum(map(float, losses)) / len(losses)})

    def _save(self, state: Tree, finished: int) -> None:
        """Nothing; saves a state whose every number is finite. That of a step's loss says nothing of its update."""
        natural = self.parts.engine.to_natural(state)
        if not _is_finite(natural):
            raise self._non_finite(finished, "its update is not finite", newest_good=finished - 1)
        data = self.parts.data
        meta = {
            "step": finished,
            "config": asdict(self.parts.config),
            "data": {"fingerprint": data.fingerprint, "source": data.source, "next_step": finished},
            "rng": {"seed": self.parts.config.run.seed, "data_order": "a function of seed and step"},
            "versions": {name: version(name) for name in ("ppctl", "jax", "orbax-checkpoint")},
        }
        self.checkpoints.save(finished, natural, meta)

    def _measure(self, state: Tree, batch: Tree) -> tuple[Tree, Tree]:
        """A step of which every task is timed; writes and shows the timeline."""
        engine: Any = self.parts.engine  # config.check asks for one whose tasks are programs
        state, numbers, measured = timeline.timed_step(engine, self.parts.schedule, state, batch)
        directory = Path(self.parts.config.run.dir) / "timeline"
        with _writing(directory):
            for line in timeline.write(directory, measured):
                self.metrics.note(line)
        return state, numbers

    def _show_profile(self, directory: Path) -> None:
        written = None
        if self.parts.ticks is not None:
            written = profile.write_tasks(directory, self.program_text, self.parts.ticks, self.parts.mesh)
        tasks = "" if written is None else f"; tasks by rank for Perfetto in {written}"
        self.metrics.note(f"profile   {directory} (xprof, Perfetto){tasks}")
