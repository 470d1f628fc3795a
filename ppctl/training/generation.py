"""Text that a trained transformer continues: prompts in, tokens out, a batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppctl import config as settings
from ppctl.data.tokenizer import Tokenizer
from ppctl.errors import ConfigError
from ppctl.model.decoding import Decoder, Mix, Rotate
from ppctl.model.sampling import Sampling
from ppctl.model.stack import Stack
from ppctl.model.transformer import transformer
from ppctl.training.language_model import LanguageModel

REPLACEMENT = "\ufffd"  # in the place of bytes that are no letter, or not yet
MOST_PIECE = 128  # tokens of prompts that are read at a time
POSITIONS = 64  # the number of positions is a multiple of it, so that few programs are compiled


def decoder_of(model: LanguageModel, devices: Sequence[Any], num_positions: int) -> Decoder:
    """Return the decoder of a model for sequences of so many positions, its layers dealt to the devices in order."""
    sizes = model.config.model
    assert isinstance(sizes, settings.Transformer), "checked by open_language_model"

    def make(mix: Mix, rotate: Rotate) -> Stack:
        return transformer(**model.sizes, dtype=model.dtype, mix=mix, rotate=rotate)

    if len(devices) > sizes.num_layers:
        raise ConfigError(
            f"--devices {len(devices)} are more than the model's {sizes.num_layers} layers, and a device has one at "
            f"least. Use {sizes.num_layers} or fewer."
        )
    return Decoder(make, model.params, devices, num_positions, (sizes.kv_heads, sizes.head_width), model.dtype)


def positions_for(prompts: Sequence[Sequence[int]], max_tokens: int) -> int:
    """Return the positions that prompts and their continuations take.

    >>> positions_for([[1, 2, 3]], 10), positions_for([[1] * 130], 10)
    (64, 320)
    """
    read = _read_length(max(map(len, prompts)))
    return -(-(read + max_tokens) // POSITIONS) * POSITIONS


def continuations(
    decoder: Decoder, prompts: Sequence[Sequence[int]], *, max_tokens: int, sampling: Sampling, seed: int
) -> Iterator[np.ndarray]:
    """Yield the next token of each prompt, int32 [B], max_tokens times; prompts have a token at least.

    decoder: with `positions_for` of these at least. Stop reading when enough is there: nothing is computed ahead.
    """
    length = max(map(len, prompts))
    read = _read_length(length)
    piece = min(read, MOST_PIECE)
    tokens = np.zeros((len(prompts), read), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[read - len(prompt) :] = prompt
    starts = jnp.asarray([read - len(prompt) for prompt in prompts], jnp.int32)
    cache, logits = decoder.empty(len(prompts)), None
    for first in range(0, read, piece):
        logits, cache = decoder.read(jnp.asarray(tokens[:, first : first + piece]), cache, first, starts)
    choose = jax.jit(partial(sampling.choose, seed=seed))
    for place in range(max_tokens):
        chosen = choose(logits, place=jnp.int32(place))
        yield np.asarray(chosen)
        if place + 1 < max_tokens:
            logits, cache = decoder.read(chosen[:, None], cache, read + place, starts)


def _read_length(longest: int) -> int:
    """Return the length to which prompts are filled up in front: a power of two, or a multiple of MOST_PIECE."""
    if longest > MOST_PIECE:
        return -(-longest // MOST_PIECE) * MOST_PIECE
    return 1 << max(0, longest - 1).bit_length()


def text_of(tokenizer: Tokenizer, prompt: Sequence[int], new: Sequence[int], ends: Container[int]) -> str:
    """Return the text of new tokens behind those of a prompt, without the token that ends it, one of `ends`.

    Some tokenizers write a token otherwise at the start of a text.
    """
    new = [*new[:-1]] if new and new[-1] in ends else [*new]
    before, whole = tokenizer.decode([*prompt]), tokenizer.decode([*prompt, *new])
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(new)


class StreamedText:
    """Text of new tokens, written as they come: what may still change, as half of a letter, waits for the next one."""

    def __init__(self, text_of_new: Callable[[Sequence[int]], str], write: Callable[[str], object]):
        self._text_of_new, self._write, self._written = text_of_new, write, ""

    def add(self, new: Sequence[int]) -> None:
        """Write what the newest of all new tokens adds."""
        text = self._text_of_new(new)
        if not text.endswith(REPLACEMENT):
            self._put(text)

    def end(self, new: Sequence[int]) -> None:
        """Write what is left."""
        self._put(self._text_of_new(new))

    def _put(self, text: str) -> None:
        if text.startswith(self._written):
            self._write(text[len(self._written) :])
            self._written = text
