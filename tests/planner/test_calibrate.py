"""Op times are scaled so that the small step is predicted as it was measured."""

from dataclasses import replace

import pytest

from ppctl import config
from ppctl.planner.cost.calibrate import LEAST_LAYERS, MOST_LAYERS, corrected, small_request
from ppctl.planner.cost.op_times import OpTimes, PieceTimes
from ppctl.planner.cost.piece_timing import Timing
from ppctl.planner.cost.step_runs import time_of
from ppctl.training.pipeline.job import assemble

REQUEST = config.Config(
    model=config.MLP(num_layers=12, d_model=16),
    mesh=config.Mesh(1, 2, 1),
    schedule=config.Interleaved(num_microbatches=16, num_chunks=2),
    executor=config.Spmd(remat="none"),
    data=config.Regression(batch_size=32),
)
PIECE = PieceTimes(1e-3, 2e-3, 1e-3)
OP_TIMES = OpTimes(PIECE, PIECE, PIECE, task_s=1e-4, hop_s=2e-4, overhead_s=0.0)


def test_the_small_request_has_few_layers_and_microbatches_of_the_same_size():
    asked = replace(REQUEST, schedule=replace(REQUEST.schedule, num_microbatches=32))
    job = assemble(asked)
    small = small_request(job)
    assert small is not None
    assert small.model.num_layers == LEAST_LAYERS * job.pipe.schedule.num_stages
    assert small.schedule.num_microbatches == 16
    assert assemble(small).pipe.model.microbatch == job.pipe.model.microbatch
    assert small_request(assemble(small)) == small


@pytest.mark.parametrize(("layers", "expected"), [(2, 2), (12, 3), (13, 4), (64, MOST_LAYERS)])
def test_a_quarter_of_a_large_stage_stands_for_it(layers, expected):
    job = assemble(replace(REQUEST, model=replace(REQUEST.model, num_layers=4 * layers)))
    small = small_request(job)
    assert small is not None
    assert small.model.num_layers == 4 * expected


def test_a_small_step_of_the_reference_has_one_stage():
    job = assemble(replace(REQUEST, mesh=config.Mesh(), executor=config.Reference()))
    small = small_request(job)
    assert small is not None
    assert small.model.num_layers == 3


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.7])
def test_the_small_step_is_predicted_as_it_was_measured(factor):
    job = assemble(REQUEST)
    small = small_request(job)
    assert small is not None
    seconds = time_of(assemble(small).pipe, OP_TIMES).pipeline_s
    found = corrected(job, OP_TIMES, Timing(factor * seconds, 0.0))
    assert time_of(assemble(small).pipe, found).pipeline_s == pytest.approx(
        factor * seconds, rel=1e-12
    )
    assert time_of(job.pipe, found).pipeline_s == pytest.approx(
        factor * time_of(job.pipe, OP_TIMES).pipeline_s, rel=1e-12
    )


@pytest.mark.parametrize(("longer", "busier"), [(2.0, 2.0), (1.0, 1.5), (1.3, 0.8)])
def test_devices_that_share_cores_are_compared_in_seconds_and_in_cpu_seconds(longer, busier):
    job, shared = assemble(REQUEST), replace(OP_TIMES, capacity=1.2, cores=1.5, overhead_cpu_s=0.0)
    small = small_request(job)
    assert small is not None
    time = time_of(assemble(small).pipe, shared)
    measured = Timing(longer * time.pipeline_s, busier * time.work_s * shared.cores)
    found = corrected(job, shared, measured)
    again = time_of(assemble(small).pipe, found)
    assert again.pipeline_s == pytest.approx(measured.wall_s, rel=1e-12)
    assert again.work_s * found.cores == pytest.approx(measured.cpu_s, rel=1e-12)


def test_per_step_overhead_is_subtracted_in_proportion_to_the_parameters():
    job = assemble(REQUEST)
    small = small_request(job)
    assert small is not None
    seconds = time_of(assemble(small).pipe, OP_TIMES).pipeline_s
    found = corrected(job, replace(OP_TIMES, overhead_s=1.0), Timing(seconds + 1.0, 0.0))
    assert (
        found.layer.forward_s > PIECE.forward_s
    )  # the small step has fewer parameters, so it takes less than that


def test_a_schedule_in_a_file_has_no_smaller_one(tmp_path):
    file = tmp_path / "s.csv"
    file.write_text("0F0,0B0\n1F0,1B0\n")
    asked = replace(
        REQUEST,
        schedule=config.Csv(path=str(file), num_microbatches=1),
        model=replace(REQUEST.model, num_layers=4),
    )
    assert small_request(assemble(asked)) is None


def test_a_small_step_that_leaves_nothing_to_tasks_corrects_nothing():
    op_times = replace(OP_TIMES, overhead_s=1e3)
    assert corrected(assemble(REQUEST), op_times, Timing(0.01, 0.01)) == op_times
