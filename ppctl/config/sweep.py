"""How the jobs of a sweep run and which there are: `hydra/launcher=`, `hydra/sweeper=` and their settings."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ppctl.config.checks import at_least, choice
from ppctl.errors import ConfigError

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
class SubmititLocal:
    """hydra/launcher=submitit_local: jobs are processes of this machine that go on without the sweep's own."""

    jobs: int = 1  # side by side
    timeout_min: int = 1440  # minutes after which a job is asked to save, and started again
    signal_delay_s: int = 120  # seconds that it has for that
    max_num_timeout: int = 3  # times that it is started again
    setup: list[str] = field(default_factory=list[str])  # lines for the shell before a job

    @property
    def cluster(self) -> str:
        return "local"

    def check(self) -> None:
        at_least("hydra.launcher.jobs", self.jobs, 1)
        _check_time(self.timeout_min, self.signal_delay_s, self.max_num_timeout)

    def parameters(self) -> dict[str, Any]:
        """Return the arguments of submitit's executor."""
        return {"timeout_min": self.timeout_min, "signal_delay_s": self.signal_delay_s, "setup": self.setup}


@dataclass
class SubmititSlurm:
    """hydra/launcher=submitit_slurm: jobs are submitted to Slurm, which lines them up, and go on without the sweep."""

    jobs: int | None = None  # at once at most; None: Slurm decides, and one at a time with hydra/sweeper=optuna
    timeout_min: int = 60  # minutes of a job; shortly before it is asked to save, and queued again
    signal_delay_s: int = 120  # seconds that it has for that
    max_num_timeout: int = 3  # times that it is queued again
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    nodes: int = 1  # of a job; with several tasks use run.distributed=auto
    tasks_per_node: int = 1  # processes of a job on each node
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    gpus_per_task: int | None = None
    mem_gb: float | None = None  # GB of a node
    gres: str | None = None
    constraint: str | None = None
    exclude: str | None = None  # nodes
    comment: str | None = None
    setup: list[str] = field(default_factory=list[str])  # lines for the shell before a job
    additional_parameters: dict[str, Any] = field(
        default_factory=dict[str, Any]
    )  # others of sbatch, by their names there

    @property
    def cluster(self) -> str:
        return "slurm"

    def check(self) -> None:
        for key in ("jobs", "nodes", "tasks_per_node", "cpus_per_task"):
            at_least(f"hydra.launcher.{key}", getattr(self, key), 1)
        for key in ("gpus_per_node", "gpus_per_task", "mem_gb"):
            at_least(f"hydra.launcher.{key}", getattr(self, key), 0)
        _check_time(self.timeout_min, self.signal_delay_s, self.max_num_timeout)

    def parameters(self) -> dict[str, Any]:
        """Return the arguments of submitit's executor."""
        renamed: dict[str, Any] = {
            "time": self.timeout_min,
            "ntasks_per_node": self.tasks_per_node,
            "job_name": "ppctl",
        }
        if self.mem_gb is not None:
            renamed["mem"] = f"{round(1024 * self.mem_gb)}MB"
        if self.jobs is not None:
            renamed["array_parallelism"] = self.jobs
        own = ("jobs", "timeout_min", "max_num_timeout", "tasks_per_node", "mem_gb")
        given = {key: value for key, value in vars(self).items() if key not in own and value not in (None, [], {})}
        return given | renamed


@dataclass
class Search:
    """hydra/sweeper=optuna: values are not all combined, but chosen by Optuna, job after job."""

    n_trials: int = 20  # jobs in all, those of earlier starts included
    metric: str = "final_loss"  # or eval_loss, step_time_s, memory_bytes: to be small; tokens_per_s, rows_per_s: large
    sampler: str = "tpe"  # tpe | random
    seed: int = 0  # of the sampler
    params: dict[str, Any] | None = None  # KEY: VALUES, for a file that describes a search

    def check(self) -> None:
        at_least("hydra.sweeper.n_trials", self.n_trials, 1)
        at_least("hydra.sweeper.seed", self.seed, 0)
        choice("hydra.sweeper.metric", self.metric, tuple(SMALLER_IS_BETTER))
        choice("hydra.sweeper.sampler", self.sampler, ("tpe", "random"))

    @property
    def is_minimized(self) -> bool:
        return SMALLER_IS_BETTER[self.metric]


def _check_time(timeout_min: int, signal_delay_s: int, max_num_timeout: int) -> None:
    at_least("hydra.launcher.timeout_min", timeout_min, 1)
    at_least("hydra.launcher.signal_delay_s", signal_delay_s, 1)
    at_least("hydra.launcher.max_num_timeout", max_num_timeout, 0)
    if signal_delay_s >= 60 * timeout_min:
        raise ConfigError(
            f"hydra.launcher.signal_delay_s={signal_delay_s} leaves nothing of the {60 * timeout_min} s that a job has "
            f"(hydra.launcher.timeout_min={timeout_min}). Use a smaller delay or a longer time."
        )
