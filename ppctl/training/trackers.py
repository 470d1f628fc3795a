"""Trackers beside TensorBoard: Weights & Biases and MLflow, each on a thread of its own.

Training never waits for one and never ends by one: what fails is said in a line, and its records are left out from then
on. Where no server is set up, both write into the run directory.
"""

from __future__ import annotations

import json
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from ppctl.errors import ConfigError
from ppctl.reports.foreign import from_json, read_file
from ppctl.reports.run_files import TRACKERS_FILE
from ppctl.reports.terminal import replace_file

PROJECT = "ppctl"  # of Weights & Biases, and MLflow's experiment, where the environment names none
MOST_ID_BYTES = 4096
MOST_PARAMS = 100  # that MLflow takes in one request
WANDB_S = 20.0  # in which Weights & Biases must answer at the start
END_S = 30.0  # in which a tracker must take what is left when training has ended

Values = Mapping[str, float]


@dataclass(frozen=True)
class Start:
    """One start of a run, as a tracker records it."""

    run_dir: Path
    name: str
    settings: Mapping[str, Any]  # as config.yaml has them
    id: str | None  # of the same run at an earlier start, as the tracker named it


class Tracker(Protocol):
    """A run at a tracker's. All calls come from one thread; any may raise."""

    id: str  # by which a later start goes on with the same run
    place: str  # where it writes, for people

    def log(self, values: Values, step: int) -> None: ...
    def end(self, *, is_finished: bool) -> None: ...


class WandbRun:
    """A run of Weights & Biases: offline, unless WANDB_MODE or a key of this machine's says otherwise."""

    def __init__(self, start: Start):
        import wandb

        mode: Any = os.environ.get("WANDB_MODE") or ("online" if wandb.login(prompt=False) else "offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            dir=start.run_dir,
            mode=mode,
            id=start.id,
            resume="allow",
            name=start.name,
            config=dict(start.settings),
            settings=wandb.Settings(silent=True, console="off", init_timeout=WANDB_S),
        )
        self._run.define_metric("*", step_metric="step")  # steps that a resumed run repeats are no error then
        self.id = self._run.id
        offline = Path(self._run.dir).parent
        self.place = f"offline in {offline}: wandb sync {offline}" if mode == "offline" else str(self._run.url or mode)

    def log(self, values: Values, step: int) -> None:
        self._run.log({**values, "step": step})

    def end(self, *, is_finished: bool) -> None:
        self._run.finish(exit_code=0 if is_finished else 1)


class MlflowRun:
    """A run of MLflow, at MLFLOW_TRACKING_URI or in a database in the run directory."""

    def __init__(self, start: Start):
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        own = f"sqlite:///{(start.run_dir / 'mlflow.db').absolute()}"
        self.place = os.environ.get("MLFLOW_TRACKING_URI") or own
        self._client = MlflowClient(tracking_uri=self.place)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self._client.get_experiment_by_name(name)
        own_files = (start.run_dir / "mlflow").absolute().as_uri() if self.place == own else None
        where = self._client.create_experiment(name, own_files) if experiment is None else experiment.experiment_id
        if start.id is not None:
            self.id = start.id
            self._client.update_run(self.id, status="RUNNING")
            return  # MLflow refuses a parameter with another value
        self.id = self._client.create_run(where, run_name=start.name).info.run_id
        params = [Param(key, str(value)) for key, value in flat(start.settings).items()]
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self.id, params=params[first : first + MOST_PARAMS])

    def log(self, values: Values, step: int) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        self._client.log_batch(self.id, [Metric(key, value, now_ms, step) for key, value in values.items()])

    def end(self, *, is_finished: bool) -> None:
        self._client.set_terminated(self.id, "FINISHED" if is_finished else "KILLED")


TRACKERS: dict[str, Callable[[Start], Tracker]] = {"wandb": WandbRun, "mlflow": MlflowRun}


def check_trackers(names: Sequence[str]) -> None:
    """Raise a ConfigError for a tracker whose package is not here."""
    for name in names:
        if name in TRACKERS and find_spec(name) is None:
            raise ConfigError(
                f"run.trackers={','.join(names)} needs the package {name}, which is not installed. "
                f"Use pip install 'ppctl[{name}]', or leave {name} out."
            )


class BackgroundTracker:
    """A tracker on a thread of its own, which begins with `begin`.

    note: prints a line, from any thread.
    """

    def __init__(self, name: str, note: Callable[[str], None], end_s: float = END_S):
        self.name, self._note, self._end_s = name, note, end_s
        self._jobs: queue.SimpleQueue[Callable[[Tracker], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.is_finished = False  # the run, to its last step; set before `close`

    def begin(self, run_dir: Path, name: str, settings: Mapping[str, Any]) -> None:
        """Open the run at the tracker, or go on with that of an earlier start."""
        start = Start(run_dir, name, settings, _known_ids(run_dir).get(self.name))
        self._thread = threading.Thread(target=self._work, args=(start,), name=self.name, daemon=True)
        self._thread.start()

    def log(self, values: Mapping[str, float | None], step: int, tag: Callable[[str], str]) -> None:
        """Record each value that is known, by the tag of its key."""
        known = {tag(key): value for key, value in values.items() if key != "step" and value is not None}
        self._jobs.put(lambda tracker: tracker.log(known, step))

    def close(self) -> None:
        """End the run at the tracker, after what is left to record. May be called again."""
        if self._thread is None:
            return
        self._jobs.put(None)
        self._thread.join(self._end_s)
        if self._thread.is_alive():
            self._note(
                f"note      {self.name} has not taken all records within {self._end_s:g} s: the rest is left out"
            )
        self._thread = None

    def _work(self, start: Start) -> None:
        try:
            tracker = TRACKERS[self.name](start)
            _remember_id(start.run_dir, self.name, tracker.id)
            self._note(f"{self.name:<9} {tracker.place}")
            while (job := self._jobs.get()) is not None:
                job(tracker)
            tracker.end(is_finished=self.is_finished)
        except (Exception, SystemExit) as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            self._note(f"note      {self.name} failed: {reason[:200]}. Training goes on without it")


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings by their names with dots.

    >>> flat({"model": {"d_model": 64}, "run": {"seed": 0}})
    {'model.d_model': 64, 'run.seed': 0}
    """
    found: dict[str, Any] = {}
    for key, value in settings.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


_ids_lock = threading.Lock()


def _known_ids(run_dir: Path) -> dict[str, str]:
    """Return the ids of the run at trackers, by their names."""
    with suppress(OSError, ValueError, RecursionError):
        found = from_json(read_file(run_dir / TRACKERS_FILE, MOST_ID_BYTES))
        if isinstance(found, dict):
            return {name: id for name, id in found.items() if isinstance(id, str)}
    return {}


def _remember_id(run_dir: Path, name: str, id: str) -> None:
    with _ids_lock:
        replace_file(run_dir / TRACKERS_FILE, json.dumps(_known_ids(run_dir) | {name: id}) + "\n")
