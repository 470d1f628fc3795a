"""The order of examples: permutations, mixtures, and batches read ahead."""

import threading

import numpy as np
import pytest

from ppctl.data.example_order import NUM_AHEAD, Epochs, ExampleOrder, read_ahead, shuffled

# examples at places 0, 1, n - 1, n and 3n + 1 of grain 0.2.18's MapDataset.range(n).shuffle(seed)
BY_GRAIN = {
    (2, 7): [1, 0, 0, 1, 0],
    (100, 0): [49, 83, 28, 35, 7],
    (70000, 5): [11331, 69609, 16886, 23400, 37122],
    (10**9, 2**32 - 1): [251802617, 129721388, 10851047, 742905154, 360731755],
}


@pytest.mark.parametrize(("number", "seed"), BY_GRAIN)
def test_the_order_is_grains(number, seed):
    order = Epochs(0, number, seed)
    places = np.array([0, 1, number - 1, number, 3 * number + 1])
    assert order.at(places).tolist() == BY_GRAIN[number, seed]


def test_a_mixture_is_grains():
    parts = Epochs(0, 10, 9), Epochs(10, 200, 9), Epochs(210, 33, 9)
    order = ExampleOrder(parts, (0.3, 0.2, 0.5))
    assert order.at(np.arange(12)).tolist() == [1, 38, 238, 6, 231, 125, 4, 230, 217, 227, 7, 107]
    assert order.at(10**9 + np.arange(4)).tolist() == [4, 177, 219, 8]


@pytest.mark.parametrize("number", [1, 2, 255, 256, 65535, 65536, 65537, 2**17 + 1])
def test_an_epoch_is_a_permutation(number):
    found = shuffled(np.arange(number), number, seed=7)
    assert np.array_equal(np.sort(found), np.arange(number))


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 3.0), (0.2, 0.5, 0.3)])
def test_every_stretch_of_a_mixture_has_the_weights(weights):
    parts = tuple(Epochs(1000 * i, 1000, seed=1) for i in range(len(weights)))
    order, total = ExampleOrder(parts, weights), sum(weights)
    for start in (0, 17, 5000):
        part_of = order.at(start + np.arange(200)) // 1000
        for i, weight in enumerate(weights):
            assert abs((part_of == i).sum() - 200 * weight / total) <= len(weights)


def test_a_mixture_uses_each_example_of_its_first_part_once_before_it_ends():
    order = ExampleOrder((Epochs(0, 10, 0), Epochs(10, 50, 0)), (1.0, 2.0))
    assert order.length == 30
    found = order.at(np.arange(order.length)).tolist()
    assert sorted(found)[:10] == list(range(10))
    assert len({*found}) == 30


def test_numbers_are_read_ahead_in_order_and_an_error_is_raised_in_its_place():
    started, may_end = [], threading.Event()

    def read(number):
        started.append(number)
        if number > 0:
            may_end.wait(10)
        if number == 3:
            raise ValueError("number 3")
        return number

    numbers = read_ahead(read, range(10))
    assert next(numbers) == 0
    assert {*started} <= set(range(1 + NUM_AHEAD))
    may_end.set()
    assert [next(numbers), next(numbers)] == [1, 2]
    with pytest.raises(ValueError, match="number 3"):
        next(numbers)


def test_all_numbers_of_a_short_range_are_read():
    for length in range(2 * NUM_AHEAD):
        assert list(read_ahead(lambda number: 2 * number, range(length))) == [
            2 * number for number in range(length)
        ]
