"""Conversations with a trained transformer: messages in, answers out, by its chat template."""

from collections.abc import Container, Iterator, Sequence
from typing import Any

from ppctl.language.generation import (
    Sampling,
    continuations,
    decoder_of,
    pieces_of_text,
    positions_for,
)
from ppctl.language.language_model import LanguageModel
from ppctl.model.cached_decoding import Decoder


def first_messages(system: str | None) -> list[dict[str, str]]:
    """Return the messages before the user's first: the system message, if any."""
    return [] if system is None else [{"role": "system", "content": system}]


class Conversation:
    """The messages so far, and the model that answers the next one.

    Each answer depends only on the earlier messages, the seed and the sampling. The whole
    conversation is read again for each answer: a template may write earlier messages differently.
    """

    def __init__(
        self,
        model: LanguageModel,
        devices: Sequence[Any],
        ends: Container[int],
        *,
        system: str | None,
        max_tokens: int,
        sampling: Sampling,
        seed: int,
    ) -> None:
        """Start with an optional system message.

        ends: tokens that end an answer; max_tokens: maximum tokens of each answer.
        """
        self.messages = first_messages(system)
        self._model, self._devices, self._ends = model, devices, ends
        self._max_tokens, self._sampling, self._seed = max_tokens, sampling, seed
        self._decoder: Decoder | None = None
        self._num_positions = 0

    def answer(self, message: str) -> Iterator[str]:
        """Yield the answer to a user's message in pieces of text; then append both to the messages.

        Raises ConfigError if the conversation is longer than the model's positions, DataError if
        the template refuses the roles of its messages.
        """
        messages = [*self.messages, {"role": "user", "content": message}]
        ids = self._model.encoded_chat(messages)
        tokens = continuations(
            self._decoder_for(ids),
            [ids],
            max_tokens=self._max_tokens,
            sampling=self._sampling,
            seed=self._seed,
            num_tokens=self._model.tokenizer.vocab_size,
        )
        pieces: list[str] = []
        for piece in pieces_of_text(
            self._model.tokenizer, ids, tokens, self._ends, self._max_tokens
        ):
            pieces.append(piece)
            yield piece
        self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]

    def _decoder_for(self, ids: Sequence[int]) -> Decoder:
        """Return the decoder; if it is too small, make one with at least twice the positions."""
        needed = positions_for([ids], self._max_tokens)
        if self._decoder is None or needed > self._num_positions:
            self._num_positions = max(needed, 2 * self._num_positions)
            self._decoder = decoder_of(self._model, self._devices, self._num_positions)
        return self._decoder
