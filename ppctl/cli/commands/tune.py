"""`ppctl tune`: find the fastest mesh, schedule, partition, microbatches and remat for so many devices."""

from __future__ import annotations

from dataclasses import asdict, replace

from ppctl.cli.request_words import request_words
from ppctl.config import Config
from ppctl.planner.job_script import LAUNCHERS, job_request, start_command, write_job_script
from ppctl.planner.recipe import own_path, recipe_path, write_recipe
from ppctl.planner.tune import tune_layouts
from ppctl.planner.tune_terminal import show_tuned


def tune(config: Config, *, as_json: bool) -> int:
    """Print the best ten layouts, write the best as a recipe, and its job script; return 0 where one fits, else 1."""
    name, launch = config.tune.recipe, config.tune.launch
    path = recipe_path(name)  # refused before the search
    script = None if launch is None or name is None else own_path(name, LAUNCHERS[launch].suffix)
    tuned, configs = tune_layouts(config)
    if tuned.found.best and path is not None:
        write_recipe(path, configs[0], tuned.found.best[0], tuned.measured_s[0] if tuned.measured_s else None)
        tuned = replace(tuned, recipe=str(path))
    if tuned.found.best and name is not None and launch is not None and script is not None:
        write_job_script(launch, configs[0], job_words(launch, configs[0], name), tuned.hosts, script)
        tuned = replace(tuned, job_script=str(script), job_command=start_command(launch, script))
    show_tuned(tuned, configs, as_json=as_json)
    return 0 if tuned.found.best else 1


def job_words(launch: str, config: Config, name: str) -> list[str]:
    """Return the request of a layout as a job has it, as one types it after `ppctl train`; its mesh always."""
    request = job_request(launch, config, name)
    words, _ = request_words(asdict(request))
    mesh = f"mesh={request.mesh.text}"
    return [mesh, *(word for word in words if word != mesh)]
