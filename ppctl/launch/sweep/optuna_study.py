"""A sweep that searches: Optuna chooses the values of the next job by the results so far.

The study is stored in the sweep's directory, so that the same search goes on where it ended:
finished jobs count, and jobs that broke off run again with the same values. Extra: ppctl[optuna].
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from ppctl.config.groups.sweep_settings import Search
from ppctl.errors import ConfigError, NonFiniteError
from ppctl.launch.sweep.sweep_jobs import STUDY, Job, Outcome
from ppctl.launch.sweep.sweep_records import result_of

NAME = "ppctl"
MOST_SAME = 100  # repeated choices in a row that end the search
ABOUT = "ppctl"  # attribute of the study: metric, space and fixed settings


class OptunaStudy:
    """The jobs of a search. `open`, before `ask`, reads or begins the study in `directory`."""

    def __init__(
        self,
        search: Search,
        space: Mapping[str, BaseDistribution],
        fixed: Sequence[str],
        directory: Path,
        make: Callable[[int, list[str]], Job],
    ) -> None:
        """`fixed`: overrides that all jobs share; `make`: the job of a number and overrides."""
        self.search, self.space, self.fixed, self.make = search, dict(space), list(fixed), make
        texts = {key: str(values) for key, values in space.items()}
        self.about = {"metric": search.metric, "space": texts, "fixed": self.fixed}
        self.file = directory / STUDY
        self.trials: list[int] = []  # the number of the trial of each job

    def samples(self) -> list[Job]:
        """Return sample jobs, which are no trials; together they contain every choice."""
        values: dict[str, tuple[Any, ...]] = {}
        for key, kind in self.space.items():
            is_choice = isinstance(kind, CategoricalDistribution)
            values[key] = kind.choices if is_choice else (cast("Any", kind).low,)
        jobs = []
        for index in range(max(map(len, values.values()))):
            chosen = {key: of[min(index, len(of) - 1)] for key, of in values.items()}
            jobs.append(self._made(chosen))
        return jobs

    def check(self) -> None:
        """Raise ConfigError where the directory holds the study of another search."""
        if not self.file.exists():
            return
        try:
            study = optuna.load_study(study_name=NAME, storage=self._storage())
            before = study.user_attrs[ABOUT]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{self.file} is not of a search by ppctl and stays. Use another run.name or "
                "run.dir, or move it."
            ) from error
        trials = study.get_trials(deepcopy=False)
        has_results = any(trial.state == TrialState.COMPLETE for trial in trials)
        for key, now in self.about.items():
            if has_results and before.get(key) != now:
                raise ConfigError(
                    f"{self.file} is of another search ({key}: {before.get(key)} then, {now} now). "
                    "Use another run.name or run.dir, or move it away."
                )

    def open(self) -> None:
        """Read the study, or begin it. OSError where it cannot be written."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        direction = "minimize" if self.search.is_minimized else "maximize"
        where = {"study_name": NAME, "storage": self._storage()}
        begin = partial(optuna.create_study, **where, direction=direction, load_if_exists=True)
        self.study = begin()
        if self.study.user_attrs.get(ABOUT, self.about) != self.about:  # has no results: `check`
            optuna.delete_study(**where)
            self.study = begin()
        self.study.set_user_attr(ABOUT, self.about)
        known = self._known()
        # a sampler with the same seed would draw the same values again
        self.study.sampler = optuna.samplers.TPESampler(seed=self.search.seed + len(known))
        states = TrialState.COMPLETE, TrialState.RUNNING
        self.before = deque(trial for state in states for trial in known if trial.state == state)

    def ask(self) -> Job | None:
        """Return the next job, or None; first those of earlier starts, whose finished ones end."""
        if self.before:
            return self._job(self.before.popleft())
        if len(self.trials) >= self.search.n_trials:
            return None
        for _ in range(MOST_SAME):
            trial = self.study.ask(self.space)
            others = [other for other in self._known() if other.number != trial.number]
            same = [other for other in others if other.params == trial.params]
            if all(other.state == TrialState.FAIL for other in same):
                return self._job(trial)
            self.study.tell(trial, state=TrialState.FAIL)  # repeated: samplers pass over it
        return None

    def tell(self, job: Job, outcome: Outcome) -> None:
        """Note how a job ended. One that broke off stays open, for the next start of the search.

        ConfigError where a finished run does not have the number that is searched by.
        """
        trial = self._known()[self.trials[job.index]]
        if trial.state.is_finished():
            return
        if job.refusal is not None:
            self.study.tell(trial.number, state=TrialState.FAIL)
        elif outcome.code == NonFiniteError.exit_code:  # a result too: as bad as can be
            self.study.tell(trial.number, math.inf if self.search.is_minimized else -math.inf)
        elif outcome.code == 0:
            value = result_of(job, outcome).numbers[self.search.metric]
            if value is None:
                raise ConfigError(
                    f"hydra.sweeper.metric={self.search.metric}: job {job.index} ({job.name}) "
                    f"has finished without it ({job.run_dir}). Use another, or let runs record it."
                )
            self.study.tell(trial.number, value)

    def _job(self, trial: optuna.Trial | FrozenTrial) -> Job:
        self.trials.append(trial.number)
        return self._made(trial.params)

    def _made(self, values: Mapping[str, Any]) -> Job:
        chosen = [f"{key}={values[key]}" for key in self.space]
        return self.make(max(0, len(self.trials) - 1), [*self.fixed, *chosen])

    def _known(self) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False)

    def _storage(self) -> JournalStorage:
        return JournalStorage(JournalFileBackend(str(self.file)))
