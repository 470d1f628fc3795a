"""Evaluation of a language model: its loss on a data set, and its answers to questions."""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ppctl.data.dataset import Batch, DataSet
from ppctl.data.document_files import json_value
from ppctl.data.token_examples import NO_TOKEN
from ppctl.data.tokenizer import Tokenizer
from ppctl.errors import DataError, os_errors
from ppctl.executors.device_mesh import all_devices
from ppctl.executors.reference import outputs_of, reference
from ppctl.language.language_model import LanguageModel
from ppctl.model.cross_entropy import perplexity
from ppctl.user_files import lines_of_text, read_text

EXAMPLES = 8  # sequences in a batch


def loss_of_data(
    model: LanguageModel, data: DataSet, examples: range, tokenizer: Tokenizer | None
) -> dict[str, float | None]:
    """Return loss (nats per target), perplexity, bits_per_byte and num_tokens (targets).

    examples: indices of the examples. bits_per_byte is per UTF-8 byte of the targets' text; None
    without a tokenizer. Raises DataError if the model lacks tokens of the data set, or the examples
    have no target.
    """
    # 1. check the vocabulary, and make the program
    if data.vocab_size is None or data.vocab_size > model.vocab_size:
        have = f"{'no' if data.vocab_size is None else data.vocab_size} token ids"
        of_model = f"the model in {model.directory} has {model.vocab_size}"
        raise DataError(f"data={data.name} has {have}, but {of_model}.")
    stack, how = model.stack(packed=data.is_packed), {"remat": "none", "with_grads": False}
    mean = jax.jit(reference(stack, num_microbatches=1, dtype=model.dtype, **how))
    params = jax.device_put(model.params, all_devices()[0])
    # 2. sum the losses of all batches; the last is padded, so that one program suffices
    nats, num_tokens, num_bytes = 0.0, 0, 0
    for first in range(examples.start, examples.stop, EXAMPLES):
        last = min(first + EXAMPLES, examples.stop)
        batch = data.read(np.arange(first, last))
        number = int((batch["targets"] != NO_TOKEN).sum())
        if tokenizer is not None:
            num_bytes += num_target_bytes(tokenizer, batch)
        rows = np.minimum(np.arange(EXAMPLES), last - first - 1)
        filled = {name: a[rows] for name, a in batch.items()}
        filled["targets"][last - first :] = NO_TOKEN
        if number:
            nats += float(mean(params, filled)[0]) * number
        num_tokens += number
    if not num_tokens:
        raise DataError(f"data={data.name} has no token to predict in these examples.")
    loss, bits = nats / num_tokens, nats / math.log(2)
    return {
        "loss": loss,
        "perplexity": perplexity(loss),
        "bits_per_byte": bits / num_bytes if num_bytes else None,
        "num_tokens": num_tokens,
    }


def num_target_bytes(tokenizer: Tokenizer, batch: Batch) -> int:
    """Return the number of UTF-8 bytes of the targets, without tokens around texts."""
    inputs, targets = batch["inputs"], batch["targets"]
    before = np.where(inputs < 0, ~inputs, inputs)  # packing marks the first token of a document
    is_first = np.isin(before, [tokenizer.end, *tokenizer.start])
    pairs = np.stack([targets, is_first], axis=-1)[targets != NO_TOKEN]
    each, counts = np.unique(pairs, axis=0, return_counts=True)
    numbers = [tokenizer.num_bytes(token, bool(first)) for token, first in each.tolist()]
    return int(counts @ np.array(numbers, np.int64))


class Question(NamedTuple):
    """A prompt and its possible continuations."""

    prompt: str
    choices: tuple[str, ...]
    answer: int


def read_questions(path: Path) -> list[Question]:
    """Return the questions in a file of JSON lines. DataError names the first wrong line.

    A line: {"prompt": text, "choices": [text, ...], "answer": number from 0}.
    """
    with os_errors(f"--choices {path} cannot be read", "Use another file.", DataError):
        lines = lines_of_text(read_text(path))
    questions = [_question(path, n, line) for n, line in enumerate(lines, 1) if line.strip()]
    if not questions:
        raise DataError(f"--choices {path} is empty. Write one question per line.")
    return questions


def _question(path: Path, number: int, line: str) -> Question:
    try:
        given: Any = json_value(json.loads(line))
        prompt, choices, answer = given["prompt"], given["choices"], given["answer"]
        is_list = isinstance(choices, list) and all(isinstance(c, str) and c for c in choices)
        is_right = isinstance(prompt, str) and is_list and type(answer) is int
        if is_right and len(choices) > 1 and 0 <= answer < len(choices):
            return Question(prompt, tuple(choices), answer)
    except (ValueError, KeyError, TypeError):
        pass
    example = '{"prompt": "2 + 2 =", "choices": [" 4", " 5"], "answer": 0}'
    raise DataError(f"{path}:{number} is not a question. Write {example}.")


def answer_questions(model: LanguageModel, questions: Sequence[Question]) -> dict[str, float]:
    """Return num_questions, and the shares of right answers: accuracy and accuracy_per_byte.

    accuracy chooses the likeliest continuation, accuracy_per_byte the likeliest per UTF-8 byte.
    """
    likelihood, right, number = log_likelihood(model), np.zeros(2, int), len(questions)
    for prompt, choices, answer in questions:
        scores = np.array([likelihood(prompt, choice) for choice in choices])
        per_byte = scores / [len(choice.encode()) for choice in choices]
        right += [scores.argmax() == answer, per_byte.argmax() == answer]
    accuracy, per_byte = (right / number).tolist()
    return {"num_questions": number, "accuracy": accuracy, "accuracy_per_byte": per_byte}


def log_likelihood(model: LanguageModel) -> Callable[[str, str], float]:
    """Return a function (prompt, continuation) -> log probability of the continuation, in nats.

    A token that spans both belongs to the continuation. Texts are padded to powers of two, so that
    few programs are compiled.
    """
    # 1. make the program
    params = jax.device_put(model.params, all_devices()[0])
    outputs = outputs_of(model.stack(), dtype=model.dtype)

    @jax.jit
    def total(inputs: jax.Array, targets: jax.Array) -> jax.Array:
        logits = outputs(params, inputs)
        log_p = jax.nn.log_softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))
        counts = targets != NO_TOKEN
        places = jnp.where(counts, targets, 0)[..., None]
        return jnp.where(counts, jnp.take_along_axis(log_p, places, -1)[..., 0], 0).sum()

    # 2. sum over the tokens of the whole text after those that it shares with the prompt
    def likelihood(prompt: str, continuation: str) -> float:
        before, ids = model.encoded(prompt), model.encoded(prompt + continuation)
        differing = (i for i, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b)
        shared = next(differing, len(before))
        if shared == len(ids):
            return 0.0
        if shared == 0:  # the continuation follows the token that ends documents
            ids, shared = [model.tokenizer.end, *ids], 1
        length = max(16, 1 << (len(ids) - 2).bit_length())
        inputs, targets = np.zeros((1, length), np.int32), np.full((1, length), NO_TOKEN, np.int32)
        inputs[0, : len(ids) - 1] = ids[:-1]
        targets[0, shared - 1 : len(ids) - 1] = ids[shared:]
        return float(total(inputs, targets))

    return likelihood
