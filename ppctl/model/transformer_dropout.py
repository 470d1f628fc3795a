"""Dropout in the blocks of a transformer: on branches and on the inputs of adapters.

Each draw of a layer has an index: 0 and 1 for the branches (attention, then MLP), then one for each
linear map that may have an adapter.
"""

from dataclasses import dataclass, replace

import jax

from ppctl.model.lora import PROJECTIONS, Lora
from ppctl.model.parallel import StageAxes, own_part, token_keys
from ppctl.model.random_keys import dropout, dropped, kept_entries

FIRST_ADAPTER = 2  # index of the first adapter's draw
DRAWS = {name: FIRST_ADAPTER + place for place, (_, name) in enumerate(PROJECTIONS.values())}
# linear maps whose inputs tp divides; of all others, tp divides the outputs
DIVIDED_INPUTS = ("out", "down")


@dataclass(frozen=True)
class BlockDropout:
    """Dropout of a block for the examples of a microbatch; every layout drops the same entries.

    rate: share of dropped entries of branches. key: the layer's keys, one for each example; None,
    as in evaluations: nothing is dropped. num_tokens: tokens of a sequence that this device holds.
    """

    rate: float
    lora: Lora | None
    axes: StageAxes
    key: jax.Array | None
    num_tokens: int

    def branch(self, x_MD: jax.Array, draw: int) -> jax.Array:
        """Return a branch's output with dropout, for this device's rows."""
        if self.key is None or not self.rate:
            return x_MD
        keys = token_keys(self.key, self.num_tokens, self.axes).reshape(-1)
        return dropout(keys, x_MD, self.rate, draw=draw)

    def adapter_input(self, x_MI: jax.Array, name: str) -> jax.Array:
        """Return an adapter's input with dropout, for the rows of all devices along tp.

        name: the adapted linear map. If tp divides the input's columns, each device draws for all
        columns and slices its part, so that the draws do not depend on tp.
        """
        rate = 0.0 if self.lora is None else self.lora.dropout
        if self.key is None or not rate:
            return x_MI
        whole = replace(self.axes, sequence_parallel=False)  # all rows: tp has gathered them
        keys = token_keys(self.key, self.num_tokens * self.axes.row_parts, whole).reshape(-1)
        is_divided = name in DIVIDED_INPUTS
        width = x_MI.shape[1] * (self.axes.tp if is_divided else 1)
        is_kept = kept_entries(keys, (width,), rate, DRAWS[name])
        return dropped(x_MI, own_part(is_kept, self.axes) if is_divided else is_kept, rate)
