"""The linear maps and norms of a transformer's layer, and the forms of its attention."""

from typing import NamedTuple

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")  # linear maps in optim.lora_targets


class LinearMap(NamedTuple):
    """A linear map of a layer: a matrix [num_in, num_out], and a bias if any.

    Its initial values, division over tp, 8-bit scales, adapter and names in files follow from it.
    """

    path: str  # place of the parameters in a layer
    tensor: str  # module of `transformers`, after model.layers.L.
    num_in: int
    num_out: int
    divided: str | None = None  # dim that tp divides: inputs | outputs; None: neither
    num_parts: int | None = None  # largest tp that divides it; a larger one does not. None: any
    target: str | None = None  # name in TARGETS; None: no adapter
    has_bias: bool = False

    @property
    def num_weights(self) -> int:
        return self.num_in * self.num_out


class Norm(NamedTuple):
    """A norm inside attention, divided as `LinearMap` is."""

    path: str
    tensor: str
    width: int
    divided: str | None = None
    num_parts: int | None = None


class AttentionForm(NamedTuple):
    """A form of attention in a layer of some sizes. `ppctl.model.attention` has its function."""

    maps: tuple[LinearMap, ...]
    norms: tuple[Norm, ...]
    num_heads: int
    widths: tuple[int, int]  # width of a head's queries and keys, width of its values
    cached: tuple[tuple[int, ...], ...]  # shapes of a token's arrays that decoding keeps

    @property
    def pair_flops(self) -> int:
        """FLOPs of a forward for each pair of a query and a key: its scores, and its values."""
        return 2 * self.num_heads * sum(self.widths)
