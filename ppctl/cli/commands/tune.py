"""`ppctl tune`: find the fastest mesh, schedule, partition, microbatches, remat for n devices."""

from collections.abc import Sequence
from dataclasses import asdict, replace

from ppctl.cli.choices import request_words
from ppctl.config import Config
from ppctl.errors import ConfigError
from ppctl.planner.search.job_script import LAUNCHERS, write_job_script
from ppctl.planner.search.tune_layouts import tune_layouts
from ppctl.planner.search.tuned_recipe import own_path, write_recipe
from ppctl.planner.show.tune_terminal import show_tuned
from ppctl.planner.show.tuned_numbers import chosen_number, show_numbers
from ppctl.training.pipeline.known_hardware import known

POD_RUNS = "/runs"  # mount path of the volume in recipes/cluster/jobset.yaml


def tune(config: Config, *, as_json: bool) -> int:
    """Print the best layouts, write recipe and job script of the first; return 1 if none fits."""
    if isinstance(config.tune.devices, list):
        return _of_several(config, config.tune.devices, as_json=as_json)
    name, launch = config.tune.recipe, config.tune.launch
    path = None if name is None else own_path(name, ".yaml")  # checked before the search
    script = None if launch is None or name is None else own_path(name, LAUNCHERS[launch].suffix)
    tuned = tune_layouts(config)
    first = tuned.found.best[0] if tuned.found.best else None
    if first is not None and path is not None:
        write_recipe(path, first.request.config, first.step_s, first.measured_s)
        tuned = replace(tuned, recipe=str(path))
    if first is not None and name is not None and launch is not None and script is not None:
        request = first.request.config
        layout = f"{request.mesh.text} of {request.mesh.num_devices} {request.hardware.name}"
        words = job_words(launch, request, name)
        command = write_job_script(launch, f"mesh={layout}", words, tuned.hosts, script)
        tuned = replace(tuned, job_script=str(script), job_command=command)
    show_tuned(tuned, as_json=as_json)
    return int(first is None)


def _of_several(config: Config, numbers: Sequence[int], *, as_json: bool) -> int:
    """Print the best layout for each number of devices, write the recipe of the chosen number."""
    tune, path = config.tune, None
    if tune.days is not None and config.plan.tokens is None:
        raise ConfigError(
            f"tune.days={tune.days:g} needs the number of tokens to train on. Add "
            "plan.tokens=1e12 or the like."
        )
    if tune.recipe is not None:
        path = own_path(tune.recipe, ".yaml")
    one = [replace(config, tune=replace(tune, devices=n, days=None)) for n in sorted({*numbers})]
    found = {each.tune.devices: tune_layouts(each) for each in one}
    chosen = chosen_number(found, tune.days)
    if chosen is not None and path is not None:
        first = found[chosen].found.best[0]
        write_recipe(path, first.request.config, first.step_s, first.measured_s)
    show_numbers(found, chosen, tune.days, path, as_json=as_json)
    return int(chosen is None)


def job_words(launch: str, config: Config, name: str) -> list[str]:
    """Return the overrides of `ppctl train` in a layout's job script. They always state the mesh.

    launch: tune.launch. name: name of the recipe, and of the run unless run.name is set. JAX
    chooses the platform. Hardware from --config-dir is dropped: its file may be missing on the
    cluster.
    """
    run, usual = config.run, Config()
    name = name if run.name == usual.run.name else run.name
    if run.dir == f"runs/{run.name}":
        run = replace(run, dir=f"{POD_RUNS if launch == 'kubernetes' else 'runs'}/{name}")
    hardware = config.hardware if config.hardware.name in known() else usual.hardware
    run = replace(run, name=name, platform=None)
    request = replace(config, run=run, hardware=hardware, tune=usual.tune)
    words, mesh = request_words(asdict(request)), f"mesh={config.mesh.text}"
    return [mesh, *(word for word in words if word != mesh)]
