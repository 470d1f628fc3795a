"""Trackers: TensorBoard, Weights & Biases and MLflow, each on a separate thread.

Training does not wait for a tracker, and goes on if one fails: a failure prints a line and drops
later records. Without a server, trackers write into the run directory.
"""

import json
import os
import queue
import shutil
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ppctl.errors import ConfigError, one_line
from ppctl.reports.foreign_files import from_json
from ppctl.reports.recorded_settings import setting_names, setting_value
from ppctl.reports.run_files import TRACKERS_FILE
from ppctl.reports.terminal_output import replace_file
from ppctl.user_files import read_file

PROJECT = "ppctl"  # default project of Weights & Biases and experiment of MLflow
MOST_ID_BYTES = 4096  # bytes of TRACKERS_FILE
MOST_PARAMS = 100  # parameters in one request to MLflow
WANDB_S = 20.0  # seconds for Weights & Biases to answer at the start
FLUSH_S = 10.0  # seconds between writes of TensorBoard's events to the disk
END_S = 30.0  # seconds for a tracker to take the last records

Values = Mapping[str, float]


class RunFacts(NamedTuple):
    """The arguments of a tracker that opens a run."""

    run_dir: Path
    name: str
    settings: Mapping[str, Any]
    first_step: int
    id: str | None = None  # the tracker's id of this run, from an earlier start


class Tracker(NamedTuple):
    """An open run at a tracker. All calls come from one thread; each may raise."""

    log: Callable[[Values, int], object]  # arguments: values by tag, step
    end: Callable[[bool], object]  # argument: True if the run has reached its last step
    id: str | None = None  # key of the run, for a later start that continues it
    place: str | None = None  # text to print: the place of the records


def tensorboard(run: RunFacts) -> Tracker:
    """Open TensorBoard's log of one start of a run: scalars, and the settings as text.

    A kill loses at most ten seconds of events. TensorBoard hides earlier starts' records from
    first_step on. tensorboardX's thread would print a traceback on a full disk, so events are
    written without it.
    """
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto import event_pb2
    from tensorboardX.summary import scalar, text

    # 1. the file; its name has the step, so that a resume within a second does not overwrite it
    folder, step, flushed_s = run.run_dir / "tensorboard", run.first_step, time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    writer = EventsWriter(str(folder / "events"), f".{step}")
    messages: Any = event_pb2  # its classes are created at import

    def write(step: int, **content: Any) -> None:
        nonlocal flushed_s
        writer.write_event(messages.Event(wall_time=time.time(), step=step, **content))
        if time.monotonic() > flushed_s + FLUSH_S:
            writer.flush()
            flushed_s = time.monotonic()

    def log(values: Values, step: int) -> None:
        for tag, value in values.items():
            write(step, summary=scalar(tag, value))

    # 2. the first events
    write(step, session_log=messages.SessionLog(status=messages.SessionLog.START))
    settings = textwrap.indent(yaml.safe_dump(dict(run.settings), sort_keys=False), "    ")
    write(step, summary=text("run/config", settings))  # indented: a code block of Markdown
    return Tracker(log, lambda _: writer.close())


def wandb(run: RunFacts) -> Tracker:
    """Open a run of Weights & Biases: offline, unless WANDB_MODE or a stored key is set."""
    import wandb

    mode: Any = os.environ.get("WANDB_MODE")
    mode = mode or ("online" if wandb.login(prompt=False) else "offline")
    where = {"project": os.environ.get("WANDB_PROJECT", PROJECT), "dir": run.run_dir}
    how = {"mode": mode, "id": run.id, "resume": "allow", "name": run.name}
    quiet = wandb.Settings(silent=True, console="off", init_timeout=WANDB_S)
    opened = wandb.init(**where, **how, config=dict(run.settings), settings=quiet)
    # steps are a metric, because W&B's step counter would drop steps that a resumed run repeats
    opened.define_metric("*", step_metric="step")
    folder = Path(opened.dir).parent
    offline = f"offline in {folder}: wandb sync {folder}"
    return Tracker(
        log=lambda values, step: opened.log({**values, "step": step}),
        end=lambda is_finished: opened.finish(exit_code=0 if is_finished else 1),
        id=opened.id,
        place=offline if mode == "offline" else str(opened.url or mode),
    )


