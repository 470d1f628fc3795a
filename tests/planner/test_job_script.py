"""Job scripts that `ppctl tune` writes: their numbers are the layout's, their request is the
recipe's, others' stay.
"""

import json
import os
import re
import shlex
import subprocess
from dataclasses import replace

import kubernetes_validate
import pytest
import yaml

from ppctl import cli, config
from ppctl.cli.commands.tune import job_words
from ppctl.cli.compose import compose
from ppctl.errors import ConfigError
from ppctl.planner.search.tuned_files import LAUNCHERS, MARK, Hosts, hosts_for, write_job_script
from ppctl.schedule.mesh_axes import TEXT_AXES
from ppctl.training.pipeline.known_hardware import known

ODD = 'it\'s $HOME/$(pwd) $$ "q" a b'  # shells and Kubernetes would read it otherwise
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


def script(launcher, asked, path):
    file = path / f"tuned{LAUNCHERS[launcher].suffix}"
    hosts = hosts_for(launcher, asked.hardware, asked.mesh.num_devices)
    write_job_script(
        launcher,
        f"mesh=1x1 of {asked.mesh.num_devices} v5e",
        job_words(launcher, asked, "tuned"),
        hosts,
        file,
    )
    return file.read_text()


def composed(words):
    found = compose(words)
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


# --- numbers ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_devices", "hosts"), SIZES)
def test_the_numbers_of_a_slurm_script_are_the_layouts(num_devices, hosts, tmp_path):
    asked = request(num_devices)
    text = script("slurm", asked, tmp_path)
    said = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", text, re.MULTILINE))
    assert hosts_for("slurm", asked.hardware, num_devices) == hosts
    numbers = [int(said[key]) for key in ("nodes", "ntasks-per-node", "gpus-per-node")]
    assert numbers == [hosts.number, hosts.devices, hosts.devices]
    assert text.splitlines()[:2] == ["#!/bin/bash", MARK]


