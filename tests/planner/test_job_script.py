"""Job scripts that `ppctl tune` writes: their numbers are the layout's, their request is the recipe's, others' stay."""

import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from ppctl import cli, config
from ppctl.cli.commands.tune import job_words
from ppctl.cli.compose import compose
from ppctl.errors import ConfigError
from ppctl.planner.job_script import LAUNCHERS, Hosts, hosts_for, job_request, job_script, write_job_script
from ppctl.planner.recipe import MARK
from ppctl.training.known_hardware import known

ODD = 'it\'s $HOME/$(pwd) $$ "q" a b'  # which shells and Kubernetes would read otherwise
SIZES = [
    (1, Hosts(1, 1)),
    (4, Hosts(1, 4)),
    (8, Hosts(1, 8)),
    (16, Hosts(2, 8)),
    (64, Hosts(8, 8)),
    (1024, Hosts(128, 8)),
]


def request(num_devices=16, hardware="h100", **run):
    """A layout as `ppctl tune` finds it."""
    return config.Config(
        mesh=config.Mesh(1, 1, num_devices),
        schedule=config.Schedule("1f1b", 4),
        data=config.Synthetic(batch_size=4 * num_devices),
        hardware=known()[hardware],
        run=config.Run(**{"dir": f"runs/{run.get('name', 'default')}"} | run),
    )


def script(launcher, asked, path="recipes/tuned"):
    file = Path(path + LAUNCHERS[launcher].suffix)
    hosts = hosts_for(launcher, asked.hardware, asked.mesh.num_devices)
    return job_script(launcher, asked, job_words(launcher, asked, "tuned"), hosts, file)


def composed(words):
    found = compose(words, [], ["train"])
    assert isinstance(found, config.Config)
    return found


def called_with(text, tmp_path, command, *words, **variables):
    """The arguments of the cluster's command, which a stand-in takes, in a script of bash."""
    file, log = tmp_path / "script", tmp_path / "call"
    (tmp_path / command).write_text(f'#!/bin/bash\nprintf "%s\\0" "$@" > {log}\n')
    file.write_text(text)
    for each in (file, tmp_path / command):
        each.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}
    subprocess.run([file, *words], env=env, check=True, timeout=30)
    return log.read_text().split("\0")[:-1]


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_devices", "hosts"), SIZES)
def test_the_numbers_of_a_slurm_script_are_the_layouts(num_devices, hosts):
    asked = request(num_devices)
    text = script("slurm", asked)
    said = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", text, re.MULTILINE))
    assert hosts_for("slurm", asked.hardware, num_devices) == hosts
    assert (said["nodes"], said["ntasks-per-node"], said["gpus-per-node"]) == (
        str(hosts.number),
        str(hosts.devices),
        str(hosts.devices),
    )
    assert int(said["nodes"]) * int(said["ntasks-per-node"]) == asked.mesh.num_devices
    assert f"{hosts.number} hosts of {hosts.devices} GPUs" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0
    checker = [Path(sys.executable).parent / "shellcheck", "-"]
    checked = subprocess.run(checker, input=text, text=True, capture_output=True)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(("num_devices", "hosts"), SIZES)
