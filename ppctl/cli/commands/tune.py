"""`ppctl tune`: find the fastest mesh, schedule, partition, microbatches and remat for so many devices."""

from __future__ import annotations

from dataclasses import replace

from ppctl.config import Config
from ppctl.planner.recipe import recipe_path, write_recipe
from ppctl.planner.tune import tune_layouts
from ppctl.planner.tune_terminal import show_tuned


def tune(config: Config, *, as_json: bool) -> int:
    """Print the best ten layouts, and write the best as a recipe; return 0 where a layout fits, else 1."""
    path = recipe_path(config.tune.recipe)  # refused before the search
    tuned, configs = tune_layouts(config)
    if tuned.found.best and path is not None:
        write_recipe(path, configs[0], tuned.found.best[0], tuned.measured_s[0] if tuned.measured_s else None)
        tuned = replace(tuned, recipe=str(path))
    show_tuned(tuned, configs, as_json=as_json)
    return 0 if tuned.found.best else 1
