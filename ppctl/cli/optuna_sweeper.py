"""`hydra/sweeper=optuna`: the study that chooses values of jobs. Needs the extra ppctl[optuna]."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from optuna import distributions
from optuna.distributions import BaseDistribution

from ppctl.config.groups.sweep_settings import Search
from ppctl.errors import ConfigError
from ppctl.launch.sweep.optuna_study import OptunaStudy
from ppctl.launch.sweep.sweep_jobs import Job


def study_of(
    search: Search,
    varied: Mapping[str, Override],
    fixed: Sequence[str],
    directory: Path,
    make: Callable[[int, list[str]], Job],
) -> OptunaStudy:
    """Return the study of a sweep, stored in its directory.

    varied: the overrides of several values; fixed: those that all jobs share. ConfigError for
    values without a distribution, or a metric that the jobs would not record.
    """
    space = {key: distribution(override) for key, override in varied.items()}
    study = OptunaStudy(search, space, fixed, directory, make)
    configs = [sample.config for sample in study.samples() if sample.config is not None]
    if search.metric == "eval_loss" and not all(config.run.eval_every for config in configs):
        fault = "hydra.sweeper.metric=eval_loss: run.eval_every=null evaluates nothing."
        raise ConfigError(f"{fault} Set run.eval_every.")
    return study


def distribution(override: Override) -> BaseDistribution:
    """Return the values of `a,b`, `choice(a,b)`, `range(1,9)`, `tag(log,interval(0.1,1))`."""
    values = override.value()
    if isinstance(values, IntervalSweep):
        low, high, step = values.start, values.end, None
    else:
        texts = tuple(override.sweep_string_iterator())
        if not isinstance(values, RangeSweep) or len(texts) < 2:
            return distributions.CategoricalDistribution(texts)
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
