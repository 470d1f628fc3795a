"""The files that `ppctl tune` writes: a layout as a recipe, and its job script."""

import re
import shlex
import string
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from ppctl.config import AutoHardware, Config, Hardware, Mesh, Run
from ppctl.config.config_dirs import ROOT
from ppctl.errors import ConfigError
from ppctl.reports.terminal_output import check_file, write_file
from ppctl.schedule.mesh_axes import TEXT_AXES, positional
from ppctl.training.pipeline.known_hardware import described_device, known

MARK = "# Written by `ppctl tune`, which writes it again if it finds the same layout again."
CHOSEN = ("model", "mesh", "schedule", "partition", "executor", "optim", "data")  # config groups


def own_path(name: str, suffix: str) -> Path:
    """Return the path of a recipe's file.

    ConfigError if it is not writable, or exists and was not written by `ppctl tune`.
    """
    path, option = Path("recipes") / f"{name}{suffix}", f"tune.recipe={name}"
    check_file(option, path if path.parent.exists() else path.parent)
    if path.exists() and MARK not in path.read_text(errors="replace"):
        raise ConfigError(
            f"{option}: {path} was not written by `ppctl tune` and is not overwritten. Use another "
            "name, or null."
        )
    return path


def write_own(path: Path, content: str) -> None:
    """Write a file into recipes/, which is created if it does not exist."""
    path.parent.mkdir(exist_ok=True)
    write_file(f"tune.recipe={path.stem}", path, content)


def command_of(path: Path) -> str:
    """Return the command that trains with the recipe, for the directory where it was written."""
    is_found = path.absolute().parent == (ROOT / "recipes").absolute()
    return f"ppctl train {'' if is_found else '--config-dir . '}recipes={path.stem}"


def write_recipe(
    path: Path,
    config: Config,
    step_s: float,
    measured_s: float | None,
    what: str = "the fastest layout",
) -> Path:
    """Write the request of a layout as a recipe; return its path. what: the layout in its claim.

    If `path` holds another request, the recipe is NAME_2, NAME_3, ... step_s, measured_s: predicted
    and measured seconds of a step; measured_s=None: not measured.
    """
    for number in count(1):
        place = path if number == 1 else path.with_stem(f"{path.stem}_{number}")
        text = _recipe(place, config, step_s, measured_s, what)
        before = place.read_text(errors="replace") if place.exists() else text
        if _request(before) == _request(text):
            write_own(place, text)
            return place
    raise AssertionError("count has no end")


def _request(recipe: str) -> list[str]:
    """Return the lines of a recipe without its comments."""
    return [line for line in recipe.splitlines() if not line.startswith("#")]


def _recipe(path: Path, config: Config, step_s: float, measured_s: float | None, what: str) -> str:
    # 1. its head
    seconds = f"{step_s:.4g} seconds a step as planned"
    seconds += "" if measured_s is None else f", {measured_s:.4g} as measured"
    head = [
        "# @package _global_",
        MARK,
        f"# Claim: {what} found for {config.mesh.num_devices} devices: {seconds}.",
        f"# Command: {command_of(path)}",
        f"# Assumes: {_assumed(config.data, config.model, config.hardware)}.",
    ]
    if config.hardware.name not in (AutoHardware().name, *known()):
        head.append(f"# Needs: hardware/{config.hardware.name}.yaml next to recipes/.")

    # 2. the option of each config group, and its settings that are not the default
    is_stated = config.hardware != Config().hardware
    parts = {part: getattr(config, part) for part in (*CHOSEN, *["hardware"] * is_stated)}
    names = {part: each.name for part, each in parts.items() if part != "mesh"}
    names["mesh"] = "x".join(map(str, positional(vars(config.mesh))))
    document: dict[str, Any] = {"defaults": [{f"override /{part}": names[part]} for part in parts]}
    settings = {part: _settings(each) for part, each in parts.items()}
    document |= {part: found for part, found in settings.items() if found}
    # a default run.name becomes the recipe's name; a default run.dir follows from the name
    run, usual = config.run, Run()
    name = path.stem if run.name == usual.name else run.name
    document["run"] = _settings(run) | {"name": name}
    if run.dir == f"runs/{run.name}":
        document["run"].pop("dir", None)
    return "\n".join([*head, yaml.safe_dump(document, sort_keys=False)])


def _assumed(data: Any, model: Any, hardware: Hardware | AutoHardware) -> str:
    settings = _settings(data) | {"batch_size": data.batch_size}
    words = [f"data={data.name}", *(f"data.{name}={value}" for name, value in settings.items())]
    seq_len = getattr(model, "seq_len", None)
    words += [] if seq_len is None else [f"model.seq_len={seq_len}"]
    if isinstance(hardware, AutoHardware) and hardware.ranks:
        return f"{' '.join(words)}, hardware.ranks=[{','.join(hardware.ranks)}]"
    attached = " (attached)" if isinstance(hardware, AutoHardware) else ""
    return f"{' '.join(words)}, hardware={hardware.name}{attached}"


