"""`hydra/sweeper=optuna`: the study that chooses the values of a sweep's jobs. Needs the extra ppctl[optuna]."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep

from ppctl.config.sweep import Search
from ppctl.errors import ConfigError
from ppctl.launch.sweep.jobs import Choices, Job, Span
from ppctl.launch.sweep.optuna_study import OptunaStudy


def study_of(
    search: Search,
    by_key: Mapping[str, Override],
    fixed: Sequence[str],
    directory: Path,
    make: Callable[[int, list[str]], Job],
) -> OptunaStudy:
    """Return the study that a sweep searches by, which stands in its directory.

    by_key: the overrides. fixed: those that all jobs share. make: the job of a number and all its overrides.

    Raises:
        ConfigError: The jobs would not record what the search is for.
    """
    space = {key: values_of(override) for key, override in by_key.items() if override.is_sweep_override()}
    study = OptunaStudy(search, space, fixed, directory, make)
    configs = [sample.config for sample in study.samples() if sample.config is not None]
    if search.metric == "eval_loss" and not all(config.run.eval_every for config in configs):
        raise ConfigError("hydra.sweeper.metric=eval_loss: run.eval_every=null evaluates nothing. Set run.eval_every.")
    return study


def values_of(override: Override) -> Choices | Span:
    """Return the values of `a,b`, `choice(a,b)`, `range(1,9)`, `interval(0,1)` or `tag(log,interval(0.1,1))`."""
    values = override.value()
    if isinstance(values, IntervalSweep):
        assert values.start is not None
        assert values.end is not None
        return Span(values.start, values.end, is_log="log" in values.tags)
    texts = tuple(override.sweep_string_iterator())
    if not isinstance(values, RangeSweep) or len(texts) < 2:
        return Choices(texts)
    kind = int if all(isinstance(each, int) for each in (values.start, values.step)) else float
    return Span(kind(texts[0]), kind(texts[-1]), step=kind(values.step), is_log="log" in values.tags)
