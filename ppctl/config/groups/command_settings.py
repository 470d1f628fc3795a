"""The settings of single commands: launch, verify, plan, tune, inspect and `--multirun`."""

import re
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Annotated, Any, ClassVar

from ppctl.config import field_checks as checks
from ppctl.config.field_checks import Count, Natural, Positive, Settings, SomePath
from ppctl.config.groups.layout_settings import MOST_DEVICES
from ppctl.config.groups.schedule_settings import OF_UNEQUAL, MaxChunks, Schedule
from ppctl.errors import ConfigError
from ppctl.schedule.mesh_axes import STAGE_AXES, axes_record
from ppctl.schedule.remat import Remat

# the largest runs train on about 1e13 tokens: more than 1e18 is a typing error
Tokens = Annotated[float, partial(checks.within, least=1, most=1e18)]
VIEWS = ("summary", "program", "jaxpr", "stablehlo", "hlo")
TOPOLOGY = re.compile(r"\w+:\d+(x\d+){1,2}")


def _is_number(key: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{key}={value} is not a number of devices, such as 64, or [64,128,256].")


@dataclass
class Launch(Settings):
    """Local processes that `ppctl train` starts and watches without JAX."""

    processes: Count = 1  # local processes that share the mesh's devices evenly
    max_restarts: Natural = 0  # restarts of a crashed run from its newest checkpoint

    @property
    def is_used(self) -> bool:
        return self.processes > 1 or self.max_restarts > 0


def not_launched() -> list[str]:
    """Return the overrides that turn off launching in any request."""
    return [f"launch.{each.name}={each.default}" for each in fields(Launch)]


@dataclass
class Verify(Settings):
    """The train steps that `ppctl verify` compares after the gradients of the first batch."""

    steps: Natural = 3  # train steps to compare with plain optax; 0: only gradients


@dataclass
class Plan(Settings):
    """The programs that `ppctl plan` compiles, the memory of a device, and a page to write."""

    # compile the train step, for the memory that it needs; None: only with plan.topology
    compile: bool | None = None
    # devices to compile for: TPUs as v5e:16x16, GPUs as hosts x GPUs per host: h100:2x8
    topology: str | None = None
    # memory of a device, for tune too; None: as stated by hardware or the device
    memory_gib: Positive | None = None
    # tokens to train on, for tune too: adds days, device-hours and energy; None: only a step
    tokens: Tokens | None = None
    html: SomePath | None = None  # file of a self-contained page for browsers, for rehearse too

    def check(self) -> None:
        super().check()
        if self.topology is not None and TOPOLOGY.fullmatch(self.topology) is None:
            raise ConfigError(
                f"plan.topology={self.topology} is not a topology. Write the kind of chip and its "
                "number each way (v5e:4x4, v5p:2x2x2); for GPUs hosts x GPUs a host (h100:2x8)."
            )

    @property
    def compiles(self) -> bool:
        """Whether to compile: plan.compile; if it is None, whether plan.topology is set."""
        return self.topology is not None if self.compile is None else self.compile

    @property
    def only_predicts_topology(self) -> bool:
        """Whether plan.topology is set, but nothing is compiled for its devices."""
        return self.topology is not None and not self.compiles

    @property
    def topology_shape(self) -> tuple[int, ...]:
        """The number of chips along each axis of plan.topology; for GPUs (hosts, GPUs per host).

        >>> Plan(topology="h100:2x8").topology_shape
        (2, 8)
        """
        assert self.topology is not None
        return tuple(map(int, self.topology.partition(":")[2].split("x")))


@dataclass
class HostGroup:
    """Hosts of a cluster with the same chips, next to each other in the order of devices."""

    hosts: Annotated[int, MOST_DEVICES] = 1
    hardware: str = "???"  # name of a file in conf/hardware


@dataclass
class Tune(
    axes_record(STAGE_AXES, list[Count] | None, None, "sizes of mesh.{name}; None: {tuned_about}"),
    Settings,
):
    """The search for a layout: its devices and choices, and the recipe that it writes."""

    # number of devices, or a list: a table of the best layout for each; None: the mesh's
    devices: Annotated[Any, _is_number, MOST_DEVICES] = None
    # sizes of ranks: equal | unequal (also finds ranks of unequal sizes, for executor=mpmd)
    groups: Annotated[str, checks.one_of("equal", "unequal")] = "equal"
    # hosts by kind of chip, instead of tune.devices and hardware, for tune.groups=unequal:
    # [{hosts: 4, hardware: h100}, {hosts: 4, hardware: a100}]
    cluster: list[HostGroup] = field(default_factory=list[HostGroup])
    days: Positive | None = None  # limit in days for plan.tokens; selects the fewest tune.devices
    schedules: list[str] | None = None  # families; None: all that the executor runs
    # values of executor.remat; None: all
    remat: list[Annotated[str, checks.one_of(*Remat)]] | None = None
    max_chunks: MaxChunks = 4  # maximum stages per rank
    microbatches: list[Count] | None = None  # numbers of microbatches; None: all that divide
    # values of schedule.vocab; None: all that executor and model support
    vocab: list[Annotated[str, checks.one_of(*Schedule.VOCAB)]] | None = None
    best: Annotated[int, checks.up_to(1000, "each is built to be predicted")] = 10  # layouts shown
    max_s: Positive | None = None  # seconds of a search, which then shows the best so far
    measure: Natural = 0  # best layouts run for a few steps and ranked by measured step time
    recipe: str | None = "tuned"  # name of the best layout's ./recipes/NAME.yaml; None: no file
    # job script written next to the recipe: slurm | kubernetes | tpu
    launch: Annotated[str, checks.one_of("slurm", "kubernetes", "tpu")] | None = None

    REMAT: ClassVar[tuple[str, ...]] = tuple(map(str, Remat))

    def check(self) -> None:
        Settings.check(self)
        several = isinstance(self.devices, list)
        self._check_groups()
        if self.days is not None and not several:
            raise ConfigError(
                f"tune.days={self.days:g} chooses among several numbers of devices. Use "
                "tune.devices=[64,128,256] or the like, and plan.tokens."
            )
        if several and (self.measure or self.launch):
            one = "measure" if self.measure else "launch"
            raise ConfigError(
                f"tune.{one}={getattr(self, one)} needs one number of devices, but "
                f"tune.devices={self.devices} has several. Leave it out, or name one number."
            )
        if self.measure > self.best:
            raise ConfigError(
                f"tune.measure={self.measure} runs more layouts than tune.best={self.best} "
                f"shows. Use tune.best={self.measure} or more, or a smaller tune.measure."
            )
        if self.recipe is not None and re.fullmatch(r"[\w-]+", self.recipe) is None:
            raise ConfigError(
                f"tune.recipe={self.recipe} is not a name. Use letters, digits, _ and -; the "
                "file is ./recipes/NAME.yaml."
            )
        if self.launch is not None and self.recipe is None:
            raise ConfigError(
                f"tune.launch={self.launch} writes a job script next to the recipe, but "
                "tune.recipe=null. Give the recipe a name, or leave out tune.launch."
            )

    def _check_groups(self) -> None:
        """Raise ConfigError for settings that do not go together with tune.groups."""
        for number, each in enumerate(self.cluster):
            checks.domains(f"tune.cluster[{number}]", each)
        if self.groups == "equal":
            if self.cluster:
                raise ConfigError(
                    f"tune.cluster has {len(self.cluster)} groups of hosts, but tune.groups=equal "
                    "reads tune.devices and hardware. Use tune.groups=unequal, or leave it out."
                )
            return
        if self.cluster and self.devices is not None:
            raise ConfigError(
                f"tune.devices={self.devices} and tune.cluster both state the devices. Leave out "
                "one of them."
            )
        families = self.schedules or [OF_UNEQUAL]
        lacking = [
            (f"tune.devices={self.devices}", "one number", isinstance(self.devices, list)),
            (f"tune.measure={self.measure}", "0", self.measure),
            (f"tune.launch={self.launch}", "null", self.launch),
            (f"tune.schedules={families}", OF_UNEQUAL, OF_UNEQUAL not in families),
            (f"tune.vocab={self.vocab}", "whole", "whole" not in (self.vocab or ["whole"])),
        ]
        for stated, use, is_wrong in lacking:
            if is_wrong:
                what = "tune.groups=unequal finds one layout of schedule 1f1b, and runs nothing"
                raise ConfigError(f"{what}, but {stated}. Use {use}, or tune.groups=equal.")


@dataclass
class Inspect(Settings):
    """The views of the programs that `ppctl inspect` shows."""

    # summary | program (ticks) | jaxpr | stablehlo | hlo; None: the first two
    what: Annotated[str, checks.one_of(*VIEWS)] | None = None


# --- `--multirun`: `hydra/launcher=` and `hydra/sweeper=` ----------------------------------------

SIGNAL_DELAY_S = 120  # seconds before a submitted job's time limit: enough for a large checkpoint
SMALLER_IS_BETTER = {  # metrics of a search
    "final_loss": True,
    "eval_loss": True,
    "step_time_s": True,
    "tokens_per_s": False,
    "rows_per_s": False,
    "memory_bytes": True,
}


@dataclass
class SideBySide(Settings, prefix="hydra.launcher"):
    """Jobs are child processes of the sweep, and end with it."""

    jobs: Count = 1  # jobs side by side


@dataclass
class SubmititSlurm(Settings, prefix="hydra.launcher"):
    """Jobs are queued in Slurm and outlive the sweep."""

    # maximum jobs at once; None: Slurm decides, but one at a time with hydra/sweeper=optuna
    jobs: Count | None = None
    partition: str | None = None
    account: str | None = None
    # time limit in minutes; shortly before it, a job saves and is queued again
    time: Annotated[int, partial(checks.at_least, least=SIGNAL_DELAY_S // 60 + 1)] = 60
    nodes: Count = 1  # nodes of a job; with several tasks use run.distributed=auto
    gpus_per_node: Natural | None = None
    cpus_per_task: Count | None = None
    # further parameters of sbatch: qos, mem, gres
    additional_parameters: dict[str, Any] = field(default_factory=dict[str, Any])

    def parameters(self) -> dict[str, Any]:
        """Return the parameters of submitit's executor, including the tasks per node."""
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
class Search(Settings, prefix="hydra.sweeper"):
    """Optuna chooses the values, job after job, instead of all combinations."""

    n_trials: Count = 20  # jobs in all, including those of earlier starts
    # minimized: final_loss, eval_loss, step_time_s, memory_bytes;
    # maximized: tokens_per_s, rows_per_s
    metric: Annotated[str, checks.one_of(*SMALLER_IS_BETTER)] = "final_loss"

    @property
    def is_minimized(self) -> bool:
        return SMALLER_IS_BETTER[self.metric]


Launcher = SideBySide | SubmititSlurm
Sweeper = Combinations | Search
