"""The partitions: which layers each stage holds."""

from dataclasses import dataclass
from typing import Any, cast

from ppctl.errors import ConfigError


@dataclass
class Uniform:
    """As many layers on each stage, or one more on the first ones."""

    name: str = "uniform"

    def check(self) -> None:
        """Check nothing: there is no setting."""


@dataclass
class Balanced(Uniform):
    """The least work on the largest stage, in FLOPs of layers, embedding and head."""

    name: str = "balanced"


@dataclass
class Explicit(Uniform):
    """The stated layers of each stage: [3,2,2,3], or "Et*3|(tt|)*2,tL" as in Megatron-LM."""

    name: str = "explicit"
    # a list with the number of each stage, or text: E embedding, t layer, L loss, | next stage
    layers: Any = "???"

    def check(self) -> None:
        counts: Any = self.layers
        is_list = isinstance(counts, list) and all(
            type(count) is int for count in cast("list[Any]", counts)
        )
        if not is_list and not isinstance(counts, str):  # text is read by schedule.partition
            raise ConfigError(
                f"partition.layers={counts} is neither a list with the number of layers of each "
                "stage, [3,2,2,3], nor text such as 'Et*3|(tt|)*2,tL'."
            )
