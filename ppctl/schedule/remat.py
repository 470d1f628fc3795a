"""Rematerialization: the values that a forward keeps and those that its backward recomputes."""

from enum import StrEnum
from typing import Self

from ppctl.errors import ConfigError


class Remat(StrEnum):
    """The setting executor.remat. Members are strings: records and JSON show them as written.

    | member | a forward keeps, for each microbatch                | the backward recomputes
    | NONE   | the residuals of its layers except element-wise     | element-wise results
    | LAYER  | the input of each layer                             | one layer at a time
    | FULL   | the input of the stage                              | the stage

    >>> [remat.recomputes for remat in Remat]
    [False, True, True]
    """

    NONE = "none"
    LAYER = "layer"
    FULL = "full"

    @classmethod
    def of(cls, name: str) -> Self:
        """Return the member of this name. ConfigError for any other name.

        >>> Remat.of("layer").keeps_layer_inputs
        True
        """
        try:
            return cls(name)
        except ValueError:
            known = ", ".join(cls)
            raise ConfigError(f"remat={name} is not a setting. Use one of {known}.") from None

    @property
    def recomputes(self) -> bool:
        """Return whether a backward reruns the forwards of its layers, which kept no residuals."""
        return self is not Remat.NONE

    @property
    def keeps_layer_inputs(self) -> bool:
        """Return whether a forward keeps the input of each layer."""
        return self is Remat.LAYER

    @property
    def keeps_input_only(self) -> bool:
        """Return whether a forward keeps only its stage's input.

        Then the input may stay in the slot where it arrived, and the last stage skips its forward,
        which its backward would rerun.
        """
        return self is Remat.FULL

    def live_residual_layers(self, stage_layers: int) -> int:
        """Return the number of layers whose recomputed residuals a backward holds at once.

        >>> [remat.live_residual_layers(3) for remat in Remat]
        [0, 1, 3]
        """
        return {Remat.NONE: 0, Remat.LAYER: 1, Remat.FULL: stage_layers}[self]
