"""Which layers each stage holds. Standard library only."""

from __future__ import annotations

from itertools import pairwise

from ppctl.errors import ConfigError

Partition = tuple[range, ...]


def uniform(num_layers: int, num_stages: int) -> Partition:
    """Contiguous layers for each stage, sizes differing by one at most, the larger ones first.

    >>> [len(layers) for layers in uniform(10, 4)]
    [3, 3, 2, 2]
    """
    if num_layers < num_stages:
        raise ConfigError(
            f"model.num_layers={num_layers} is less than the number of stages, pp*num_chunks = {num_stages}, so that "
            f"a stage would be empty. Use model.num_layers={num_stages} or more, fewer ranks or fewer chunks."
        )
    size, extra = divmod(num_layers, num_stages)
    starts = [s * size + min(s, extra) for s in range(num_stages + 1)]
    return tuple(range(low, high) for low, high in pairwise(starts))
