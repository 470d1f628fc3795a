"""The launchers and sweepers of `--multirun`: `hydra/launcher=` and `hydra/sweeper=`."""

from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

from ppctl.config.field_checks import Count, Natural, Settings, at_least, one_of

SIGNAL_DELAY_S = 120  # before a submitted job's time ends: enough to save a large checkpoint
SMALLER_IS_BETTER = {  # the numbers of a run that a search may be for
    "final_loss": True,
    "eval_loss": True,
    "step_time_s": True,
    "tokens_per_s": False,
    "rows_per_s": False,
    "memory_bytes": True,
}


@dataclass
class SideBySide(Settings):
    """Jobs are processes of the sweep's own process, and end with it."""

    jobs: Count = 1  # side by side

    KEY = "hydra.launcher"


@dataclass
class SubmititSlurm(Settings):
    """Jobs are queued in Slurm and outlive the sweep."""

    # at once at most; None: Slurm decides, and one at a time with hydra/sweeper=optuna
    jobs: Count | None = None
    partition: str | None = None
    account: str | None = None
    # minutes; shortly before their end a job saves and is queued again
    time: Annotated[int, partial(at_least, least=SIGNAL_DELAY_S // 60 + 1)] = 60
    nodes: Count = 1  # of a job; with several tasks use run.distributed=auto
    gpus_per_node: Natural | None = None
    cpus_per_task: Count | None = None
    # others of sbatch: qos, mem, gres
    additional_parameters: dict[str, Any] = field(default_factory=dict[str, Any])

    KEY = "hydra.launcher"

    def parameters(self) -> dict[str, Any]:
        """Return the parameters of submitit's executor, the number of tasks a node among them."""
        more = {"job_name": "ppctl", **self.additional_parameters}
        parameters = {k: v for k, v in vars(self).items() if k != "jobs" and v is not None}
        parameters |= {"signal_delay_s": SIGNAL_DELAY_S, "additional_parameters": more}
        parameters["ntasks_per_node"] = more.pop("tasks_per_node", more.pop("ntasks_per_node", 1))
        if self.jobs is not None:
            parameters["array_parallelism"] = self.jobs
        return parameters


@dataclass
class Combinations:
    """A job for every combination of KEY=A,B,..."""


@dataclass
class Search(Settings):
    """Values are not all combined, but chosen by Optuna, job after job."""

    n_trials: Count = 20  # jobs in all, those of earlier starts included
    # or eval_loss, step_time_s, memory_bytes: to be small; tokens_per_s, rows_per_s: large
    metric: Annotated[str, one_of(*SMALLER_IS_BETTER)] = "final_loss"
    seed: Natural = 0  # of Optuna's sampler

    KEY = "hydra.sweeper"

    @property
    def is_minimized(self) -> bool:
        return SMALLER_IS_BETTER[self.metric]


Launcher = SideBySide | SubmititSlurm
Sweeper = Combinations | Search
