"""How attention scores queries and keys, with any kernel."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

NEVER = -1e30  # score of a token that is not attended to


@dataclass(frozen=True)
class Scoring:
    """Scores are scale * q.k, then cap*tanh(score/cap); no token attends to later ones.

    scale: None: 1/sqrt(H). softcap: the cap; None: no cap. window: the last tokens that a token
    attends to, itself included; None: all before it.
    """

    scale: float | None = None
    softcap: float | None = None
    window: int | None = None

    def scale_of(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.scale is None else self.scale

    def capped(self, scores: jax.Array) -> jax.Array:
        """Return scaled scores with the cap."""
        return scores if self.softcap is None else self.softcap * jnp.tanh(scores / self.softcap)

    def pulled(self, change: jax.Array, capped: jax.Array) -> jax.Array:
        """Return the gradient of scaled scores from that of `capped` ones."""
        return change if self.softcap is None else change * (1 - jnp.square(capped / self.softcap))

    def num_pairs(self, num_tokens: int) -> int:
        """Return the pairs of tokens of a sequence in which one attends to the other.

        >>> Scoring().num_pairs(4), Scoring(window=2).num_pairs(4), Scoring(window=9).num_pairs(4)
        (10, 7, 10)
        """
        window = num_tokens if self.window is None else min(self.window, num_tokens)
        return window * (window + 1) // 2 + (num_tokens - window) * window


PLAIN = Scoring()
