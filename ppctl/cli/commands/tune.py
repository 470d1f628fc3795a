"""`ppctl tune`: find the fastest mesh, schedule, partition, microbatches, remat for n devices."""

import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from types import FrameType

from rich.console import Console

from ppctl.cli.choices import request_words
from ppctl.config import Config
from ppctl.errors import ConfigError
from ppctl.launch.supervisor import STOP_SIGNALS, handling
from ppctl.planner.search.layout_search import SearchProgress
from ppctl.planner.search.tune_groups import check_groups, of_one_kind, tune_groups
from ppctl.planner.search.tune_layouts import tune_layouts
from ppctl.planner.search.tuned_files import LAUNCHERS, own_path, write_job_script, write_recipe
from ppctl.planner.show.groups_terminal import show_groups
from ppctl.planner.show.tune_terminal import chosen_number, show_numbers, show_tuned
from ppctl.reports.terminal_output import show_lines
from ppctl.training.pipeline.known_hardware import known

POD_RUNS = "/runs"  # mount path of the volume in recipes/cluster/jobset.yaml


def tune(config: Config, *, as_json: bool) -> int:
    """Print the best layouts, write recipe and job script of the first; return 1 if none fits."""
    if isinstance(config.tune.devices, list):
        return _of_several(config, config.tune.devices, as_json=as_json)
    if config.tune.groups == "unequal":
        return _of_groups(config, as_json=as_json)
    name, launch = config.tune.recipe, config.tune.launch
    path = None if name is None else own_path(name, ".yaml")  # checked before the search
    script = None if launch is None or name is None else own_path(name, LAUNCHERS[launch].suffix)
    with _progress(config) as progress:
        tuned = tune_layouts(config, progress)
    first = tuned.found.best[0] if tuned.found.best else None
    if first is not None and path is not None:
        path = write_recipe(path, first.request.config, first.step_s, first.measured_s)
        tuned, name = replace(tuned, recipe=str(path)), path.stem
    if first is not None and name is not None and launch is not None and script is not None:
        script = script.with_name(name + LAUNCHERS[launch].suffix)
        request = first.request.config
        layout = f"{request.mesh.text} of {request.mesh.num_devices} {request.hardware.name}"
        words = job_words(launch, request, name)
        command = write_job_script(launch, f"mesh={layout}", words, tuned.hosts, script)
        tuned = replace(tuned, job_script=str(script), job_command=command)
    show_tuned(tuned, as_json=as_json)
    return _code(progress, is_found=first is not None)


@contextmanager
def _progress(config: Config) -> Iterator[SearchProgress]:
    """Yield the progress of a search, printed to stderr; Ctrl-C ends the search in the body."""
    console = Console(stderr=True)
    progress = SearchProgress(lambda line: show_lines(console, line), config.tune.max_s)
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}

    def stop(number: int, _frame: FrameType | None) -> None:
        progress.stopped_by = signal.Signals(number).name
        for each, handler in before.items():  # a second signal ends the process
            signal.signal(each, handler)

    with handling(STOP_SIGNALS, stop):
        yield progress


def _code(progress: SearchProgress, *, is_found: bool) -> int:
    name = progress.stopped_by
    return int(not is_found) if name is None else 128 + signal.Signals[name]


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
    with _progress(config) as progress:
        found = {each.tune.devices: tune_layouts(each, progress) for each in one}
    chosen = chosen_number(found, tune.days)
    if chosen is not None and path is not None:
        first = found[chosen].found.best[0]
        path = write_recipe(path, first.request.config, first.step_s, first.measured_s)
    show_numbers(found, chosen, tune.days, path, as_json=as_json)
    return _code(progress, is_found=chosen is not None)


def _of_groups(config: Config, *, as_json: bool) -> int:
    """Print the best layouts of equal and unequal ranks, write the recipe of the unequal ones."""
    name, one = config.tune.recipe, of_one_kind(config)
    path = None if name is None else own_path(name, ".yaml")
    with _progress(config) as progress:
        check_groups(config)
        tuned = None if one is None else tune_layouts(one, progress)
        found = tune_groups(config, progress)
    if path is not None and (layout := found.unequal) is not None:
        what = "the fastest 1f1b layout of ranks of any sizes"
        path = write_recipe(path, layout.request, layout.step_s, None, what)
    show_groups(tuned, found, None if found.unequal is None else path, as_json=as_json)
    return _code(progress, is_found=found.unequal is not None)


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
