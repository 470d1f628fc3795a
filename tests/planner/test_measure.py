"""Measured op times are kept by all that they depend on, and read again; what is damaged is
measured again.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from support.selection import full, full_except

from ppctl import config
from ppctl.config.config_dirs import user_cache_dir
from ppctl.errors import ConfigError
from ppctl.planner.cost import measured_costs as measure
from ppctl.planner.cost.piece_timing import Timing
from ppctl.planner.cost.step_time import op_times_of, predicted_time
from ppctl.training.pipeline.job import assemble

TINY = config.Config(
    model=config.MLP(num_layers=4, d_model=32),
    mesh=config.Mesh(1, 2, 1),
    schedule=config.Schedule("1f1b", 4),
    executor=config.Spmd(remat="none"),
    data=config.Regression(batch_size=16),
    run=config.Run(dtype="float32"),
)
PIECES = dict.fromkeys(("F", "B", "embed", "embed_grad", "head", "alone"), Timing(0.01, 0.01))
OF_MESH = {"once": Timing(0.02, 0.02), "tick": Timing(0.001, 0.001)}


@pytest.fixture
def timings(monkeypatch):
    """The names of what would have been timed, in order."""
    found = []

    def stand_in(name, times):
        return lambda job: found.append(name) or dict(times)

    monkeypatch.setattr(measure, "_pieces", stand_in("pieces", PIECES))
    monkeypatch.setattr(measure, "_of_mesh", stand_in("mesh", OF_MESH))
    monkeypatch.setattr(measure, "small_step", stand_in("small", {"small": Timing(0.05, 0.1)}))
    return found


def request(**changes):
    return replace(TINY, **changes)


def test_what_was_measured_is_read_and_not_measured_again(timings, tmp_path):
    first = measure.measured_op_times(assemble(TINY), tmp_path)
    assert timings == ["pieces", "mesh", "small"]
    assert measure.measured_op_times(assemble(TINY), tmp_path) == first
    assert timings == ["pieces", "mesh", "small"]
    assert len(list(tmp_path.iterdir())) == 3  # nothing half written


def test_another_schedule_of_the_same_tasks_needs_a_small_step_alone(timings, tmp_path):
    measure.measured_op_times(assemble(TINY), tmp_path)
    measure.measured_op_times(assemble(request(schedule=config.Schedule("gpipe", 4))), tmp_path)
    assert timings == ["pieces", "mesh", "small", "small"]


MODEL, DATA = TINY.model, TINY.data
CHANGES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "examples": ({"schedule": config.Schedule("1f1b", 8)}, ["pieces", "mesh"]),
    "remat": ({"executor": config.Spmd(remat="full")}, ["pieces", "mesh"]),
    "executor": ({"executor": config.Mpmd(remat="none")}, ["pieces", "mesh"]),
    "dtype": ({"run": config.Run(dtype="bfloat16")}, ["pieces", "mesh"]),
    "width": ({"model": replace(MODEL, d_model=64)}, ["pieces", "mesh"]),
    "targets": ({"data": replace(DATA, num_targets=128)}, ["pieces", "mesh"]),
    "split backwards": ({"schedule": config.Schedule("zb_h1", 4)}, ["pieces"]),
    "devices": (
        {"mesh": config.Mesh(2, 2, 1), "data": replace(DATA, batch_size=32)},
        ["pieces", "mesh"],
    ),
    "shape of the mesh": (
        {"mesh": config.Mesh(1, 1, 2), "schedule": config.Schedule("1f1b", 2)},
        ["mesh"],
    ),
    "layers": ({"model": replace(MODEL, num_layers=6)}, ["mesh"]),
    "partition": ({"partition": config.Explicit(layers=[3, 1])}, ["mesh"]),
}


@pytest.mark.parametrize(
    ("changes", "again"), full_except(CHANGES, "examples", "remat", "executor", "dtype")
)
def test_what_it_depends_on_is_measured_anew(changes, again, timings, tmp_path):
    measure.measured_op_times(assemble(TINY), tmp_path)
    timings.clear()
    job = assemble(request(**changes))
    for with_mesh, timed in ((False, measure._pieces), (True, measure._of_mesh)):
        measure._kept(tmp_path, measure._key(job, with_mesh=with_mesh), partial(timed, job))
    assert timings == again


DIVIDED = replace(
    TINY,
    model=config.Transformer(num_layers=4, d_model=16, num_heads=2, seq_len=16, attention="xla"),
    data=config.Synthetic(batch_size=16, vocab_size=32),
    mesh=config.Mesh(1, 2, 1, tp=2),
)


def test_how_stages_are_divided_is_part_of_what_was_measured():
    keys = [
        measure._key(assemble(replace(DIVIDED, **changes)), with_mesh=False)
        for changes in (
            {},
            {"mesh": config.Mesh(1, 2, 1, cp=2)},
            {"executor": config.Spmd(remat="none", sequence_parallel=False)},
        )
    ]
    assert all(a != b for i, a in enumerate(keys) for b in keys[:i])


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"tp": 2}, {"cp": 2}], ids=["tp", "cp"])
def test_pieces_of_a_divided_stage_run_on_its_devices(mesh, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    job = assemble(
        replace(
            DIVIDED, mesh=config.Mesh(1, 2, 1, **mesh), model=replace(DIVIDED.model, num_layers=2)
        )
    )
    time, _ = predicted_time(job, config.Measure())
    assert time is not None
    assert 0 < time.overhead_s < time.total_s < 60


def is_kept(job, directory):
    return (
        measure._read(measure._file(directory, measure._key(job, with_mesh=False))[0]) is not None
    )


def test_other_versions_and_other_code_are_measured_anew(timings, tmp_path, monkeypatch):
    job = assemble(TINY)
    measure.measured_op_times(job, tmp_path)
    monkeypatch.setattr(measure, "version", lambda name: "9.9")
    assert not is_kept(job, tmp_path)
    monkeypatch.undo()
    assert is_kept(job, tmp_path)
    monkeypatch.setattr(measure, "_code", lambda: "other")
    assert not is_kept(job, tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        full("[]"),
        full('{"times": {"F": [1]}}'),
        full('{"times": {"F": 1}}'),
        full('{"times": 3}'),
    ],
)
def test_a_damaged_file_is_measured_again(damage, timings, tmp_path):
    job = assemble(TINY)
    wanted = measure.measured_op_times(job, tmp_path)
    for file in tmp_path.iterdir():
        file.write_text(damage)
    timings.clear()
    for _ in range(2):  # the second time it is read
        assert measure.measured_op_times(job, tmp_path) == wanted
        assert timings == ["pieces", "mesh", "small"]


def test_the_cache_is_where_the_user_keeps_such_things(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache_dir() == tmp_path / "ppctl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache_dir() == tmp_path / ".cache/ppctl"


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("executor", [config.Mpmd(remat="none"), config.Spmd(remat="none")])
def test_a_step_is_predicted_from_what_was_timed(executor, tmp_path, monkeypatch):
    """Without a stand-in: the pieces of the model are run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    small = request(executor=executor, model=replace(MODEL, num_layers=2, d_model=16))
    job = assemble(small)
    time, _ = predicted_time(job, config.Measure())
    assert time is not None
    assert 0 < time.overhead_s < time.total_s < 10
    assert 0 <= time.bubble_fraction < 1
    assert predicted_time(job, config.Measure()) == (time, None)


def test_devices_that_are_not_here_cannot_be_timed():
    job = assemble(TINY)
    job = replace(job, config=request(plan=config.Plan(compile=True, topology="v5e:1x2")))
    with pytest.raises(
        ConfigError, match=r"^costs=measure times one layer on attached devices, not plan.topology"
    ):
        op_times_of(job, config.Measure())
    job = replace(job, config=request(run=replace(TINY.run, distributed="auto")))
    with pytest.raises(ConfigError, match=r"not run.distributed=auto. Use costs=analytic.$"):
        op_times_of(job, config.Measure())


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_timed(timings, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        ConfigError, match=r"^costs=measure keeps .*cache, which cannot be written: Not a dir"
    ):
        measure.measured_op_times(assemble(TINY), tmp_path / "file" / "cache")
    assert not timings