def mlflow(run: RunFacts) -> Tracker:
    """Open a run of MLflow at MLFLOW_TRACKING_URI, else in a database in the run directory."""
    from mlflow.entities import Metric, Param
    from mlflow.tracking import MlflowClient

    # 1. the server or database, and the experiment
    database = run.run_dir.absolute() / "mlflow.db"
    local = f"sqlite:///{database}"
    place, id = os.environ.get("MLFLOW_TRACKING_URI") or local, run.id
    if place == local and not database.exists():
        # a kill would leave an unusable database: make it elsewhere, then rename it
        part = database.with_name(f".{database.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        made = Path(tempfile.mkdtemp(dir=part), database.name)  # MLflow remembers names
        MlflowClient(tracking_uri=f"sqlite:///{made}").search_experiments()
        made.replace(database)
        shutil.rmtree(part)
    client = MlflowClient(tracking_uri=place)
    project = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    experiment = client.get_experiment_by_name(project)
    files = (run.run_dir / "mlflow").absolute().as_uri() if place == local else None
    # 2. the run; only a new one logs parameters, because MLflow refuses to change them
    if id is None:
        known = experiment and experiment.experiment_id
        where = known or client.create_experiment(project, files)
        id = client.create_run(where, run_name=run.name).info.run_id
        names = setting_names(run.settings)
        params = [Param(name, str(setting_value(run.settings, name))) for name in names]
        for first in range(0, len(params), MOST_PARAMS):
            client.log_batch(id, params=params[first : first + MOST_PARAMS])
    else:
        client.update_run(id, status="RUNNING")

    def log(values: Values, step: int) -> None:
        now_ms = int(time.time() * 1000)
        client.log_batch(id, [Metric(key, value, now_ms, step) for key, value in values.items()])

    end = lambda is_finished: client.set_terminated(id, "FINISHED" if is_finished else "KILLED")  # noqa: E731
    return Tracker(log, end, id, place)


TRACKERS = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow}


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for a tracker whose package is not installed."""
    for name in names:
        if name != "tensorboard" and find_spec(name) is None:
            raise ConfigError(
                f"run.trackers={','.join(names)} needs the package {name}, which is not installed. "
                f"Use pip install 'ppctl[{name}]', or leave {name} out."
            )


class BackgroundTracker:
    """A tracker on a separate thread. It opens a run, or continues that of an earlier start.

    note: prints a line; called from the thread. end_s: seconds that `close` waits.
    """

    def __init__(self, name: str, run: RunFacts, note: Callable[[str], None], end_s: float = END_S):
        self.name, self._note, self._end_s = name, note, end_s
        self._records = queue.SimpleQueue[tuple[Values, int] | None]()
        self._is_finished = False
        self._thread = threading.Thread(target=self._work, args=[run], name=name, daemon=True)
        self._thread.start()

    def log(self, values: Values, step: int) -> None:
        """Queue values by tag for the tracker."""
        self._records.put((values, step))

    def close(self, *, is_finished: bool) -> None:
        """Record the remaining values and end the tracker's run. May be called twice."""
        self._is_finished = is_finished
        self._records.put(None)
        self._thread.join(self._end_s)
        if self._thread.is_alive():
            late = f"{self.name} has not taken all records within {self._end_s:g} s"
            self._note(f"note      {late}: the rest is left out")

    def _work(self, run: RunFacts) -> None:
        try:
            tracker = TRACKERS[self.name](run._replace(id=_known_ids(run.run_dir).get(self.name)))
            if tracker.id is not None:
                with _ids_lock:
                    ids = _known_ids(run.run_dir) | {self.name: tracker.id}
                    replace_file(run.run_dir / TRACKERS_FILE, json.dumps(ids) + "\n")
            if tracker.place is not None:
                self._note(f"{self.name:<9} {tracker.place}")
            while (record := self._records.get()) is not None:
                tracker.log(*record)
            tracker.end(self._is_finished)
        except (Exception, SystemExit) as error:
            reason = one_line(error) or type(error).__name__
            self._note(f"note      {self.name} failed: {reason[:200]}. Training goes on without it")


_ids_lock = threading.Lock()


def _known_ids(run_dir: Path) -> dict[str, str]:
    """Return the id of the run at each tracker, by the tracker's name."""
    with suppress(OSError, ValueError, RecursionError):
        found = from_json(read_file(run_dir / TRACKERS_FILE, MOST_ID_BYTES))
        if isinstance(found, dict):
            return {name: id for name, id in found.items() if isinstance(id, str)}
    return {}
