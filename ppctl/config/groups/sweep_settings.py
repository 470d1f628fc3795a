"""The launchers and sweepers of `--multirun`: `hydra/launcher=` and `hydra/sweeper=`."""

from __future__ import annotations

from dataclasses import dataclass

from ppctl.config.field_checks import at_least, choice

SMALLER_IS_BETTER = {  # the numbers of a run that a search may be for
    "final_loss": True,
    "eval_loss": True,
    "step_time_s": True,
    "tokens_per_s": False,
    "rows_per_s": False,
    "memory_bytes": True,
}


@dataclass
class SideBySide:
    """hydra/launcher=ppctl: jobs are processes of the sweep's own process, and end with it."""

    jobs: int = 1  # side by side

    def check(self) -> None:
        at_least("hydra.launcher.jobs", self.jobs, 1)


@dataclass
class Combinations:
    """hydra/sweeper=ppctl: a job for every combination of KEY=A,B,..."""


@dataclass
class Search:
    """hydra/sweeper=optuna: values are not all combined, but chosen by Optuna, job after job."""

    n_trials: int = 20  # jobs in all, those of earlier starts included
    # or eval_loss, step_time_s, memory_bytes: to be small; tokens_per_s, rows_per_s: large
    metric: str = "final_loss"
    seed: int = 0  # of Optuna's sampler

    def check(self) -> None:
        at_least("hydra.sweeper.n_trials", self.n_trials, 1)
        at_least("hydra.sweeper.seed", self.seed, 0)
        choice("hydra.sweeper.metric", self.metric, tuple(SMALLER_IS_BETTER))

    @property
    def is_minimized(self) -> bool:
        return SMALLER_IS_BETTER[self.metric]


Sweeper = Combinations | Search
