"""Dropout in the blocks of a transformer: of branches, and of the inputs of adapters.

Draws are those of a layer, by number: 0 and 1 of the branches, then one for each linear map that
may have an adapter.
"""

from dataclasses import dataclass, replace

import jax

from ppctl.model.architecture import Architecture
from ppctl.model.lora import PROJECTIONS
from ppctl.model.parallel import StageAxes, own_part, token_keys
from ppctl.model.random_keys import dropout, dropped, kept_entries

FIRST_ADAPTER = 2  # the draw of the first adapter; those before are of branches
DRAWS = {name: FIRST_ADAPTER + place for place, (_, name) in enumerate(PROJECTIONS.values())}
DIVIDED_INPUTS = ("out", "down")  # tp divides the columns of their inputs, of others the outputs


@dataclass(frozen=True)
class BlockDropout:
    """Dropout of a block for the examples of a microbatch, equal on every layout.

    key: of the layer, a key for each example; None, as in evaluations: nothing is dropped.
    num_tokens: of a sequence on this device.
    """

    sizes: Architecture
    axes: StageAxes
    key: jax.Array | None
    num_tokens: int

    def branch(self, x_MD: jax.Array, draw: int) -> jax.Array:
        """Return a branch of this device's rows with dropped entries."""
        if self.key is None or not self.sizes.dropout:
            return x_MD
        keys = token_keys(self.key, self.num_tokens, self.axes).reshape(-1)
        return dropout(keys, x_MD, self.sizes.dropout, draw=draw)

    def adapter_input(self, x_MI: jax.Array, name: str) -> jax.Array:
        """Return the input of an adapter, all rows along tp, with dropped entries.

        name: of the linear map in a block. Where tp divides the input's columns, a device draws for
        all of them and takes its own.
        """
        rate = 0.0 if self.sizes.lora is None else self.sizes.lora.dropout
        if self.key is None or not rate:
            return x_MI
        whole = replace(self.axes, sequence_parallel=False)  # the rows that tp has gathered
        keys = token_keys(self.key, self.num_tokens * self.axes.row_parts, whole).reshape(-1)
        is_divided = name in DIVIDED_INPUTS
        width = x_MI.shape[1] * (self.axes.tp if is_divided else 1)
        is_kept = kept_entries(keys, (width,), rate, DRAWS[name])
        return dropped(x_MI, own_part(is_kept, self.axes) if is_divided else is_kept, rate)
