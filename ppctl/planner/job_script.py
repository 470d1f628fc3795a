"""The job script of a layout: that of recipes/cluster for its cluster, with the numbers and the request filled in."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ppctl.config import Config, Hardware
from ppctl.config.files import ROOT
from ppctl.errors import ConfigError
from ppctl.planner.recipe import MARK, writing
from ppctl.training.gpu_memory import memory_share
from ppctl.training.known_hardware import described_device, known

PORT = 55527  # of the coordinator, in the template too
POD_RUNS = "/runs"  # where the template mounts the claim


@dataclass(frozen=True)
class Launcher:
    """What starts a job, and the file of recipes/cluster that is its template."""

    template: str
    platform: str  # of its devices: gpu | tpu
    suffix: str  # of the script that is written; Hydra takes *.yaml in recipes/ for recipes
    command: str  # that starts it
    about: str


LAUNCHERS = {
    "slurm": Launcher("slurm.sbatch", "gpu", ".sbatch", "sbatch {path}", "the nodes of a Slurm cluster"),
    "kubernetes": Launcher("jobset.yaml", "gpu", ".jobset.yml", "kubectl apply -f {path}", "a Kubernetes cluster"),
    "tpu": Launcher(
        "tpu_slice.sh",
        "tpu",
        ".tpu.sh",
        "TPU_NAME=my-slice ZONE=europe-west4-b {path} run.dir=/mnt/shared/runs/{name}",
        "every host of a Cloud TPU slice",
    ),
}


@dataclass(frozen=True)
class Hosts:
    """How many hosts a job takes, and the devices of each."""

    number: int
    devices: int


def hosts_for(kind: str, hardware: Hardware, num_devices: int) -> Hosts | None:
    """Return the hosts of a job, None where the launcher knows them by itself, as of TPU slices.

    ConfigError where the launcher is of other devices, or would leave devices of a host out.
    """
    launcher, device = LAUNCHERS[kind], described_device(hardware)
    if device is None or device.platform != launcher.platform:
        fitting = [name for name, each in LAUNCHERS.items() if device is not None and each.platform == device.platform]
        of = {"gpu": "NVIDIA GPUs", "tpu": "TPUs"}[launcher.platform]
        use = " or ".join(f"tune.launch={name}" for name in fitting)
        remedy = f"Use {use}, or other hardware" if fitting else "Use other hardware, or leave it out"
        raise ConfigError(f"tune.launch={kind} writes a job for {of}, but hardware={hardware.name}. {remedy}.")
    if launcher.platform == "tpu":
        return None
    most = hardware.host_devices
    if most is None:
        raise ConfigError(
            f"tune.launch={kind} needs the number of GPUs of a host, and hardware={hardware.name} states no "
            "host_devices. State it there, with network_bytes_per_s and network_latency_s."
        )
    if num_devices <= most:
        return Hosts(1, num_devices)
    number, left = divmod(num_devices, most)
    if left:
        raise ConfigError(
            f"tune.launch={kind}: {num_devices} devices are no whole hosts of {most} (hardware={hardware.name}). Use "
            f"tune.devices={number * most} or {(number + 1) * most}."
        )
    return Hosts(number, most)


def job_request(kind: str, config: Config, name: str) -> Config:
    """Return the request of a layout as its job has it: on the devices that are there, under the recipe's name."""
    run, usual = config.run, Config()
    has_own_dir = run.dir != f"runs/{run.name}"
    name = name if run.name == usual.run.name else run.name
    directory = run.dir if has_own_dir else f"{POD_RUNS}/{name}" if kind == "kubernetes" else f"runs/{name}"
    hardware = config.hardware if config.hardware.name in known() else usual.hardware  # its file may not be there
    run = replace(run, name=name, dir=directory, platform=None)
    return replace(config, run=run, hardware=hardware, costs=usual.costs, tune=usual.tune)


def write_job_script(kind: str, config: Config, words: Sequence[str], hosts: Hosts | None, path: Path) -> None:
    """Write the script; one that is run itself may be."""
    text = job_script(kind, config, words, hosts, path)
    with writing(path, path.name.removesuffix(LAUNCHERS[kind].suffix)):
        path.write_text(text)
        path.chmod(path.stat().st_mode | (0o111 if text.startswith("#!") else 0))


def start_command(kind: str, path: Path) -> str:
    """Return the command that starts the job."""
    launcher = LAUNCHERS[kind]
    return launcher.command.format(path=path, name=path.name.removesuffix(launcher.suffix))


