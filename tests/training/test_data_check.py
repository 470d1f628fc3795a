"""Whether there is enough data: how many batches an evaluation has."""

from dataclasses import replace

import numpy as np
import pytest

from ppctl.config import Config, Regression, Run, Tokens, Transformer
from ppctl.data.token_examples import NO_TOKEN
from ppctl.errors import DataError
from ppctl.training.pipeline.job import num_eval_batches, open_data
from ppctl.training.pipeline.job_checks import check_evaluations

ROWS = Regression(
    batch_size=8, num_features=2, num_targets=1, num_rows=100, eval_fraction=0.25
)  # 3 batches and a row


def rows(**changes):
    return open_data(Config(data=replace(ROWS, **changes)))


def test_an_evaluation_uses_the_held_out_batches_with_a_note():
    assert num_eval_batches(Run(), rows(num_rows=1000)) == 4
    assert check_evaluations(Run(), rows(num_rows=1000)) is None
    assert num_eval_batches(Run(), rows()) == 3
    assert check_evaluations(Run(), rows()) == (
        "evaluates on 3 batches of data.batch_size=8, not the usual 4: 25 of 100 examples are held out."
    )
    assert check_evaluations(Run(eval_batches=2), rows()) is None
    assert check_evaluations(Run(eval_every=None), rows()) is None


def test_a_request_for_more_than_is_held_out_is_refused_with_the_equation():
    message = (
        r"run.eval_batches\*data.batch_size = 4\*8 = 32 is more than the 25 examples held out of "
        r"100. Use run.eva"
    )
    with pytest.raises(DataError, match=message):
        check_evaluations(Run(eval_batches=4), rows())
    few = replace(rows(), num_eval_examples=5)  # possible in a custom data set
    message = (
        r"1\*8 = 8 is more than the 5 .* Use a smaller data.batch_size, run.eval_every=null "
        r"or a larger data.eval_fraction"
    )
    with pytest.raises(DataError, match=message):
        check_evaluations(Run(), few)


def test_held_out_batches_without_a_target_are_refused_before_step_1():
    first = {"inputs": np.zeros((8, 4), np.int32), "targets": np.full((8, 4), NO_TOKEN, np.int32)}
    data = replace(rows(), vocab_size=9, read=lambda numbers: first)
    with pytest.raises(DataError, match=" has no targets in the 3 batches of an evaluation"):
        check_evaluations(Run(), data)
    assert check_evaluations(Run(eval_every=None), data) is None
    one = {name: a.copy() for name, a in first.items()}
    one["targets"][5, 2] = 3
    late = replace(data, read=lambda numbers: one if 90 in numbers else first)
    assert "evaluates on 3 batches" in str(check_evaluations(Run(), late))


def test_sizes_are_known_without_reading_the_values(tmp_path):
    np.save(tmp_path / "ids.npy", np.full(1000, -1, np.int32))  # ids that training refuses
    data = Tokens(path=str(tmp_path / "ids.npy"), batch_size=4)
    config = Config(data=data, model=Transformer(seq_len=10))
    assert open_data(config, sizes_only=True).num_eval_examples == 4
