"""The parameters of a cut network, in the form of its author and in the form of a stack.

A layer's parameters are a row [1, n] "kernel" and a vector [n] "bias", whose dims mark matrices for
optimizers. Embedding and head keep their arrays.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp

from ppctl.errors import ConfigError
from ppctl.executors.stage.layer_programs import pack_flat, unpack_flat
from ppctl.model.network import Network
from ppctl.model.stack import NO_DECAY
from ppctl.model.trainable_parameters import checked_flags

Tree = Any
Shape = jax.ShapeDtypeStruct
FROZEN = "frozen_"  # prefix of groups of frozen parameters
MULTIPLE = 64  # divisor of the length of a layer's parameters, so that they can be sharded


@dataclass(frozen=True, eq=False)
class NetworkLeaves:
    """The parameters of a network as its author makes them, by index."""

    treedef: Any
    names: tuple[str, ...]  # keys of each leaf's path, joined by /
    shapes: tuple[tuple[int, ...], ...]
    is_trained: tuple[bool, ...]

    @classmethod
    def of(cls, network: Network) -> "NetworkLeaves":
        """Return the leaves. ConfigError if two have equal names, or one is not floating."""
        params = jax.eval_shape(network.init, jax.eval_shape(lambda: jax.random.key(0)))
        paths = jax.tree_util.tree_leaves_with_path(params)
        names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in paths]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:  # to_parts joins the keys of a path to one name
            raise ConfigError(f"init makes two parameters with the path {twice}. Rename one.")
        for name, (_, leaf) in zip(names, paths, strict=True):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise ConfigError(
                    f"init makes {name} of {leaf.dtype}, but parameters must be floating. "
                    "Use dtype; for the state of a Flax module, ppctl.flax.network(model, loss=)."
                )
        shapes = tuple(leaf.shape for _, leaf in paths)
        flags = tuple(checked_flags(params, network.trainable))
        return cls(jax.tree.structure(params), tuple(names), shapes, flags)


@dataclass(frozen=True, eq=False)
class NetworkParameters:
    """The parameters of a network that is cut into layers."""

    leaves: NetworkLeaves
    places: tuple[int | None, ...]  # layer of each leaf; None: embedding or head
    num_layers: int
    dtype: Any  # dtype of the stack's arrays

    @cached_property
    def groups(self) -> dict[str, list[list[int]]]:
        """Indices of each layer's leaves by group: "kernel" or "bias", frozen or not."""
        names = [mark + name for mark in ("", FROZEN) for name in ("kernel", "bias")]
        found = {name: [list[int]() for _ in range(self.num_layers)] for name in names}
        for i, place in enumerate(self.places):
            if place is not None:
                mark = "" if self.leaves.is_trained[i] else FROZEN
                found[mark + self.group(i)][place].append(i)
        used = {name: leaves for name, leaves in found.items() if any(leaves)}
        return used or {"kernel": found["kernel"]}

    def group(self, leaf: int) -> str:
        """Return "kernel" for a leaf with weight decay, a matrix not in NO_DECAY, else "bias"."""
        name = self.leaves.names[leaf].rpartition("/")[2]
        return "bias" if len(self.leaves.shapes[leaf]) < 2 or name in NO_DECAY else "kernel"

    @cached_property
    def packed_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of a layer's array for each group, padded to fit any layer."""
        shapes = {}
        for name, layers in self.groups.items():
            sizes = (sum(math.prod(self.leaves.shapes[i]) for i in leaves) for leaves in layers)
            length = -(-max(1, *sizes) // MULTIPLE) * MULTIPLE
            shapes[name] = (1, length) if name.endswith("kernel") else (length,)
        return shapes

    @cached_property
    def tag(self) -> str:
        """A name with a hash of the parameters' places: checkpoints of another cut never fit."""
        lies: list[tuple] = list(
            zip(self.leaves.names, self.leaves.shapes, self.places, strict=True)
        )
        lies += [] if all(self.leaves.is_trained) else [self.leaves.is_trained]
        return f"cut_{hashlib.sha256(repr(lies).encode()).hexdigest()[:8]}"

    def to_parts(self, params: Tree) -> Tree:
        """Return the network's parameters in the form of the stack."""
        leaves = dict(enumerate(a.astype(self.dtype) for a in jax.tree.leaves(params)))
        layers = [self.packed_layer(l, leaves) for l in range(self.num_layers)]
        named = ((self.leaves.names[i], {self.group(i): leaves[i]}) for i in self.outer)
        return {"embed_head": dict(named), "layers": jax.tree.map(lambda *a: jnp.stack(a), *layers)}

    @property
    def outer(self) -> list[int]:
        """Indices of the leaves of embedding and head."""
        return [i for i, place in enumerate(self.places) if place is None]

    def packed_layer(self, l: int, leaves: Mapping[int, jax.Array]) -> Tree:
        """Return layer l in the form of the stack; None for frozen groups with missing leaves."""
        packed = {}
        for name, layers in self.groups.items():
            is_missing = any(i not in leaves for of_layer in layers for i in of_layer)
            shape = Shape(self.packed_shapes[name], self.dtype)
            of_layer = [leaves[i] for i in layers[l] if i in leaves]
            packed[name] = (
                None if name.startswith(FROZEN) and is_missing else pack_flat(of_layer, shape)
            )
        return {self.tag: packed}

    @property
    def trainable(self) -> Tree:
        """Flags in the form of the stack: whether each parameter is trained."""
        pairs = zip(self.leaves.names, self.leaves.is_trained, self.places, strict=True)
        embed_head = {name: flag for name, flag, place in pairs if place is None}
        layers = {name: not name.startswith(FROZEN) for name in self.groups}
        return {"embed_head": embed_head, "layers": {self.tag: layers}}

    def from_parts(self, parts: Tree) -> Tree:
        """Return the network's parameters from the form of the stack, in natural order."""
        leaves: dict[int, Any] = self.embed_head_leaves(parts["embed_head"])
        for l in range(self.num_layers):
            leaves |= self.leaves_of(l, jax.tree.map(lambda a, l=l: a[l], parts["layers"]))
        return jax.tree.unflatten(self.leaves.treedef, [leaves[i] for i in range(len(leaves))])

    def leaves_of(self, l: int, w: Mapping[str, Mapping[str, Any]]) -> dict[int, jax.Array]:
        """Return the leaves of layer l by index, from the layer in the form of the stack."""
        layer, found = w[self.tag], dict[int, jax.Array]()
        for name, layers in self.groups.items():
            packed = layer[name]
            if not layers[l] or packed is None:
                continue
            shapes = [Shape(self.leaves.shapes[i], packed.dtype) for i in layers[l]]
            found |= zip(layers[l], unpack_flat(shapes, packed), strict=True)
        return found

    def vectors_of(self, l: int, w: Mapping[str, Mapping[str, Any]]) -> dict[int, Any]:
        """Return for each leaf of layer l the entry of its group in `w`, unless that is None."""
        pairs = ((w[self.tag][name], layers[l]) for name, layers in self.groups.items())
        return {i: value for value, leaves in pairs if value is not None for i in leaves}

    def embed_head_leaves(self, embed_head: Tree) -> dict[int, jax.Array]:
        """Return the leaves of embedding and head by index, without leaves that are None."""
        named = ((name, leaf) for name, group in embed_head.items() for leaf in group.values())
        return {self.leaves.names.index(name): leaf for name, leaf in named if leaf is not None}
