"""Layers divided over stages: all of them, in order, as evenly as they go."""

import pytest

from ppctl.errors import ConfigError
from ppctl.partition import uniform


@pytest.mark.parametrize("num_stages", range(1, 13))
def test_stages_hold_all_layers_in_order_and_differ_by_one_at_most(num_stages):
    for num_layers in range(num_stages, 40):
        partition = uniform(num_layers, num_stages)
        sizes = [len(layers) for layers in partition]
        assert [l for layers in partition for l in layers] == list(range(num_layers))
        assert len(sizes) == num_stages
        assert sizes == sorted(sizes, reverse=True)
        assert sizes[0] - sizes[-1] <= 1


def test_fewer_layers_than_stages_are_refused_in_one_line():
    with pytest.raises(ConfigError) as error:
        uniform(6, 8)
    assert str(error.value) == (
        "model.num_layers=6 is less than the number of stages, pp*num_chunks = 8, so that a stage would be empty. "
        "Use model.num_layers=8 or more, fewer ranks or fewer chunks."
    )
