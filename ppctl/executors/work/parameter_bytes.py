"""Sizes of a device's parameters, to predict its memory without building arrays."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp

from ppctl.executors.model_shapes import Model, tree_bytes
from ppctl.executors.parameter_layout import Shard, is_layer, parameter_of
from ppctl.model.trainable_parameters import trained_part
from ppctl.schedule.mesh_axes import COPY_AXES

Tree = Any


@dataclass(frozen=True)
class ParamBytes:
    """Bytes of one device's parameters in a stage, as stored for the optimizer.

    own: trained parameters that some of `COPY_AXES` divide, such as experts. For each set of axes:
    (axes, bytes in a layer, bytes in embedding and head).
    """

    layer: int  # bytes of a layer
    embed_head: int  # bytes of embedding and head together
    moments: float  # bytes of optimizer state per byte of trained parameters
    compute_ratio: float  # bytes in the compute dtype per byte of parameters
    frozen_layer: int = 0  # bytes of a layer's frozen parameters
    frozen_embed_head: int = 0  # bytes of the frozen parameters of embedding and head
    own: tuple[tuple[tuple[str, ...], int, int], ...] = ()
    # bytes that a gather of a layer saves, because some matrices are sent as 8-bit floats
    saved_gather: int = 0
    update_flops: int = 0  # optimizer's FLOPs for an undivided layer; 0: elementwise

    def with_embed_head_over(self, ranks: int) -> Self:
        """Return the sizes with embedding and head divided over `ranks` ranks."""
        sizes = self.embed_head // ranks, self.frozen_embed_head // ranks
        return replace(self, embed_head=sizes[0], frozen_embed_head=sizes[1])

    @property
    def trained_layer(self) -> int:
        return self.layer - self.frozen_layer

    @property
    def trained_embed_head(self) -> int:
        return self.embed_head - self.frozen_embed_head

    @property
    def gathered_layer(self) -> float:
        """Return the bytes of a layer as it is gathered over fsdp."""
        return self.layer * self.compute_ratio - self.saved_gather


def param_bytes(
    state: Tree, model: Model, shards: Mapping[tuple[str, ...], Shard], update_flops: int = 0
) -> ParamBytes:
    """Return the sizes of one device's parameters.

    state: shapes of the whole train state, in natural order. shards: the divided parameters, from
    `shards_of`. update_flops: as in `ParamBytes`.
    """
    # 1. bytes of one device's shards
    held, trained = model.held, trained_part(model.held, model.stack.options.trainable)
    layer, embed_head = tree_bytes(held["layers"]), tree_bytes(held["embed_head"])

    own = dict[tuple[str, ...], tuple[int, int]]()
    for path, a in jax.tree_util.tree_leaves_with_path(trained):
        divided_by = shards[name].axes if (name := parameter_of(path)) in shards else ()
        if axes := tuple(axis for axis in COPY_AXES if axis in divided_by):
            of_layer, of_ends = own.get(axes, (0, 0))
            size = tree_bytes(a)
            own[axes] = (of_layer + size, of_ends) if is_layer(path) else (of_layer, of_ends + size)

    # 2. ratios over all parameters, and the matrices that are gathered as 8-bit floats
    params = state["params"]
    all_trained = trained_part(params, model.stack.options.trainable)
    num_computed = sum(math.prod(a.shape) for a in jax.tree.leaves(params))
    rounded, itemsize = model.stack.options.rounded_weights, jnp.dtype(model.dtype).itemsize
    paths = jax.tree_util.tree_leaves_with_path({"layers": held["layers"]})
    num_rounded = sum(a.size for path, a in paths if "/".join(parameter_of(path)[1:]) in rounded)
    return ParamBytes(
        layer=layer,
        embed_head=embed_head,
        moments=tree_bytes(state["optimizer"]) / tree_bytes(all_trained),
        compute_ratio=num_computed * itemsize / tree_bytes(params),
        frozen_layer=layer - tree_bytes(trained["layers"]),
        frozen_embed_head=embed_head - tree_bytes(trained["embed_head"]),
        own=tuple((axes, *sizes) for axes, sizes in own.items()),
        saved_gather=num_rounded * (itemsize - 1),
        update_flops=update_flops,
    )
