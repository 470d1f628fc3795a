"""The parts of a transformer's layer: parameters of linear maps, norms, and dropout.

Each draw of dropout in a layer has an index: 0 and 1 for the branches (attention, then MLP), then
one for each linear map that may have an adapter.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.nn import initializers
from jax.sharding import PartitionSpec as P

from ppctl.config.groups.transformer_sizes import TARGETS, Architecture, LinearMap, Norm
from ppctl.model.lora import A, B, Lora
from ppctl.model.parallel import StageAxes, own_part, token_keys
from ppctl.model.random_keys import Draw, dropout, dropped, kept_entries

Params = dict[str, Any]
FIRST_ADAPTER = 2  # index of the first adapter's draw


def whole(a: jax.Array) -> jax.Array:
    return a


# parameters


def new_norm(width: int, sizes: Architecture, draw: Draw) -> Params:
    is_zero = sizes.traits.norm_plus_one
    return {"scale": draw(initializers.zeros if is_zero else initializers.ones, width)}


def new_maps(maps: Iterable[LinearMap], draw: Draw) -> Params:
    """Return the initial parameters of linear maps, without adapters, in a tree of their paths."""
    layer: Params = {}
    for each in maps:
        part, _, name = each.path.rpartition("/")
        linear = {"kernel": draw(initializers.lecun_normal(), each.num_in, each.num_out)}
        if each.has_bias:
            linear |= {"bias": draw(initializers.zeros, each.num_out)}
        (layer.setdefault(part, {}) if part else layer)[name] = linear
    return layer


def specs_over_tp(part: LinearMap | Norm, tp: int) -> dict[str, P]:
    """Return the PartitionSpecs of the parameters that tp divides, by their paths in a layer."""
    columns, rows, path = P(None, "tp"), P("tp"), part.path
    if part.divided is None or (part.num_parts is not None and part.num_parts < tp):
        return {}
    if part.divided == "inputs":
        return {f"{path}/kernel": rows, f"{path}/{A}": rows}
    of_matrices = {f"{path}/kernel": columns, f"{path}/{B}": columns}
    return of_matrices | {f"{path}/bias": rows, f"{path}/scale": rows}


# functions


def normed(
    params: Params,
    x: jax.Array,
    sizes: Architecture,
    parts: Callable[[jax.Array], jax.Array] = whole,
) -> jax.Array:
    """Return the RMSNorm of x, in at least float32; with norm_plus_one (Gemma) times 1 + scale.

    parts: function from the mean square over this device's columns to that over all columns.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    scale = params["scale"].astype(wide.dtype) + (1 if sizes.traits.norm_plus_one else 0)
    mean_square = parts(jnp.square(wide).mean(-1, keepdims=True))
    return (wide * (jax.lax.rsqrt(mean_square + sizes.norm_eps) * scale)).astype(x.dtype)


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

    def adapter_input(self, x_MI: jax.Array, linear: LinearMap) -> jax.Array:
        """Return an adapter's input with dropout, for the rows of all devices along tp.

        If tp divides the input's columns, each device draws for all columns and slices its part, so
        that the draws do not depend on tp.
        """
        assert linear.target is not None, "an adapter's linear map is a target"
        rate = 0.0 if self.lora is None else self.lora.dropout
        if self.key is None or not rate:
            return x_MI
        whole = replace(self.axes, sequence_parallel=False)  # all rows: tp has gathered them
        keys = token_keys(self.key, self.num_tokens * self.axes.row_parts, whole).reshape(-1)
        is_divided = linear.divided == "inputs"
        width = x_MI.shape[1] * (self.axes.tp if is_divided else 1)
        draw = FIRST_ADAPTER + TARGETS.index(linear.target)
        is_kept = kept_entries(keys, (width,), rate, draw)
        return dropped(x_MI, own_part(is_kept, self.axes) if is_divided else is_kept, rate)
