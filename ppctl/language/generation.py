"""Text generation with a trained transformer: continuations in batches, and conversations."""

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppctl.data.tokenizer import Tokenizer
from ppctl.errors import ConfigError
from ppctl.language.language_model import LanguageModel
from ppctl.model.cached_decoding import Decoder, Mix, Rotate
from ppctl.model.random_keys import key_of_seed, wrapped
from ppctl.model.stack import Stack
from ppctl.model.transformer import transformer

REPLACEMENT = "\ufffd"  # character decoded from bytes that are not (yet) a whole one
MOST_PIECE = 128  # maximum prompt tokens read at a time
POSITIONS = 64  # divisor of the number of positions, so that few programs are compiled


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen: the likeliest (temperature 0), or at random.

    temperature: divisor of the logits. top_k: choose only among the k likeliest tokens. top_p:
    choose only among the fewest likeliest tokens whose probabilities sum to top_p or more (Holtzman
    et al. 2020). Both apply after the temperature.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def check(self) -> None:
        """Raise ConfigError for impossible settings."""
        if not 0 <= self.temperature < float("inf"):
            remedy = "Use 0 for the likeliest token, or 0.1 to 2."
            raise ConfigError(f"--temperature {self.temperature} is invalid. {remedy}")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"--top-k {self.top_k} leaves no token. Use 1 or more, or omit it.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            what = f"--top-p {self.top_p} is not a probability above 0"
            raise ConfigError(f"{what}. Use 0.9, or omit it.")
        if self.temperature == 0 and (self.top_k, self.top_p) != (None, None):
            what = "--temperature 0 takes the likeliest token: --top-k and --top-p change nothing"
            raise ConfigError(f"{what}. Leave them out.")

    def choose(
        self, logits_BV: jax.Array, seed: int, place: jax.Array, num_tokens: int
    ) -> jax.Array:
        """Return one token per row, int32 [B]; random ones depend on seed, row number and place.

        place: index of the token in the continuation. num_tokens: size of the tokenizer; larger ids
        pad the vocabulary and are never chosen.
        """
        logits_BV = logits_BV[:, :num_tokens]
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

        def chosen(row: jax.Array, logits_V: jax.Array) -> jax.Array:
            key = jax.random.fold_in(wrapped(key_of_seed(seed)), row)
            return jax.random.categorical(jax.random.fold_in(key, place), logits_V)

        return jax.vmap(chosen)(jnp.arange(len(logits_BV)), logits_BV).astype(jnp.int32)


def decoder_of(model: LanguageModel, devices: Sequence[Any], num_positions: int) -> Decoder:
    """Return a model's decoder for texts of num_positions tokens, its layers over the devices."""
    sizes = model.transformer

    def make(mix: Mix, rotate: Rotate) -> Stack:
        return transformer(model.architecture, dtype=model.dtype, mix=mix, rotate=rotate)

    if len(devices) > sizes.num_layers:
        what = f"--devices {len(devices)} are more than the model's {sizes.num_layers} layers"
        remedy = f"Use {sizes.num_layers} or fewer."
        raise ConfigError(f"{what}, but each device needs at least one. {remedy}")
    cached = sizes.attention_form.cached
    return Decoder(make, model.params, devices, num_positions, cached, model.dtype)


