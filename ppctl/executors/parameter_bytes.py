"""The sizes of a device's parameters, from which its bytes follow without building its arrays."""

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
    """Sizes of parameters as the optimizer keeps them: of one device's shards in a stage.

    own: of trained bytes that axes of copies (`COPY_AXES`) divide, such as experts: these axes, and
    the bytes of a layer and of embedding and head.
    """

    layer: int
    embed_head: int  # of embedding and head together
    moments: float  # of the optimizer, over the parameters that are trained
    compute_ratio: float  # size of the dtype of compute over that of the parameters
    frozen_layer: int = 0  # of a layer's, what is not trained
    frozen_embed_head: int = 0  # of embedding and head likewise
    own: tuple[tuple[tuple[str, ...], int, int], ...] = ()
    update_flops: int = 0  # of the optimizer, for a layer that is whole; 0: elementwise

    def with_embed_head_over(self, ranks: int) -> Self:
        """Return the sizes where embedding and head are divided over ranks."""
        sizes = self.embed_head // ranks, self.frozen_embed_head // ranks
        return replace(self, embed_head=sizes[0], frozen_embed_head=sizes[1])

    @property
    def trained_layer(self) -> int:
        return self.layer - self.frozen_layer

    @property
    def trained_embed_head(self) -> int:
        return self.embed_head - self.frozen_embed_head

    def held(
        self, whole: float, trained: float, fsdp: int, copies: float = 1.0
    ) -> tuple[float, float]:
        """Return the bytes of parameters' state, and of their copies and sums of gradients.

        whole, trained: of the parameters, and of those trained. copies: of each in the dtype of
        compute, for tasks to read.
        """
        state = (whole + self.moments * trained) / fsdp
        return state, copies * self.compute_ratio * whole + trained


def param_bytes(
    state: Tree, model: Model, shards: Mapping[tuple[str, ...], Shard], update_flops: int = 0
) -> ParamBytes:
    """Return the sizes of one device's parameters; state: shapes of all, in natural order.

    shards: the parameters that axes inside a stage divide. update_flops: as in `ParamBytes`.
    """
    # 1. of one device's shards
    held, trained = model.held, trained_part(model.held, model.stack.options.trainable)
    layer, embed_head = tree_bytes(held["layers"]), tree_bytes(held["embed_head"])

    own = dict[tuple[str, ...], tuple[int, int]]()
    for path, a in jax.tree_util.tree_leaves_with_path(trained):
        divided_by = shards[name].axes if (name := parameter_of(path)) in shards else ()
        if axes := tuple(axis for axis in COPY_AXES if axis in divided_by):
            of_layer, of_ends = own.get(axes, (0, 0))
            size = tree_bytes(a)
            own[axes] = (of_layer + size, of_ends) if is_layer(path) else (of_layer, of_ends + size)

    # 2. ratios, of all parameters
    params = state["params"]
    all_trained = trained_part(params, model.stack.options.trainable)
    num_computed = sum(math.prod(a.shape) for a in jax.tree.leaves(params))
    return ParamBytes(
        layer=layer,
        embed_head=embed_head,
        moments=tree_bytes(state["optimizer"]) / tree_bytes(all_trained),
        compute_ratio=num_computed * jnp.dtype(model.dtype).itemsize / tree_bytes(params),
        frozen_layer=layer - tree_bytes(trained["layers"]),
        frozen_embed_head=embed_head - tree_bytes(trained["embed_head"]),
        own=tuple((axes, *sizes) for axes, sizes in own.items()),
        update_flops=update_flops,
    )
