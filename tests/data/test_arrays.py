"""Data sets of whole arrays: held-out examples and refused arrays."""

import numpy as np
import pytest

from ppctl.data.array_data import from_arrays
from ppctl.data.dataset import described, description
from ppctl.errors import DataError


def rows(number=40, **changes):
    given = {
        "inputs": np.arange(number * 2.0).reshape(number, 2),
        "targets": np.arange(number) // 10,
        **changes,
    }
    return {name: array for name, array in given.items() if array is not None}


def dataset(arrays, **changes):
    return from_arrays(
        arrays, source="a.b", **{"batch_size": 4, "seed": 0, "eval_fraction": 0.25, **changes}
    )


def test_every_example_occurs_once_and_held_out_ones_are_of_all_classes():
    data = dataset(rows())
    assert (data.num_examples, data.num_eval_examples) == (30, 10)
    assert data.source == "a.b: 40 examples, inputs float64[2], targets int64[]"
    found = data.read(np.arange(40))
    np.testing.assert_array_equal(np.sort(found["inputs"][:, 0]), np.arange(0, 80, 2))
    np.testing.assert_array_equal(
        found["inputs"][:, 0] // 20, found["targets"]
    )  # they stay together
    held_out = data.read(np.arange(30, 40))["targets"]
    assert len({*held_out.tolist()}) == 4  # the file is sorted by class
    np.testing.assert_array_equal(
        dataset(rows(), seed=5).read(np.arange(30, 40))["targets"], held_out
    )


def test_a_batch_names_the_rows_of_the_users_arrays():
    """Not positions in the order that the data set draws; a description knows no rows."""
    data = dataset(rows(), seed=3)
    for step, batch in zip(range(20), data.batches(), strict=False):
        np.testing.assert_array_equal(batch["inputs"], rows()["inputs"][data.examples_of(step)])
    there = described(description(data, data.read(np.arange(4))))
    assert (there, there.rows) == (data, None)


def test_without_targets_the_inputs_are_the_targets():
    found = dataset(rows(targets=None)).read(np.arange(3))
    np.testing.assert_array_equal(found["inputs"], found["targets"])


def test_a_memory_map_has_the_fingerprint_of_its_content(tmp_path):
    np.save(tmp_path / "x.npy", rows()["inputs"])
    mapped = dataset({"inputs": np.load(tmp_path / "x.npy", mmap_mode="r")})
    assert mapped.fingerprint == dataset(rows(targets=None)).fingerprint
    assert mapped.fingerprint != dataset({"inputs": rows()["inputs"] + 1}).fingerprint
    assert mapped.fingerprint != dataset({"inputs": rows()["inputs"].reshape(40, 1, 2)}).fingerprint


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        (rows(targets=[1, 2]), "a.b: targets is list; it must be a numpy array of numbers"),
        (rows(inputs=np.array(["a"])), r"a.b: inputs is <U1\[1\]; it must be"),
        (rows(inputs=None), "a.b has targets; name one of them inputs"),
        ({}, "a.b has no arrays; name one"),
        (
            rows(targets=np.arange(39)),
            "a.b has 40 of inputs, 39 of targets; every array needs one entry per example",
        ),
        (
            rows(4),
            r"a.b: 4 examples: to train on a batch and hold out another takes 2.data.batch_size = 8",
        ),
    ],
)
def test_invalid_arrays_are_refused(arrays, said):
    with pytest.raises(DataError, match=said):
        dataset(arrays)


def test_a_description_gives_zeros_of_the_same_type_and_all_sizes():
    data = dataset(rows())
    there = described(description(data, data.read(np.arange(4))))
    assert there == data
    for name, array in there.read(np.arange(3)).items():
        assert not array.any()
        assert (array.shape, array.dtype) == (
            data.read(np.arange(3))[name].shape,
            data.read(np.arange(3))[name].dtype,
        )