def test_the_numbers_of_a_jobset_are_the_layouts_and_kubernetes_takes_it(num_devices, hosts):
    document = yaml.safe_load(script("kubernetes", request(num_devices), "recipes/My_Run"))
    (replicated,) = document["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "one"}, **replicated["template"]}
    kubernetes_validate.validate(job, "1.33", strict=True)
    spec = job["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    found = composed(shlex.split(container["args"][0].replace("$JOB_COMPLETION_INDEX", "0"))[3:])
    assert spec["completions"] == spec["parallelism"] == found.run.num_processes == hosts.number
    assert container["resources"]["limits"]["nvidia.com/gpu"] == hosts.devices
    assert found.mesh.num_devices == hosts.number * hosts.devices
    assert document["metadata"]["name"] == "my-run"  # as DNS has names
    assert found.run.coordinator == f"my-run-workers-0-0.my-run:{container['ports'][0]['containerPort']}"
    assert found.run.dir == "/runs/tuned"  # on the claim


def test_a_script_for_a_tpu_slice_says_how_many_chips(tmp_path):
    text = script("tpu", request(32, "v5e"))
    assert "32 chips (hardware=v5e)" in text
    assert "memory" not in text.partition("# 1. ")[0]
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


@pytest.mark.parametrize(
    ("launcher", "hardware", "num_devices", "message"),
    [
        ("tpu", "h100", 8, "tune.launch=tpu writes a job for TPUs, but hardware=h100. Use tune.launch=slurm or tune"),
        (
            "slurm",
            "v5e",
            8,
            "tune.launch=slurm writes a job for NVIDIA GPUs, but hardware=v5e. Use tune.launch=tpu, or",
        ),
        ("kubernetes", "host", 8, "but hardware=host. Use other hardware, or leave it out."),
        ("slurm", "h100", 12, "12 devices are no whole hosts of 8 (hardware=h100). Use tune.devices=8 or 16."),
        ("kubernetes", "a100", 65, "65 devices are no whole hosts of 8 (hardware=a100). Use tune.devices=64 or 72."),
    ],
)
def test_what_does_not_fit_the_hardware_is_refused(launcher, hardware, num_devices, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        hosts_for(launcher, known()[hardware], num_devices)


def test_hardware_must_say_how_many_gpus_a_host_has():
    mine = replace(known()["h100"], name="mine", host_devices=None, network_bytes_per_s=None, network_latency_s=None)
    with pytest.raises(
        ConfigError, match="needs the number of GPUs of a host, and hardware=mine states no host_devices"
    ):
        hosts_for("slurm", mine, 8)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"launch": "lsf"}, "tune.launch=lsf is not one of slurm, kubernetes, tpu."),
        ({"launch": "slurm", "recipe": None}, "tune.launch=slurm writes a job script next to the recipe, but tune.rec"),
    ],
)
def test_settings_that_cannot_be_are_refused(words, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        config.check(replace(config.Config(), tune=config.Tune(**words)))


# --- the request ------------------------------------------------------------------------------------------------------


def odd(launcher):
    """A request with texts that must be quoted, planned on a CPU."""
    hardware = "v5e" if launcher == "tpu" else "h100"
    fraction = None if launcher == "tpu" else 0.9
    asked = request(16, hardware, platform="cpu", name="mine", memory_fraction=fraction)
    data = config.Tokens(path=ODD, vocab_size=64, batch_size=64)
    mesh = replace(asked.mesh, order="dp-pp-fsdp")
    return replace(asked, data=data, mesh=mesh, costs=config.Analytic(doctor="links.json"))


def asked_for(launcher, text, tmp_path):
    """The words after `ppctl train` as a process of the job gets them."""
    if launcher == "slurm":
        call = called_with(text, tmp_path, "srun", "run.seed=3")
        assert call[:4] == ["--kill-on-bad-exit=1", "ppctl", "train", "run.distributed=auto"]
        return call[4:]
    if launcher == "tpu":
        call = called_with(text, tmp_path, "gcloud", "run.seed=3", TPU_NAME="t", ZONE="z")
        script = call[-1].removeprefix("--command=")
        again = subprocess.run(
            ["bash", "-c", f"set -- {script}; printf '%s\\0' \"$@\""], capture_output=True, text=True
        )
        words = again.stdout.split("\0")[:-1]
        assert words[:4] == ["ppctl", "train", "run.distributed=auto", "run.platform=tpu"]
        return words[4:]
    (replicated,) = yaml.safe_load(text)["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    command = container["args"][0].replace("$$", "$").replace("exec ppctl train", "printf '%s\\0'")
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, env={"JOB_COMPLETION_INDEX": "1"})
    words = done.stdout.split("\0")[:-1]
    assert "run.process_id=1" in words
    return [
        *(word for word in words if not re.match(r"run\.(distributed|coordinator|num_proc|process)", word)),
        "run.seed=3",
    ]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_asks_for_the_layout_on_the_devices_that_are_there(launcher, tmp_path):
    asked = odd(launcher)
    words = asked_for(launcher, script(launcher, asked), tmp_path)
    found = composed(words)
    wanted = job_request(launcher, asked, "tuned")
    assert found == replace(wanted, run=replace(wanted.run, seed=3))
    assert (found.run.platform, found.costs, found.data.path) == (None, config.Analytic(), ODD)
    assert (found.run.memory_fraction, found.hardware) == (asked.run.memory_fraction, asked.hardware)
    assert found.run.name == "mine"


def test_the_directory_is_the_users_where_that_is_given():
    named = job_request("kubernetes", request(dir="/claim/one"), "tuned").run
    assert (named.name, named.dir) == ("tuned", "/claim/one")
    assert job_request("slurm", request(), "tuned").run.dir == "runs/tuned"


def test_hardware_of_ones_own_is_left_out_as_its_file_may_not_be_there():
    asked = request()
    asked = replace(asked, hardware=replace(asked.hardware, name="mine"))
    assert not [word for word in job_words("slurm", asked, "tuned") if word.startswith("hardware")]
    assert "(hardware=mine)" in script("slurm", asked)


@pytest.mark.parametrize(
    ("fraction", "said"), [(None, "75% of each GPU's memory (run.memory_fraction=null,"), (0.9, "90%")]
)
def test_a_script_says_what_ppctl_sets_itself(fraction, said):
    text = " ".join(script("slurm", request(memory_fraction=fraction)).replace("\n#", "").split())
    assert f"ppctl itself gives programs {said}" in text
    assert "compiler options of executor.xla_flags=auto" in text


# --- files ------------------------------------------------------------------------------------------------------------

TUNE = (
    "mesh=1x2 hardware=h100 tune.schedules=[1f1b] tune.best=1 model=mlp model.num_layers=2 model.d_model=16 "
    "data=regression data.batch_size=8 run.dtype=bfloat16 run.platform=cpu"
)


def test_tune_writes_it_next_to_the_recipe_and_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["tune", *TUNE.split(), "tune.launch=slurm"]) == 0
    assert capsys.readouterr().out.endswith("its job script is recipes/tuned.sbatch: sbatch recipes/tuned.sbatch\n")
    file = tmp_path / "recipes/tuned.sbatch"
    assert os.access(file, os.X_OK)
    assert "#SBATCH --ntasks-per-node=2\n" in file.read_text()
    assert cli.main(["tune", *TUNE.split(), "tune.launch=kubernetes", "--json"]) == 0  # again, over the recipe
    document = json.loads(capsys.readouterr().out)
    assert document["job_script"] == "recipes/tuned.jobset.yml"
    assert document["job_command"] == "kubectl apply -f recipes/tuned.jobset.yml"
    assert document["hosts"] == {"number": 1, "devices": 2}
    assert not os.access(tmp_path / "recipes/tuned.jobset.yml", os.X_OK)


def test_another_file_stays_and_nothing_is_searched(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ppctl.planner.tune.LayoutSearch", lambda *_: pytest.fail("searched"))
    file = tmp_path / "recipes/tuned.sbatch"
    file.parent.mkdir()
    file.write_text("#!/bin/bash\n# mine\n")
    assert cli.main(["tune", *TUNE.split(), "tune.launch=slurm"]) == 2
    assert capsys.readouterr().err == (
        "ppctl: tune.recipe=tuned: recipes/tuned.sbatch was not written by `ppctl tune` and stays. Use another name, "
        "or null.\n"
    )
    assert file.read_text() == "#!/bin/bash\n# mine\n"
    assert cli.main(["tune", *TUNE.split(), "tune.launch=tpu"]) == 2
    assert "tune.launch=tpu writes a job for TPUs, but hardware=h100." in capsys.readouterr().err


def test_a_script_has_the_mark_by_which_it_is_known(tmp_path):
    file = tmp_path / "one.sbatch"
    asked = request()
    write_job_script("slurm", asked, job_words("slurm", asked, "one"), Hosts(2, 8), file)
    assert file.read_text().splitlines()[:2] == ["#!/bin/bash", MARK]