@pytest.mark.parametrize(("num_devices", "hosts"), SIZES)
def test_the_numbers_of_a_jobset_are_the_layouts_and_kubernetes_takes_it(
    num_devices, hosts, tmp_path
):
    document = yaml.safe_load(script("kubernetes", request(num_devices), tmp_path))
    (replicated,) = document["spec"]["replicatedJobs"]
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "one"},
        **replicated["template"],
    }
    kubernetes_validate.validate(job, "1.33", strict=True)
    spec = job["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    found = composed(shlex.split(container["args"][0].replace("$JOB_COMPLETION_INDEX", "0"))[3:])
    assert spec["completions"] == spec["parallelism"] == found.run.num_processes == hosts.number
    assert container["resources"]["limits"]["nvidia.com/gpu"] == hosts.devices
    assert found.mesh.num_devices == hosts.number * hosts.devices
    assert (
        found.run.coordinator == f"tuned-workers-0-0.tuned:{container['ports'][0]['containerPort']}"
    )
    assert found.run.dir == "/runs/tuned"  # on the claim


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_head_of_a_script_counts_devices_by_all_axes_of_a_mesh(launcher, tmp_path):
    file = tmp_path / "script"
    hosts = None if launcher == "tpu" else Hosts(8, 8)
    write_job_script(launcher, "mesh=1x8x4x1x2", ["mesh=1x8x4x1x2"], hosts, file)
    [product] = re.findall(r"^# 2\. (\S+) of the mesh is ", file.read_text(), re.MULTILINE)
    assert product.split("*") == [*TEXT_AXES]


def test_a_jobset_has_a_name_of_dns(tmp_path):
    file = tmp_path / "My_Run.jobset.yml"
    write_job_script("kubernetes", "mesh=1x2", [], Hosts(2, 8), file)
    assert yaml.safe_load(file.read_text())["metadata"]["name"] == "my-run"


def test_a_script_for_a_tpu_slice_states_its_chips(tmp_path):
    assert "of 32 v5e on every host" in script("tpu", request(32, "v5e"), tmp_path)


@pytest.mark.parametrize(
    ("launcher", "hardware", "num_devices", "message"),
    [
        (
            "tpu",
            "h100",
            8,
            "tune.launch=tpu is for TPUs, but hardware=h100. Use another tune.launch.",
        ),
        ("slurm", "v5e", 8, "tune.launch=slurm is for NVIDIA GPUs, but hardware=v5e."),
        ("kubernetes", "host", 8, "tune.launch=kubernetes is for NVIDIA GPUs, but hardware=host."),
        (
            "slurm",
            "h100",
            12,
            "12 devices do not fill hosts of 8 (hardware=h100). Use another tune.devices",
        ),
    ],
)
def test_a_launcher_that_does_not_fit_the_hardware_is_refused(
    launcher, hardware, num_devices, message
):
    with pytest.raises(ConfigError, match=re.escape(message)):
        hosts_for(launcher, known()[hardware], num_devices)


def test_hardware_must_state_the_gpus_of_a_host():
    mine = replace(known()["h100"], name="mine", network=None)
    with pytest.raises(ConfigError, match="8 devices do not fill hosts of unknown size"):
        hosts_for("slurm", mine, 8)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"launch": "lsf"}, "tune.launch=lsf is not one of slurm, kubernetes, tpu."),
        (
            {"launch": "slurm", "recipe": None},
            "tune.launch=slurm writes a job script next to the recipe, but tune.rec",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(words, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        config.check(replace(config.Config(), tune=config.Tune(**words)))


# --- the request --------------------------------------------------------------------------------


def odd(launcher):
    """A request with texts that must be quoted, planned on a CPU."""
    hardware = "v5e" if launcher == "tpu" else "h100"
    fraction = None if launcher == "tpu" else 0.9
    asked = request(16, hardware, platform="cpu", name="mine", memory_fraction=fraction)
    data = config.Tokens(path=ODD, vocab_size=64, batch_size=64)
    mesh = replace(asked.mesh, order="dp-pp-fsdp")
    return replace(asked, data=data, mesh=mesh)


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
            ["bash", "-c", f"set -- {script}; printf '%s\\0' \"$@\""],
            capture_output=True,
            text=True,
        )
        words = again.stdout.split("\0")[:-1]
        assert words[:4] == ["ppctl", "train", "run.distributed=auto", "run.platform=tpu"]
        return words[4:]
    (replicated,) = yaml.safe_load(text)["spec"]["replicatedJobs"]
    (container,) = replicated["template"]["spec"]["template"]["spec"]["containers"]
    command = container["args"][0].replace("$$", "$").replace("exec ppctl train", "printf '%s\\0'")
    done = subprocess.run(
        ["sh", "-c", command], capture_output=True, text=True, env={"JOB_COMPLETION_INDEX": "1"}
    )
    words = done.stdout.split("\0")[:-1]
    assert "run.process_id=1" in words
    return [
        *(
            word
            for word in words
            if not re.match(r"run\.(distributed|coordinator|num_proc|process)", word)
        ),
        "run.seed=3",
    ]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_job_requests_the_layout_on_the_devices_that_it_finds(launcher, tmp_path):
    asked = odd(launcher)
    found = composed(asked_for(launcher, script(launcher, asked, tmp_path), tmp_path))
    directory = "/runs/mine" if launcher == "kubernetes" else "runs/mine"
    run = replace(asked.run, seed=3, platform=None, dir=directory)
    assert found == replace(asked, run=run, tune=config.Tune())


def test_the_directory_is_the_users_where_that_is_given():
    assert "run.dir=/claim/one" in job_words("kubernetes", request(dir="/claim/one"), "tuned")
    assert "run.name=tuned" in job_words("slurm", request(), "tuned")


def test_custom_hardware_is_left_out_as_its_file_may_be_missing():
    asked = request()
    asked = replace(asked, hardware=replace(asked.hardware, name="mine"))
    assert not [word for word in job_words("slurm", asked, "tuned") if word.startswith("hardware")]


# --- files --------------------------------------------------------------------------------------

TUNE = (
    "mesh=1x2 hardware=h100 tune.schedules=[1f1b] tune.best=1 model=mlp model.num_layers=2 "
    "model.d_model=16 data=regression data.batch_size=8 run.dtype=bfloat16 run.platform=cpu"
)


def test_tune_writes_the_job_script_next_to_the_recipe_with_a_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["tune", *TUNE.split(), "tune.launch=slurm"]) == 0
    assert capsys.readouterr().out.endswith(
        "its job script is recipes/tuned.sbatch: sbatch recipes/tuned.sbatch\n"
    )
    file = tmp_path / "recipes/tuned.sbatch"
    assert os.access(file, os.X_OK)
    assert "#SBATCH --ntasks-per-node=2\n" in file.read_text()
    assert (
        cli.main(["tune", *TUNE.split(), "tune.launch=kubernetes", "--json"]) == 0
    )  # again, over the recipe
    document = json.loads(capsys.readouterr().out)
    assert document["job_script"] == "recipes/tuned.jobset.yml"
    assert document["job_command"] == "kubectl apply -f recipes/tuned.jobset.yml"
    assert document["hosts"] == {"number": 1, "devices": 2}
    assert not os.access(tmp_path / "recipes/tuned.jobset.yml", os.X_OK)


def test_an_existing_file_stays_and_no_layout_is_searched(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "ppctl.planner.search.layout_search.LayoutSearch", lambda *_: pytest.fail("searched")
    )
    file = tmp_path / "recipes/tuned.sbatch"
    file.parent.mkdir()
    file.write_text("#!/bin/bash\n# mine\n")
    assert cli.main(["tune", *TUNE.split(), "tune.launch=slurm"]) == 2
    assert capsys.readouterr().err == (
        "ppctl: tune.recipe=tuned: recipes/tuned.sbatch was not written by `ppctl tune` and "
        "is not overwritten. Use another name, or null.\n"
    )
    assert file.read_text() == "#!/bin/bash\n# mine\n"
    assert cli.main(["tune", *TUNE.split(), "tune.launch=tpu"]) == 2
    assert "tune.launch=tpu is for TPUs, but hardware=h100." in capsys.readouterr().err