def positions_for(prompts: Sequence[Sequence[int]], max_tokens: int) -> int:
    """Return the number of positions for prompts and continuations, a multiple of POSITIONS.

    >>> positions_for([[1, 2, 3]], 10), positions_for([[1] * 130], 10)
    (64, 320)
    """
    read = _read_length(max(map(len, prompts)))
    return -(-(read + max_tokens) // POSITIONS) * POSITIONS


def continuations(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    sampling: Sampling,
    seed: int,
    num_tokens: int,
) -> Iterator[np.ndarray]:
    """Yield the next token of each (non-empty) prompt, int32 [B], max_tokens times.

    decoder: has at least `positions_for(prompts, max_tokens)` positions; num_tokens: size of the
    tokenizer. Lazy: each next() computes one token.
    """
    # 1. read the left-padded prompts, piece by piece
    read = _read_length(max(map(len, prompts)))
    piece = min(read, MOST_PIECE)
    tokens = np.zeros((len(prompts), read), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[read - len(prompt) :] = prompt
    starts = jnp.asarray([read - len(prompt) for prompt in prompts], jnp.int32)
    cache, logits = decoder.empty(len(prompts)), None
    for first in range(0, read, piece):
        piece_tokens = jnp.asarray(tokens[:, first : first + piece])
        logits, cache = decoder.read(piece_tokens, cache, first, starts)
    # 2. choose and read one token at a time
    choose = jax.jit(partial(sampling.choose, seed=seed, num_tokens=num_tokens))
    for place in range(max_tokens):
        chosen = choose(logits, place=jnp.int32(place))
        yield np.asarray(chosen)
        if place + 1 < max_tokens:
            logits, cache = decoder.read(chosen[:, None], cache, read + place, starts)


def _read_length(longest: int) -> int:
    """Return the padded length of prompts: a power of two, or a multiple of MOST_PIECE."""
    if longest > MOST_PIECE:
        return -(-longest // MOST_PIECE) * MOST_PIECE
    return 1 << max(0, longest - 1).bit_length()


def pieces_of_text(
    tokenizer: Tokenizer,
    prompt: Sequence[int],
    tokens: Iterable[np.ndarray],
    ends: Container[int],
    max_tokens: int,
) -> Iterator[str]:
    """Yield the text that each new token adds, up to a token of `ends` or max_tokens tokens.

    tokens: tokens of one row, [1] each. A token that ends within a character yields "".
    """
    new, shown = list[int](), ""
    for token in tokens:
        new.append(int(token[0]))
        text = text_of(tokenizer, prompt, new, ends)
        is_last = new[-1] in ends or len(new) == max_tokens
        if text.endswith(REPLACEMENT) and not is_last:
            text = shown
        yield text[len(shown) :]
        shown = text
        if is_last:
            return


def text_of(
    tokenizer: Tokenizer, prompt: Sequence[int], new: Sequence[int], ends: Container[int]
) -> str:
    """Return the text of new tokens after a prompt, without a final token of `ends`.

    The prompt is decoded too, because some tokenizers treat the start of a text differently.
    """
    new = [*new[:-1]] if new and new[-1] in ends else [*new]
    before, whole = tokenizer.decode([*prompt]), tokenizer.decode([*prompt, *new])
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(new)


def first_messages(system: str | None) -> list[dict[str, str]]:
    """Return the messages before the user's first: the system message, if any."""
    return [] if system is None else [{"role": "system", "content": system}]


@dataclass
class Conversation:
    """The messages so far, and the model that answers the next one.

    Each answer depends only on the earlier messages, the seed and the sampling. The whole
    conversation is read again for each answer: a template may write earlier messages differently.
    """

    model: LanguageModel
    devices: Sequence[Any]
    ends: Container[int]  # tokens that end an answer
    messages: list[dict[str, str]]
    max_tokens: int  # maximum tokens of an answer
    sampling: Sampling
    seed: int
    _decoder: Decoder | None = None

    def answer(self, message: str) -> Iterator[str]:
        """Yield the answer to a user's message in pieces of text; then append both to the messages.

        Raises ConfigError if the conversation is longer than the model's positions, DataError if
        the template refuses the roles of its messages.
        """
        messages = [*self.messages, {"role": "user", "content": message}]
        ids, tokenizer = self.model.encoded_chat(messages), self.model.tokenizer
        # 1. the decoder; if it is too small, one with at least twice the positions
        needed, decoder = positions_for([ids], self.max_tokens), self._decoder
        if decoder is None or needed > decoder.num_positions:
            twice = 0 if decoder is None else 2 * decoder.num_positions
            decoder = self._decoder = decoder_of(self.model, self.devices, max(needed, twice))
        # 2. the answer
        tokens = continuations(
            decoder,
            [ids],
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            seed=self.seed,
            num_tokens=tokenizer.vocab_size,
        )
        pieces: list[str] = []
        for piece in pieces_of_text(tokenizer, ids, tokens, self.ends, self.max_tokens):
            pieces.append(piece)
            yield piece
        self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
