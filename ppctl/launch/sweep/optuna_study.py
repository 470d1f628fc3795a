"""A sweep that searches: Optuna chooses the values of the next job by how the jobs before it ended.

The study stands in the sweep's directory, so that the same search goes on where it ended: jobs that ended well are
known, and those that broke off are run again with the values that they had. Needs the extra ppctl[optuna]; the rest of
a sweep knows of it what `ppctl.launch.sweep.jobs.ChoosesJobs` says.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from ppctl.config.sweep import Search
from ppctl.errors import ConfigError, NonFiniteError
from ppctl.launch.sweep.jobs import STUDY, Choices, Job, Outcome, Span
from ppctl.launch.sweep.records import record_of

NAME = "ppctl"
MOST_SAME = 100  # choices in a row that were made before, until there is taken to be nothing new
ABOUT = "ppctl"  # attribute of the study: what it is a search for


class OptunaStudy:
    """The jobs of a search. `open` comes before `ask`, and reads or begins what stands in `directory`."""

    def __init__(
        self,
        search: Search,
        space: Mapping[str, Choices | Span],
        fixed: Sequence[str],
        directory: Path,
        make: Callable[[int, list[str]], Job],
    ) -> None:
        """`fixed`: the overrides that all jobs share; `make`: the job of a number and all its overrides."""
        self.search, self.fixed, self.make = search, list(fixed), make
        self.about = {
            "metric": search.metric,
            "space": {key: str(of) for key, of in space.items()},
            "fixed": self.fixed,
        }
        self.space, self.file = space, directory / STUDY
        self.trials: list[int] = []  # of each job the number of its trial
        self.distributions: dict[str, BaseDistribution] = {}
        for key, values in space.items():
            try:
                self.distributions[key] = distribution(values)
            except ValueError as error:
                raise ConfigError(f"hydra/sweeper=optuna cannot search {key} in {values}: {error}") from error

    def samples(self) -> list[Job]:
        """Return jobs that might be chosen, which are no trials; each choice is in one of them."""

        def value(values: Choices | Span, index: int) -> Any:
            return values.low if isinstance(values, Span) else values.texts[min(index, len(values.texts) - 1)]

        number = max(len(values.texts) if isinstance(values, Choices) else 1 for values in self.space.values())
        return [self._made({key: value(of, index) for key, of in self.space.items()}) for index in range(number)]

    def check(self) -> None:
        """Raise ConfigError where the directory holds the study of another search."""
        if not self.file.exists():
            return
        try:
            study = optuna.load_study(study_name=NAME, storage=self._storage())
            before = study.user_attrs[ABOUT]
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"{self.file} is not of a search by ppctl and stays. Use another run.name or run.dir, or move it."
            ) from error
        for key, now in self.about.items() if _knows(study) else ():
            if before.get(key) != now:
                raise ConfigError(
                    f"{self.file} is of another search ({key}: {before.get(key)} then, {now} now). "
                    "Use another run.name or run.dir, or move it away."
                )

    def open(self) -> None:
        """Read the study, or begin it. OSError where it cannot be written."""
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        direction = "minimize" if self.search.is_minimized else "maximize"
        begin = partial(optuna.create_study, study_name=NAME, storage=self._storage(), direction=direction)
        self.study = begin(load_if_exists=True)
        if self.study.user_attrs.get(ABOUT, self.about) != self.about:  # `check` has seen that it knows nothing
            optuna.delete_study(study_name=NAME, storage=self._storage())
            self.study = begin()
        self.study.set_user_attr(ABOUT, self.about)
        known = self._known()
        # a sampler that starts anew would draw what it drew before
        kind = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}[self.search.sampler]
        self.study.sampler = kind(seed=self.search.seed + len(known))
        of_state = {state: [trial for trial in known if trial.state == state] for state in TrialState}
        self.before = deque(of_state[TrialState.COMPLETE] + of_state[TrialState.RUNNING])

    def ask(self) -> Job | None:
        """Return the next job, first those of earlier starts, whose finished ones are skipped; None at the end."""
        if self.before:
            return self._job(self.before.popleft())
        if len(self.trials) >= self.search.n_trials:
            return None
        for _ in range(MOST_SAME):
            trial = self.study.ask(self.distributions)
            same = (other for other in self._known() if other.params == trial.params and other.number != trial.number)
            if all(other.state == TrialState.FAIL for other in same):
                return self._job(trial)
            self.study.tell(trial, state=TrialState.FAIL)  # it is there already: samplers pass over this one
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
            value = record_of(job, outcome)[self.search.metric]
            if value is None:
                raise ConfigError(
                    f"hydra.sweeper.metric={self.search.metric}: job {job.index} ({job.name}) has finished without it "
                    f"({job.run_dir}). Choose another one, or let runs record it."
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


def _knows(study: optuna.Study) -> bool:
    """Return whether any job of a study has ended well."""
    return any(trial.state == TrialState.COMPLETE for trial in study.get_trials(deepcopy=False))


def distribution(values: Choices | Span) -> BaseDistribution:
    """Return the values that a search chooses from as Optuna has them."""
    if isinstance(values, Choices):
        return CategoricalDistribution(values.texts)
    if all(isinstance(each, int) for each in (values.low, values.high, values.step or 1)):
        return IntDistribution(int(values.low), int(values.high), log=values.is_log, step=int(values.step or 1))
    return FloatDistribution(values.low, values.high, log=values.is_log, step=values.step)
