"""The job script of a layout: a template of recipes/cluster, filled in."""

import re
import shlex
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ppctl.config import Hardware
from ppctl.config.config_dirs import ROOT
from ppctl.errors import ConfigError
from ppctl.planner.search.tuned_recipe import MARK, write_own
from ppctl.training.pipeline.known_hardware import described_device


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