def _settings(part: Any) -> dict[str, Any]:
    """Return a group's settings that differ from the dataclass default, nested.

    For an option with a file, such as a published model, all settings are returned: a setting equal
    to the default may differ from the file. The axes that a mesh's text states are left out.
    """
    if isinstance(part, Hardware):  # all settings of a user's file, because the file may change
        usual = asdict(known()[part.name]) if part.name in known() else {}
        return _differences(asdict(part), usual)
    if isinstance(part, Mesh):
        axes = _differences(asdict(part), asdict(Mesh()))
        if part.ranks:  # sizes of 1 are left out
            axes["ranks"] = [
                {name: n for name, n in asdict(each).items() if n not in (None, 1)} or {"dp": 1}
                for each in part.ranks
            ]
        return {name: value for name, value in axes.items() if name not in TEXT_AXES}
    usual = type(part)()
    is_of_file = not isinstance(part, Run) and part.name != usual.name
    return _differences(asdict(part), {} if is_of_file else asdict(usual))


def _differences(values: dict[str, Any], usual: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and usual.get(name):  # fields of a nested dataclass
            inner = _differences(value, usual[name])
            found |= {name: inner} if inner else {}
        elif name != "name" and (name not in usual or value != usual[name]):
            found[name] = value
    return found


# the job script of a layout: a template of recipes/cluster, filled in


class JobTemplate(string.Template):
    delimiter = "%%"  # "$" would clash with variables of the shell and of Kubernetes


@dataclass(frozen=True)
class Launcher:
    """The template of a job script, and the command that starts it."""

    template: str
    platform: str  # platform of the devices: gpu | tpu
    suffix: str  # suffix of the script; not .yaml: Hydra takes *.yaml in recipes/ for recipes
    command: str


SLICE = "TPU_NAME=my-slice ZONE=europe-west4-b {path} run.dir=/mnt/shared/runs/{name}"
LAUNCHERS = {
    "slurm": Launcher("slurm.sbatch", "gpu", ".sbatch", "sbatch {path}"),
    "kubernetes": Launcher("jobset.yaml", "gpu", ".jobset.yml", "kubectl apply -f {path}"),
    "tpu": Launcher("tpu_slice.sh", "tpu", ".tpu.sh", SLICE),
}


@dataclass(frozen=True)
class Hosts:
    """The hosts of a job, and the devices of each."""

    number: int
    devices: int


def hosts_for(kind: str, hardware: Hardware, num_devices: int) -> Hosts | None:
    """Return a job's hosts; None: a TPU slice.

    kind: a key of LAUNCHERS. ConfigError if it is for other devices, or if hosts are not filled.
    """
    launcher, device, most = LAUNCHERS[kind], described_device(hardware), hardware.host_devices
    if device is None or device.platform != launcher.platform:
        of = {"gpu": "NVIDIA GPUs", "tpu": "TPUs"}[launcher.platform]
        raise ConfigError(
            f"tune.launch={kind} is for {of}, but hardware={hardware.name}. Use another "
            "tune.launch."
        )
    if launcher.platform == "tpu":
        return None
    if most is None or (num_devices > most and num_devices % most):
        raise ConfigError(
            f"tune.launch={kind}: {num_devices} devices do not fill hosts of "
            f"{most or 'unknown size'} (hardware={hardware.name}). Use another tune.devices, or "
            "hardware with a network."
        )
    return Hosts(-(-num_devices // most), min(most, num_devices))


def write_job_script(
    kind: str, layout: str, words: Sequence[str], hosts: Hosts | None, path: Path
) -> str:
    """Write the script and return the command that starts it.

    layout: text for the head of the script. words: command-line arguments of `ppctl train`.
    """
    # 1. the values of the template
    launcher, name = LAUNCHERS[kind], path.name.removesuffix(LAUNCHERS[kind].suffix)
    command, request = launcher.command.format(path=path, name=name), shlex.join(words)
    if kind == "kubernetes":  # $(NAME) and $$ are special in manifests; names are DNS labels
        request = request.replace("$", "$$")
        name = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40]
    values = {"mark": MARK.removeprefix("# "), "command": command, "request": request}
    values |= {"name": name or "ppctl", "layout": layout}
    if hosts is not None:
        values |= {"nodes": str(hosts.number), "devices": str(hosts.devices)}

    # 2. the script
    template = JobTemplate((ROOT / "recipes/cluster" / launcher.template).read_text())
    text = template.substitute(values)
    write_own(path, text)
    path.chmod(path.stat().st_mode | (0o111 if text.startswith("#!") else 0))
    return command
