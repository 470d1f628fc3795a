"""`hydra/sweeper=optuna`: Optuna chooses the values of the next job from the results so far.

The study is stored in the sweep's directory. The same command line continues it: finished jobs
count, and interrupted jobs run again with the same values. Extra: ppctl[optuna].
"""

import json
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from optuna import distributions
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

from ppctl.config.groups.command_settings import Search
from ppctl.errors import ConfigError, NonFiniteError
from ppctl.launch.sweep.sweep_jobs import STUDY, Job, Result
from ppctl.launch.sweep.sweep_records import LOSSES

MOST_SAME = 100  # repeated choices in a row that end the search


@dataclass
class OptunaStudy:
    """The jobs of a search. Call `open`, which reads or creates the study, before `ask`."""

    search: Search
    space: dict[str, BaseDistribution]
    fixed: Sequence[str]  # overrides that all jobs share
    directory: Path
    make: Callable[[int, list[str]], Job]  # function from (index, overrides) to a job
    trials: list[int] = field(default_factory=list[int])  # trial number of each job

    def samples(self) -> list[Job]:
        """Return jobs that together contain every listed value. They are checked, but never run.

        ConfigError for a metric that jobs would not record.
        """
        values: dict[str, tuple[Any, ...]] = {}
        for key, kind in self.space.items():
            low = (getattr(kind, "low", None),)
            values[key] = kind.choices if isinstance(kind, CategoricalDistribution) else low
        jobs = []
        for index in range(max(map(len, values.values()))):
            chosen = {key: each[min(index, len(each) - 1)] for key, each in values.items()}
            jobs.append(self._job(chosen))
        runs = [job.config.run for job in jobs if job.config is not None]
        for run in runs if self.search.metric == "eval_loss" else ():
            if run.eval_every is None or run.eval_every > run.num_steps:
                every = "null" if run.eval_every is None else run.eval_every
                raise ConfigError(
                    f"hydra.sweeper.metric=eval_loss: run.eval_every={every} evaluates nothing in "
                    f"{run.num_steps} steps. Use run.eval_every={run.num_steps} or less."
                )
        return jobs

    def open(self) -> None:
        """Read the study of this search, or create it; the file may hold other searches' studies.

        OSError if the file cannot be written, ConfigError if it is not a file of studies.
        """
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        space = {key: str(values) for key, values in self.space.items()}
        file = self.directory / STUDY
        try:
            storage = JournalStorage(JournalFileBackend(str(file)))
            has_begun = file.exists() and file.stat().st_size > 0
            if has_begun and not optuna.get_all_study_names(storage):
                raise ValueError("no study")
            self.study = optuna.create_study(
                study_name=json.dumps([self.search.metric, space, [*self.fixed]]),
                storage=storage,
                direction="minimize" if self.search.is_minimized else "maximize",
                load_if_exists=True,
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{file} is not a study of ppctl, and is kept. Use another run.name or "
                "run.dir, or move it."
            ) from error
        known = self.study.get_trials(deepcopy=False)
        # a sampler with the same seed would draw the same values again
        self.study.sampler = optuna.samplers.TPESampler(seed=len(known))
        states = TrialState.COMPLETE, TrialState.RUNNING
        self.before = deque(trial for state in states for trial in known if trial.state == state)

    def ask(self) -> Job | None:
        """Return the next job, or None after the last. Jobs of earlier starts come first."""
        if self.before:
            trial = self.before.popleft()
            self.trials.append(trial.number)
            return self._job(trial.params)
        if len(self.trials) >= self.search.n_trials:
            return None
        for _ in range(MOST_SAME):
            trial = self.study.ask(self.space)
            others = self.study.get_trials(deepcopy=False)[: trial.number]
            same = [other.state for other in others if other.params == trial.params]
            if {*same} <= {TrialState.FAIL}:
                self.trials.append(trial.number)
                return self._job(trial.params)
            self.study.tell(trial, state=TrialState.FAIL)  # repeated values; samplers ignore FAIL
        return None

    def tell(self, result: Result) -> None:
        """Record the result of a job. An interrupted job stays open for the search's next start.

        A metric that is not finite counts as the worst result. ConfigError if finished runs do not
        record the search's metric.
        """
        job, number, metric = result.job, self.trials[result.job.index], self.search.metric
        if job.refusal is not None:
            self.study.tell(number, state=TrialState.FAIL)
        elif result.code in (0, NonFiniteError.exit_code):
            value = result.numbers[metric] if result.code == 0 else None
            # every finished run records its losses, so a missing one was not finite
            if value is None and result.code == 0 and metric not in LOSSES:
                raise ConfigError(
                    f"hydra.sweeper.metric={metric}: job {job.index} ({job.name}) "
                    f"has not recorded it ({job.run_dir}). Use another metric, or record it."
                )
            worst = math.inf if self.search.is_minimized else -math.inf
            self.study.tell(number, worst if value is None else value, skip_if_finished=True)

    def _job(self, values: Mapping[str, Any]) -> Job:
        chosen = [f"{key}={values[key]}" for key in self.space]
        return self.make(max(0, len(self.trials) - 1), [*self.fixed, *chosen])


def distribution(override: Override) -> BaseDistribution:
    """Return the distribution of `a,b`, `choice(a,b)`, `range(1,9)`, `tag(log,interval(0.1,1))`."""
    values = override.value()
    if isinstance(values, IntervalSweep):
        low, high, step = values.start, values.end, None
    else:
        texts = tuple(override.sweep_string_iterator())
        if not isinstance(values, RangeSweep) or len(texts) < 2:
            return CategoricalDistribution(texts)
        is_whole = isinstance(values.start, int) and isinstance(values.step, int)
        low, high = (int(text) if is_whole else float(text) for text in (texts[0], texts[-1]))
        step = values.step
    assert low is not None
    assert high is not None
    is_log = "log" in values.tags
    try:
        if isinstance(low, int) and isinstance(high, int) and isinstance(step, int | None):
            return distributions.IntDistribution(low, high, log=is_log, step=step or 1)
        return distributions.FloatDistribution(low, high, log=is_log, step=step)
    except ValueError as error:
        fault = f"hydra/sweeper=optuna cannot search {override.input_line}: {error}"
        raise ConfigError(fault) from error
