"""How likely a language model finds text: the loss of a data set, and of answers to choose from."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ppctl.data import DataSet
from ppctl.data.tokenizer import Tokenizer
from ppctl.data.windows import NO_TOKEN
from ppctl.errors import DataError
from ppctl.executors.reference import outputs_of, reference
from ppctl.training.language_model import LanguageModel

UNROLL = 16  # layers, as executors do; more are scanned
EXAMPLES = 8  # sequences at a time


@dataclass(frozen=True)
class TextLoss:
    """The loss over all targets of some sequences."""

    nats: float  # in all
    num_tokens: int  # targets
    num_bytes: int | None  # of UTF-8 that the targets stand for; None: without a tokenizer nobody knows

    @property
    def loss(self) -> float:
        """Nats a token."""
        return self.nats / self.num_tokens

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        return self.nats / math.log(2) / self.num_bytes if self.num_bytes else None


def loss_of_data(
    model: LanguageModel, data: DataSet, examples: range, tokenizer: Tokenizer | None, progress: Callable[[int], object]
) -> TextLoss:
    """Return the loss of examples of a data set. progress: called with the number of those done.

    Raises DataError where the data set has tokens that the model has not, or no target in these examples.
    """
    if data.vocab_size is None or data.vocab_size > model.vocab_size:
        have = "no token ids" if data.vocab_size is None else f"{data.vocab_size} token ids"
        raise DataError(f"data={data.name} has {have}, and {model.directory} a model of {model.vocab_size}.")
    stack = model.stack(packed=data.is_packed)
    mean = jax.jit(
        reference(stack, num_microbatches=1, remat="none", unroll=UNROLL, dtype=model.dtype, with_grads=False)
    )
    params = jax.device_put(model.params, jax.devices()[0])
    nats, num_tokens, num_bytes = 0.0, 0, 0
    for first in range(examples.start, examples.stop, EXAMPLES):
        last = min(first + EXAMPLES, examples.stop)
        batch = data.read(np.arange(first, last))
        number = int((batch["targets"] != NO_TOKEN).sum())
        if tokenizer is not None:
            num_bytes += sum(_num_bytes(tokenizer, row) for row in batch["targets"])
        missing = EXAMPLES - (last - first)  # of the last ones: filled up, so that one program serves
        filled = {name: np.concatenate([a, np.repeat(a[:1], missing, 0)]) for name, a in batch.items()}
        filled["targets"][last - first :] = NO_TOKEN
        if number:
            nats += float(mean(params, filled)[0]) * number
        num_tokens += number
        progress(last - examples.start)
    if not num_tokens:
        raise DataError(f"data={data.name} has no token to predict in these examples.")
    return TextLoss(nats, num_tokens, None if tokenizer is None else num_bytes)


def _num_bytes(tokenizer: Tokenizer, targets: np.ndarray) -> int:
    """Return the bytes of the text of tokens; what ends documents is none."""
    return len(tokenizer.decode([t for t in targets.tolist() if t not in (NO_TOKEN, tokenizer.end)]).encode())


class Question(NamedTuple):
    """A beginning, and how it may go on."""

    prompt: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class ChoiceResult:
    """What a model takes as answers: the likeliest choice, and the likeliest for its length in bytes."""

    num_questions: int
    accuracy: float
    accuracy_per_byte: float


def read_questions(path: Path) -> list[Question]:
    """Return the questions of a file of JSON lines: {"prompt": text, "choices": [text, ...], "answer": number from 0}.

    Raises DataError, with the number of the line, for what is none.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--choices {path} cannot be read: {getattr(error, 'strerror', 'it is no text')}.") from error
    found = [_question(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise DataError(f"--choices {path} is empty. Write a question a line.")
    return found


def _question(path: Path, number: int, line: str) -> Question:
    try:
        given: Any = json.loads(line)
        prompt, choices, answer = given["prompt"], given["choices"], given["answer"]
        is_right = (
            isinstance(prompt, str) and isinstance(choices, list) and all(isinstance(c, str) and c for c in choices)
        )
        if is_right and len(choices) > 1 and type(answer) is int and 0 <= answer < len(choices):
            return Question(prompt, tuple(choices), answer)
    except (ValueError, KeyError, TypeError):
        pass
    raise DataError(
        f'{path}:{number} is no question. Write {{"prompt": "2 + 2 =", "choices": [" 4", " 5"], "answer": 0}}.'
    )


def answer_questions(
    model: LanguageModel, questions: Sequence[Question], progress: Callable[[int], object]
) -> ChoiceResult:
    """Return how many questions a model answers rightly, by the likelihood of each choice behind its prompt."""
    score = Likelihood(model)
    right, right_per_byte = 0, 0
    for number, (prompt, choices, answer) in enumerate(questions, 1):
        found = [score.of_text(prompt, choice).log_probability for choice in choices]
        right += int(np.argmax(found)) == answer
        per_byte = [one / len(choice.encode()) for one, choice in zip(found, choices, strict=True)]
        right_per_byte += int(np.argmax(per_byte)) == answer
        progress(number)
    return ChoiceResult(len(questions), right / len(questions), right_per_byte / len(questions))


class Score(NamedTuple):
    """How likely a continuation is."""

    log_probability: float
    is_greedy: bool  # each of its tokens is the likeliest there


class Likelihood:
    """How likely a model finds continuations. Programs are compiled for lengths that are powers of two."""

    def __init__(self, model: LanguageModel):
        self.model = model
        self._params = jax.device_put(model.params, jax.devices()[0])
        self._outputs = outputs_of(model.stack(), unroll=UNROLL, dtype=model.dtype)
        self._score = jax.jit(self._scored)

    def of_text(self, prompt: str, continuation: str) -> Score:
        """Return the score of a continuation, as `tokens_of` divides them."""
        return self.of_tokens(*self.tokens_of(prompt, continuation))

    def tokens_of(self, prompt: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the tokens of both. What is one token across their border counts to the continuation."""
        before, whole = self.model.encoded(prompt), self.model.encoded(prompt + continuation)
        shared = next((i for i, (a, b) in enumerate(zip(before, whole, strict=False)) if a != b), len(before))
        return whole[:shared], whole[shared:]

    def of_tokens(self, before: Sequence[int], tokens: Sequence[int]) -> Score:
        """Return the score of tokens behind others, of which there is one at least, or what ends documents stands."""
        if not tokens:
            return Score(0.0, is_greedy=True)
        before = before or [self.model.tokenizer.end]
        ids = np.asarray([*before, *tokens], np.int32)
        length = max(16, 1 << (len(ids) - 2).bit_length())
        inputs, targets = np.zeros((1, length), np.int32), np.full((1, length), NO_TOKEN, np.int32)
        inputs[0, : len(ids) - 1] = ids[:-1]
        targets[0, len(before) - 1 : len(ids) - 1] = tokens
        total, is_greedy = self._score(self._params, inputs, targets)
        return Score(float(total), bool(is_greedy))

    def _scored(self, params: Any, inputs: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = self._outputs(params, inputs)
        logits = jax.nn.log_softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))
        counts = targets != NO_TOKEN
        own = jnp.take_along_axis(logits, jnp.where(counts, targets, 0)[..., None], -1)[..., 0]
        is_likeliest = jnp.argmax(logits, -1) == targets
        return jnp.where(counts, own, 0).sum(), (is_likeliest | ~counts).all()
