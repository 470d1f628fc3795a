"""`ppctl plan` for devices that are not here: with their compiler where it is installed, and
without.
"""

from importlib.util import find_spec
from types import SimpleNamespace

import jax
import pytest
from support.plans import plan_json, planned, request

from ppctl import cli, config
from ppctl.cli.commands.plan import plan as run_plan
from ppctl.errors import ConfigError
from ppctl.executors import described_devices as topology
from ppctl.training.pipeline import job as training_job
from ppctl.training.pipeline.engines.one_program import OneProgram
from ppctl.training.pipeline.known_hardware import known

TOPOLOGY = config.Plan(topology="v5e:2x2")


def described(monkeypatch):
    """A libtpu that describes four of the devices that are here."""
    monkeypatch.setattr(topology, "find_spec", lambda name: object())
    monkeypatch.setattr(
        topology.topologies,
        "get_topology_desc",
        lambda **asked: SimpleNamespace(devices=jax.devices()[4:]),
    )


def test_a_program_is_compiled_for_described_devices(monkeypatch, capsys):
    described(monkeypatch)
    code, found = plan_json(capsys, request(plan=TOPOLOGY))
    assert (code, found["fits"], found["limit_bytes"]) == (
        0,
        True,
        None,
    )  # the compiler has taken it
    with pytest.raises(
        ConfigError, match=r"1\*2\*1 = 2, but plan.topology=v5e:2x2 has 4 devices. Use a mesh"
    ):
        planned(request(mesh=config.Mesh(1, 2, 1), plan=TOPOLOGY))


REFUSED = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
    "(29.31G) exceeds available HBM (15.75G).\nmore"
)


def test_a_program_that_the_compiler_refuses_does_not_fit(monkeypatch, capsys):
    described(monkeypatch)

    def refuse(self, *, evaluate):
        raise jax.errors.JaxRuntimeError(REFUSED)

    monkeypatch.setattr(OneProgram, "compile", refuse)
    code, found = plan_json(capsys, request(plan=TOPOLOGY))
    assert (code, found["fits"], found["is_compiled"]) == (1, False, False)
    assert run_plan(request(plan=TOPOLOGY), as_json=False) == 1
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("does not fit (compiled in ")
    assert "required for HLO temporaries (29.31G) exceeds available HBM (15.75G). Most are" in said
    assert "more" not in said.replace("use more", "").replace("more and smaller", "").replace(
        "or more", ""
    )


@pytest.mark.skipif(find_spec("libtpu") is not None, reason="libtpu is installed")
def test_without_libtpu_it_is_named(capsys):
    assert cli.main(["plan", "mesh=2x2", "plan.topology=v5e:2x2"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "plan.topology=v5e:2x2 needs libtpu" in line
    assert "Or predict only, which takes no compiler: plan.compile=false." in line


@pytest.mark.parametrize(
    ("name", "devices", "limit", "hosts"),
    [
        ("v5e:2x2", "4 x v5e (described)", "hardware=v5e", ""),
        ("h100:2x2", "4 x h100 (described)", "hardware=h100", "2"),
    ],
)
def test_a_topology_is_predicted_for_without_its_compiler(name, devices, limit, hosts, monkeypatch):
    monkeypatch.setattr(training_job, "described_mesh", None)  # no compiler runs
    wanted = config.Plan(compile=False, topology=name)
    found = planned(request("zb_h1", executor="mpmd", plan=wanted))
    assert (found.devices, found.is_compiled, found.fits) == (devices, False, True)
    assert limit in str(found.limit_source)
    assert found.step_time_s is not None
    assert {stage.devices for stage in found.stages} == {()}  # no compiler has numbered them
    here = planned(request("zb_h1", executor="mpmd", hardware=known()[name.partition(":")[0]]))
    assert (found.memory_bytes, found.predicted_bytes) == (here.memory_bytes, here.predicted_bytes)
    if not hosts:
        assert found.step_time_s == here.step_time_s
    else:  # hosts of two GPUs each, not of the eight of hardware=h100
        assert found.step_time_s > here.step_time_s


def test_a_topology_of_another_size_is_refused_without_its_compiler():
    for name, message in (
        ("v5e:4x4", "has 16 devices. Use a mesh of 16"),
        ("h100:2x2x1", "names GPUs, but not as hosts x GPUs per host"),
    ):
        with pytest.raises(ConfigError, match=message):
            planned(request(plan=config.Plan(compile=False, topology=name)))


def test_tp_over_hosts_of_the_hardware_that_is_described_is_refused():
    with pytest.raises(
        ConfigError, match=r"^mesh.tp=16 would go over 2 hosts of 8 devices: .* mesh.tp=8"
    ):
        planned(request(mesh=config.Mesh(dp=1, pp=1, tp=16), hardware=known()["h100"]))


def test_a_topology_of_unknown_chips_has_memory_but_no_time():
    found = planned(request(plan=config.Plan(compile=False, topology="v9:2x2")))
    assert (found.devices, found.step_time_s, found.fits) == ("4 x v9", None, None)
    assert found.unknown is not None
    assert "no description of plan.topology=v9:2x2" in found.unknown


@pytest.mark.skipif(find_spec("libtpu") is None, reason="libtpu is not installed")
def test_a_program_is_compiled_for_tpus(capsys):
    code, found = plan_json(capsys, request(plan=TOPOLOGY))
    assert (code, found["devices"]) == (0, "4 x TPU v5 lite")