def job_script(kind: str, config: Config, words: Sequence[str], hosts: Hosts | None, path: Path) -> str:
    """Return the text of the script. words: the request, as one types it after `ppctl train`."""
    launcher, name = LAUNCHERS[kind], path.name.removesuffix(LAUNCHERS[kind].suffix)
    text = (ROOT / "recipes/cluster" / launcher.template).read_text()
    body = text[text.index("# 1. ") :]
    first = "#!/bin/bash\n" if text.startswith("#!") else ""
    head = [MARK, *_about(launcher, config, hosts), f"#   {start_command(kind, path)}", ""]
    filled = {"slurm": _slurm, "kubernetes": _kubernetes, "tpu": _tpu}[kind](body, name, words, hosts)
    return first + "\n".join(head) + filled


def _about(launcher: Launcher, config: Config, hosts: Hosts | None) -> list[str]:
    """Return comments: what trains where, and what ppctl sets in every process."""
    devices = f"{config.mesh.num_devices} chips" if hosts is None else f"{hosts.number} hosts of {hosts.devices} GPUs"
    flags = config.executor.xla_flags
    said = f"executor.xla_flags={flags}" if isinstance(flags, str) else "executor.xla_flags"
    lines = [f"Trains mesh={config.mesh.text} on {launcher.about}, {devices} (hardware={config.hardware.name})."]
    if hosts is not None:
        share = memory_share(config, here=False)
        lines.append(
            f"ppctl itself gives programs {share.fraction * 100:g}% of each GPU's memory ({share.source}) and the "
            f"compiler options of {said}."
        )
    wrapped = textwrap.wrap(" ".join([*lines, "Start it from here:"]), 117)
    return [f"# {line}" for line in wrapped]


def _slurm(text: str, name: str, words: Sequence[str], hosts: Hosts | None) -> str:
    assert hosts is not None, "GPUs are of hosts"
    values = {"job-name": name, "nodes": hosts.number}
    values |= dict.fromkeys(("ntasks-per-node", "gpus-per-node"), hosts.devices)
    lines = {rf"^(#SBATCH --{key}=).*$": rf"\g<1>{value}" for key, value in values.items()}
    return _with_request(_replaced(text, lines), words)


def _tpu(text: str, _name: str, words: Sequence[str], _hosts: Hosts | None) -> str:
    return _with_request(text, words)


def _kubernetes(text: str, name: str, words: Sequence[str], hosts: Hosts | None) -> str:
    assert hosts is not None, "GPUs are of hosts"
    name = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "ppctl"  # as DNS has names
    indent = " " * 22
    # Kubernetes itself reads $(NAME), and $$ as $
    request = "\n".join(indent + shlex.quote(word).replace("$", "$$") for word in words)
    lines = {
        r"^(  name: )ppctl$": rf"\g<1>{name}",
        r"^( +run\.coordinator=).*$": rf"\g<1>{name}-workers-0-0.{name}:{PORT}",
        r"^( +(?:completions|parallelism): ).*$": rf"\g<1>{hosts.number}",
        r"^( +run\.num_processes=).*$": rf"\g<1>{hosts.number}",
        r"^( +nvidia\.com/gpu: ).*$": rf"\g<1>{hosts.devices}",
    }
    text = _replaced(text, lines, twice="completions")
    example = re.compile(r"^ +model=transformer\n +mesh=\S+\n +run\.dir=\S+$", re.MULTILINE)
    assert len(example.findall(text)) == 1, "the template's request"
    return example.sub(lambda _: request, text)


def _replaced(text: str, lines: Mapping[str, str], twice: str = "\0") -> str:
    """Return the text with the line of each pattern replaced, that with `twice` in its pattern two times."""
    for pattern, line in lines.items():
        text, count = re.subn(pattern, line, text, flags=re.MULTILINE)
        assert count == (2 if twice in pattern else 1), f"{pattern} in the template"
    return text


def _with_request(text: str, words: Sequence[str]) -> str:
    """Return a script of bash whose arguments follow those of the request."""
    place = "set -uo pipefail\n"
    assert text.count(place) == 1, "the template's options"
    request = " \\\n".join(f"  {shlex.quote(word)}" for word in words)
    return text.replace(place, f'{place}set -- \\\n{request} \\\n  "$@"\n')
