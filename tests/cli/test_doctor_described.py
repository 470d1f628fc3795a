"""`ppctl doctor hardware=h100` where no H100 is: what can be told from here, and what cannot."""

import json
from dataclasses import replace

import pytest

from ppctl import cli, config
from ppctl.cli.commands import doctor
from ppctl.cli.subcommands import doctor_findings
from ppctl.training.pipeline.known_hardware import known

H100 = replace(known()["h100"], network=known()["h100"].network | {"host_devices": 4})
REQUEST = config.Config(
    model=config.Transformer(num_layers=8, d_model=16, num_heads=2, seq_len=32),
    mesh=config.Mesh(1, 4, 2),
    schedule=config.Schedule("1f1b", 8),
    data=config.Synthetic(batch_size=32),
    hardware=H100,
)


@pytest.fixture
def ask(monkeypatch, tmp_path, capsys):
    """A function that examines a request in an empty directory: (exit code, the JSON printed)."""
    monkeypatch.chdir(tmp_path)

    def examine(request=REQUEST):
        code = doctor.doctor(request, as_json=True)
        assert list(tmp_path.iterdir()) == []
        return code, json.loads(capsys.readouterr().out)

    return examine


def texts(found):
    return {finding["what"]: finding["text"] for finding in found["findings"]}


def test_what_can_be_told_from_here_is_told(ask):
    code, found = ask()
    said = texts(found)
    assert (code, found["ok"], found["described"], found["links"]) == (0, True, "h100", [])
    assert said["devices"] == "8 x h100 (described), 2 hosts: pp over 2"
    assert said["memory"].startswith("fits: ")
    assert "75% of the 79.1 GiB of hardware=h100" in said["memory"]
    assert "hardware=h100" in said["step"]
    assert "mesh=1x4x2, 1f1b: a state takes " in said["request"]
    assert {"versions", "data"} <= set(said)
    assert found["unknown"].startswith("processes, links, run.dir")


def test_what_would_not_fit_there_is_a_no_with_its_remedy(ask):
    small = replace(REQUEST, hardware=replace(H100, memory_gib=1e-5))
    code, found = ask(small)
    [bad] = [finding for finding in found["findings"] if not finding["is_ok"]]
    assert (code, found["ok"], bad["what"]) == (1, False, "memory")
    assert bad["text"].startswith("does not fit: ")


def test_what_cannot_be_is_a_no_wherever_it_would_run(ask):
    code, found = ask(replace(REQUEST, schedule=config.Schedule("1f1b", 5)))
    assert code == 1
    assert "5" in texts(found)["request"]
    held_out = config.Run(eval_every=1, eval_batches=10**6)
    code, found = ask(replace(REQUEST, run=held_out))
    assert (code, "held out" in texts(found)["request"]) == (1, True)


def test_hardware_that_is_here_is_asked_itself(monkeypatch):
    assert doctor_findings.described(config.AutoHardware()) is None
    assert doctor_findings.described(known()["host"]) is None
    assert doctor_findings.described(H100) == H100


@pytest.mark.full
def test_it_says_in_a_last_line_that_nothing_speaks_against_it(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    words = ["doctor", "recipes=tiny", "hardware=h100", "model.d_model=16", "model.num_heads=2"]
    assert cli.main(words) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[-1] == "this request would train on hardware=h100, as far as this machine can tell"
    assert [line[:4] for line in out[:-1]] == ["ok  "] * (len(out) - 2) + ["--  "]
