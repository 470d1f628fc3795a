"""run.on_nonfinite=skip on several processes: one sees a bad gradient, all skip the step."""

import pytest
from support import processes
from support.small_runs import records

from ppctl import cli

ROWS = """
import numpy as np

def rows():
    draw = np.random.default_rng(0)
    inputs = draw.standard_normal((64, 5)).astype(np.float32)
    inputs[17] = np.nan
    return {"inputs": inputs, "targets": draw.standard_normal((64, 3)).astype(np.float32)}
"""
BAD_ROWS = (
    "data=custom",
    "data.target=rows_of_processes.rows",
    "data.batch_size=16",
    "data.eval_fraction=0",
    "run.on_nonfinite=skip",
    "run.num_steps=5",
)


@pytest.mark.full  # a run in tests/launch/test_launch_train.py skips, too
@pytest.mark.parametrize(
    "layout",
    [["mesh=2x1"], ["mesh=1x2", "executor=mpmd", "schedule=1f1b"]],
    ids=["dp: a process's own part of the batch holds the row", "pp mpmd"],
)
def test_a_bad_gradient_of_one_process_is_skipped_by_all(layout, tmp_path, monkeypatch):
    (tmp_path / "rows_of_processes.py").write_text(ROWS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(
        processes, "WORDS", [word for word in processes.WORDS if not word.startswith("data")]
    )
    with processes.processes(2, tmp_path / "run", *BAD_ROWS, *layout) as started:
        assert [process.end() for process in started] == [0, 0], started[0].lines
    assert started[1].lines == []
    assert (
        cli.main(
            ["train", *processes.WORDS, *BAD_ROWS, "mesh=1x1", f"run.dir={tmp_path / 'alone'}"]
        )
        == 0
    )
    (skipped,) = records(tmp_path / "run", "skipped.jsonl")
    assert [skipped] == records(tmp_path / "alone", "skipped.jsonl")
    assert skipped["step"] < 5, "the next steps show that the state stayed as it was"
    of_two, of_one = (
        [record["loss"] for record in records(tmp_path / name) if record["step"] != skipped["step"]]
        for name in ("run", "alone")
    )
    assert of_two == pytest.approx(of_one, rel=1e-9)
