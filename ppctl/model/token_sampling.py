"""The next token, from logits."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ppctl.errors import ConfigError


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: the likeliest (temperature 0), or at random.

    temperature: divisor of the logits. top_k: only the k likeliest tokens. top_p: only the fewest
    likeliest tokens with at least this probability together (Holtzman et al. 2020). Both apply
    after the temperature.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def check(self) -> None:
        """Raise ConfigError for impossible settings."""
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(
                f"--temperature {self.temperature} is none. Use 0 for the likeliest token, or "
                "0.1 to 2."
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"--top-k {self.top_k} leaves no token. Use 1 or more, or omit it.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ConfigError(
                f"--top-p {self.top_p} is no probability above 0. Use 0.9, or omit it."
            )
        if self.temperature == 0 and (self.top_k, self.top_p) != (None, None):
            raise ConfigError(
                "--temperature 0 takes the likeliest token: --top-k and --top-p change nothing. "
                "Leave them out."
            )

    def choose(self, logits_BV: jax.Array, seed: int, place: jax.Array) -> jax.Array:
        """Return one token a row [B]: a function of seed, row and place in the continuation."""
        if self.temperature == 0:
            return jnp.argmax(logits_BV, -1).astype(jnp.int32)
        logits_BV = logits_BV.astype(jnp.float32) / self.temperature
        if self.top_k is not None and self.top_k < logits_BV.shape[1]:
            least_B1 = jax.lax.top_k(logits_BV, self.top_k)[0][:, -1:]
            logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
        if self.top_p is not None and self.top_p < 1:
            sorted_BV = jnp.sort(logits_BV, descending=True)
            before_BV = jnp.cumsum(jax.nn.softmax(sorted_BV), -1) - jax.nn.softmax(sorted_BV)
            least_B1 = jnp.where(before_BV < self.top_p, sorted_BV, jnp.inf).min(-1, keepdims=True)
            logits_BV = jnp.where(logits_BV < least_B1, -jnp.inf, logits_BV)
        of_row = lambda row: jax.random.fold_in(jax.random.key(seed), row)  # noqa: E731
        keys = jax.vmap(lambda row: jax.random.fold_in(of_row(row), place))(
            jnp.arange(len(logits_BV))
        )
        return jax.vmap(jax.random.categorical)(keys, logits_BV).astype(jnp.int32)
