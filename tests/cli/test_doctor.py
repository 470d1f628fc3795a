"""`ppctl doctor` passes if the request trains, and names the reason otherwise."""

import json
import os
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace

import jax
import pytest

from ppctl import config
from ppctl.cli.commands import doctor
from ppctl.errors import ConfigError
from ppctl.training.pipeline.known_hardware import known

TINY = config.Config(
    model=config.MLP(num_layers=4, d_model=8),
    mesh=config.Mesh(1, 3, 1),
    schedule=config.Schedule("1f1b", 4),
    data=config.Regression(
        "regression", batch_size=16, num_features=6, num_targets=3, num_rows=4000
    ),
)
Usage = namedtuple("Usage", "free")


@pytest.fixture
def ask(monkeypatch, tmp_path, capsys):
    """A function that examines a request in an empty directory: (exit code, the JSON printed)."""
    monkeypatch.chdir(tmp_path)

    def examine(request=TINY):
        code = doctor.doctor(request, as_json=True)
        return code, json.loads(capsys.readouterr().out)

    return examine


def bad(found):
    return [finding for finding in found["findings"] if not finding["is_ok"]]


def test_a_request_that_trains_on_this_machine_passes_and_leaves_no_file(ask, tmp_path):
    code, found = ask()
    assert (code, found["ok"], bad(found)) == (0, True, [])
    assert {f["what"] for f in found["findings"]} >= {
        "devices",
        "data",
        "request",
        "run.dir",
        "links",
    }
    assert [(link["first"], link["second"]) for link in found["links"]] == [(0, 1), (0, 2), (1, 2)]
    assert all(
        link["is_right"] and link["latency_s"] > 0 and link["bytes_per_s"] > 0
        for link in found["links"]
    )
    assert list(tmp_path.iterdir()) == []


def test_the_terminal_shows_the_findings(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    assert doctor.doctor(TINY, as_json=False) == 0
    out = capsys.readouterr().out
    assert "ok  devices   3 x cpu" in out
    assert out.endswith("this request would train here\n")


def test_missing_data_is_the_reason(ask):
    data = config.Tokens(path="nowhere.npy", vocab_size=16)
    code, found = ask(
        replace(TINY, model=config.Transformer(num_layers=3, d_model=8, num_heads=2), data=data)
    )
    assert code == 1
    assert [f["what"] for f in bad(found)] == ["request"]
    assert "nowhere.npy" in bad(found)[0]["text"]
    assert found["links"] == []


def test_a_run_dir_that_cannot_be_written_is_the_reason(ask, tmp_path):
    (tmp_path / "runs").write_text("a file")
    code, found = ask()
    assert code == 1
    assert bad(found)[0]["text"].startswith(
        "run.dir=runs/${run.name} cannot be written: Not a directory."
    )


def test_a_disk_too_small_for_the_checkpoints_is_the_reason(ask, monkeypatch):
    _, found = ask()
    state = next(f["text"] for f in found["findings"] if f["what"] == "request").split()[-2:]
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: Usage(free=100))
    code, found = ask()
    assert code == 1
    assert f"100 B free, but 4 x {' '.join(state)} = " in bad(found)[0]["text"]


def test_devices_that_are_only_described_are_for_plan(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"hardware=h100 describes devices that are not attached"):
        doctor.doctor(replace(TINY, hardware=known()["h100"]), as_json=False)
    assert list(tmp_path.iterdir()) == []


def test_numbers_that_arrive_changed_are_the_reason(ask, monkeypatch):
    true = doctor.measure_link
    monkeypatch.setattr(
        doctor, "measure_link", lambda a, b: replace(true(a, b), is_right=(a.id, b.id) != (0, 2))
    )
    code, found = ask()
    assert code == 1
    assert (
        bad(found)[0]["text"] == "devices 0 and 2: the received numbers differ from the sent ones."
    )


def test_an_exchange_that_loses_a_message_is_not_right(monkeypatch):
    monkeypatch.setattr(doctor.jax.lax, "ppermute", lambda x, axis, pairs: x)  # nothing moves
    assert not doctor.measure_link(*jax.devices()[:2]).is_right


def test_a_link_without_an_answer_ends_the_process_in_one_line():
    text = (
        "import time\nfrom ppctl.cli.commands import doctor\ndoctor.ANSWER_WITHIN_S = 0.2\n"
        "with doctor._answering('exchange of device 0 and 1'):\n    time.sleep(60)\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith(
        "ppctl: exchange of device 0 and 1: no answer within 0 s. Training would hang too"
    )


def test_one_device_of_each_process_is_probed():
    Device = namedtuple("Device", "id process_index")
    devices = [Device(i, i // 4) for i in range(32)]
    assert [device.id for device in doctor.probe_devices(devices)] == [0, 4, 8, 12, 16, 20, 24, 28]
    assert doctor.probe_devices(devices[:16]) == devices[:16]
    assert doctor.probe_devices([Device(i, 0) for i in range(64)]) == [
        Device(i, 0) for i in range(16)
    ]


@pytest.mark.full
@pytest.mark.slow
def test_two_processes_are_examined_together(tmp_path):
    request = (
        "model=mlp model.num_layers=4 data=regression mesh=1x2 schedule=1f1b launch.processes=2 "
        "run.platform=cpu"
    )
    command = [sys.executable, "-m", "ppctl.cli", "doctor", *request.split(), "--json"]
    env = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    texts = {f["what"]: f["text"] for f in found["findings"]}
    assert texts["processes"].startswith("2: 2 on ")
    assert [(link["first"], link["second"]) for link in found["links"]] != []
    assert list(tmp_path.iterdir()) == []
