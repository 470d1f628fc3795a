"""The scripts and manifests of recipes/cluster: checked by tools, and run with stand-ins for a
cluster's commands.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from ppctl.cli.compose import compose
from ppctl.planner.search.tuned_files import JobTemplate

CLUSTER = Path(__file__).parents[2] / "recipes/cluster"
SCRIPTS = ("slurm.sbatch", "tpu_slice.sh")
VALUES = {
    "mark": "-",
    "layout": "mesh=4x8",
    "command": "-",
    "name": "ppctl",
    "nodes": "4",
    "devices": "8",
}
REQUEST = ["model=transformer", "mesh=4x8", "run.dir=/runs/one"]
FINAL = (0, 2, 4)  # done, wrong request, loss not finite


def filled(file):
    """A template with its values."""
    return JobTemplate((CLUSTER / file).read_text()).substitute(VALUES, request=shlex.join(REQUEST))


@pytest.fixture
def stand_in(tmp_path):
    """Return a function that runs a script: (exit code, arguments of the cluster's commands)."""

    def run(script, commands, *words, **variables):
        log = tmp_path / "calls"
        for name, codes in commands.items():
            file = tmp_path / name
            # logs its arguments; the n-th call ends with the n-th code, later ones with the last
            file.write_text(
                "#!/bin/bash\n"
                f'echo "{name} ${{*@Q}}" >> {log}\n'
                f"codes=({' '.join(map(str, codes))})\n"
                f"calls=$(grep -c '^{name} ' {log})\n"
                'exit "${codes[calls <= ${#codes[@]} ? calls - 1 : -1]}"\n'
            )
            file.chmod(0o755)
        env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", **variables}
        file = tmp_path / script
        file.write_text(filled(script))
        done = subprocess.run(
            ["bash", file, *words], env=env, capture_output=True, text=True, timeout=30
        )
        return done.returncode, [shlex.split(line) for line in log.read_text().splitlines()]

    return run


@pytest.mark.parametrize("script", SCRIPTS)
def test_shellcheck_finds_no_fault(script):
    checker = [Path(sys.executable).parent / "shellcheck", "-"]
    found = subprocess.run(checker, input=filled(script), capture_output=True, text=True)
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("file", [*SCRIPTS, "jobset.yaml"])
def test_five_lines_explain_it(file):
    comments = re.findall(r"^# (\d)\. ", (CLUSTER / file).read_text(), re.MULTILINE)
    assert comments == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize("code", [*FINAL, 1, 3, 134, 137, 143])
def test_slurm_puts_a_job_back_unless_its_end_is_final(stand_in, code):
    words = ["run.seed=3", "run.name=with space"]
    ended, calls = stand_in(
        "slurm.sbatch", {"srun": [code], "scontrol": [0]}, *words, SLURM_JOB_ID="7"
    )
    assert calls[0] == [
        "srun",
        "--kill-on-bad-exit=1",
        "ppctl",
        "train",
        "run.distributed=auto",
        *REQUEST,
        *words,
    ]
    assert calls[1:] == ([] if code in FINAL else [["scontrol", "requeue", "7"]])
    assert ended == (code if code in FINAL else 0)


def test_slurm_stops_after_the_maximum_number_of_restarts(stand_in):
    counted = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2", "MAX_RESTARTS": "2"}
    ended, calls = stand_in("slurm.sbatch", {"srun": [137], "scontrol": [0]}, **counted)
    assert (ended, len(calls)) == (137, 1)


def test_a_tpu_slice_gets_the_request_as_it_was_typed(stand_in):
    slice_name = {"TPU_NAME": "t", "ZONE": "z"}
    ended, calls = stand_in(
        "tpu_slice.sh", {"gcloud": [255, 143, 0]}, "run.name=with space", **slice_name
    )
    assert (ended, len(calls)) == (0, 3)
    command = next(
        word.removeprefix("--command=") for word in calls[0] if word.startswith("--command=")
    )
    wanted = [
        "ppctl",
        "train",
        "run.distributed=auto",
        "run.platform=tpu",
        *REQUEST,
        "run.name=with space",
    ]
    assert shlex.split(command) == wanted


@pytest.mark.parametrize(("codes", "restarts"), [([4], 0), ([2], 0), ([137], 1)])
def test_a_tpu_slice_starts_again_unless_the_end_is_final(stand_in, codes, restarts):
    variables = {"TPU_NAME": "t", "ZONE": "z", "MAX_RESTARTS": "1"}
    ended, calls = stand_in("tpu_slice.sh", {"gcloud": codes}, **variables)
    assert (ended, len(calls)) == (codes[-1], 1 + restarts)


@pytest.fixture
def jobset():
    return yaml.safe_load(filled("jobset.yaml"))


def test_the_jobsets_job_is_valid_for_kubernetes(jobset):
    (replicated,) = jobset["spec"]["replicatedJobs"]
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "one"},
        **replicated["template"],
    }
    kubernetes_validate.validate(job, "1.33", strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(
            job | {"spec": job["spec"] | {"completion": 1}}, "1.33", strict=True
        )


def test_the_jobsets_command_composes_and_its_numbers_agree(jobset):
    name, (replicated,) = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    _, program, command, *overrides = shlex.split(
        container["args"][0].replace("$JOB_COMPLETION_INDEX", "3")
    )
    assert (program, command) == ("ppctl", "train")
    config = compose(overrides)
    assert config.run.num_processes == job["completions"] == job["parallelism"]
    assert config.run.process_id == 3
    # JobSet names a pod JOBSET-JOB-REPLICA-INDEX, below a domain of the JobSet's name
    port = container["ports"][0]["containerPort"]
    assert config.run.coordinator == f"{name}-{replicated['name']}-0-0.{name}:{port}"
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert config.mesh.num_devices == gpus * config.run.num_processes
    assert any(
        config.run.dir.startswith(f"{mount['mountPath']}/") for mount in container["volumeMounts"]
    )
    assert tuple(job["podFailurePolicy"]["rules"][0]["onExitCodes"]["values"]) == FINAL[1:]
