"""Rotary positions: their settings, which the model reads."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any, Self, cast

from ppctl.config import field_checks as checks
from ppctl.config.field_checks import Count, FromOne, Positive, SomeShare
from ppctl.errors import ConfigError

Theta = Annotated[float, partial(checks.at_least, least=1.0)]


@dataclass(frozen=True)
class Linear:
    """Scaling that stretches all wavelengths by `factor` (Chen et al. 2023)."""

    factor: FromOne


@dataclass(frozen=True)
class Llama3:
    """Scaling that stretches only long wavelengths by `factor`.

    Wavelengths above original_max_position_embeddings/low_freq_factor are stretched. Those below
    original_max_position_embeddings/high_freq_factor are unchanged. Those between are mixed.
    """

    factor: FromOne
    original_max_position_embeddings: Count  # tokens of a sequence without the stretch
    low_freq_factor: Positive = 1.0
    high_freq_factor: Positive = 4.0


@dataclass(frozen=True)
class Yarn:
    """Scaling that stretches only pairs with few turns in original_max_position_embeddings.

    Pairs with fewer than beta_slow turns are stretched by `factor`. Those with more than beta_fast
    turns are unchanged. Those between are mixed. Queries and keys are multiplied by
    attention_factor; None: 1 + log(factor)/10.
    """

    factor: FromOne
    original_max_position_embeddings: Count
    beta_fast: Positive = 32.0
    beta_slow: Positive = 1.0
    attention_factor: Positive | None = None

    @property
    def magnitude(self) -> float:
        """The factor of queries and keys."""
        factor = self.attention_factor
        return 1 + 0.1 * math.log(self.factor) if factor is None else factor


Scaling = Linear | Llama3 | Yarn
SCALINGS: dict[str, type[Scaling]] = {"linear": Linear, "llama3": Llama3, "yarn": Yarn}
BELOW = {"low_freq_factor": "high_freq_factor", "beta_slow": "beta_fast"}


@dataclass(unsafe_hash=True)
class Rope:
    """Rotary positions: pair i of the H/2 pairs of a head turns by theta**(-2i/H) radians a token.

    Like `Architecture`, it is hashed by its values.
    """

    theta: Theta = 10000.0  # base of the wavelengths
    local_theta: Theta | None = None  # base of windowed layers, without scaling; None: theta
    # {rope_type: linear | llama3 | yarn, factor: 8, ...}, as in config.json
    scaling: Any = field(default=None, hash=False)
    # share of a head's width, its first dims, that is rotated; the others have no position
    fraction: SomeShare = 1.0

    @property
    def record(self) -> Scaling | None:
        """The scaling with its defaults. ConfigError if a parameter is missing or unknown."""
        scaling: Any = self.scaling
        if scaling is None:
            return None
        if not isinstance(scaling, Mapping):
            example = "{rope_type: linear, factor: 8}"
            raise ConfigError(f"model.rope.scaling={scaling} is not a mapping, such as {example}.")
        values = cast("Mapping[str, Any]", scaling)
        kind = values.get("rope_type")
        kind = "null" if kind is None else kind
        checks.choice("model.rope.scaling.rope_type", kind, tuple(SCALINGS))
        values = {key: value for key, value in values.items() if key != "rope_type"}
        return checks.settings_from(SCALINGS[str(kind)], values, "model.rope.scaling")

    @property
    def of_windows(self) -> Self:
        """The rotary positions of layers with a window."""
        if self.local_theta is None:
            return self
        return replace(self, theta=self.local_theta, scaling=None)

    def check(self) -> None:
        if self.record is None:
            return
        checks.domains("model.rope.scaling", self.record)
        values = vars(self.record)
        for low, high in BELOW.items():
            if low in values and values[low] >= values[high]:
                raise ConfigError(
                    f"model.rope.scaling.{low}={values[low]} is not below {high}={values[high]}: "
                    "between them wavelengths are stretched in part."
                )
