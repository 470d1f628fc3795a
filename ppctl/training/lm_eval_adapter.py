"""The tasks of EleutherAI's lm-eval on a language model of ours (extra `eval`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ppctl.errors import ConfigError, DataError
from ppctl.model.sampling import Sampling
from ppctl.training.generation import continuations, decoder_of, positions_for, text_of
from ppctl.training.language_model import LanguageModel
from ppctl.training.text_evaluation import Likelihood

MAX_TOKENS = 256  # new ones, where a task does not say how many: as lm-eval's own models
MAX_TOKENS_NAMES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
RESAMPLES = 1000  # for standard errors that have no formula


class Found(NamedTuple):
    """The results of lm-eval's tasks."""

    results: Mapping[str, Mapping[str, Any]]  # of each task and group: "acc,none", "acc_stderr,none", ...
    table: str  # the same as lm-eval writes it
    num_cut: int  # prompts that were longer than a sequence, and lost their beginning


def evaluate_tasks(
    model: LanguageModel, names: Sequence[str], *, seq_len: int, limit: int | None, num_fewshot: int | None
) -> Found:
    """Return what lm-eval finds of a model on tasks: names that it knows, or .yaml files.

    seq_len: tokens that the model sees at most. limit: only the first examples of each task.

    Raises:
        ConfigError: lm-eval is not installed, there is no such task, or it asks for what the model has not.
        DataError: A task's data cannot be read.
    """
    try:
        import lm_eval  # pyright: ignore[reportMissingImports] of the extra eval
        from lm_eval.utils import make_table  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ConfigError("--lm-eval needs the package lm-eval. Install it: pip install 'ppctl[eval]'.") from error
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # it would fork processes to resample, and JAX has threads
    requests, (known, tasks) = Requests(model, seq_len), _loaded(names)
    with redirect_stdout(sys.stderr):  # lm-eval prints how far it is
        found: Any = lm_eval.simple_evaluate(
            model=_as_lm(requests),
            tasks=tasks,
            task_manager=known,
            limit=limit,
            num_fewshot=num_fewshot,
            bootstrap_iters=RESAMPLES,
            log_samples=False,
        )
        tables = [make_table(found)] + ([make_table(found, "groups")] if found.get("groups") else [])
    return Found(found["results"], "\n".join(tables), requests.num_cut)


def _loaded(names: Sequence[str]) -> tuple[Any, list[Any]]:
    """Return lm-eval's manager of tasks, and its tasks, or groups of them, of these names."""
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    known = TaskManager(include_defaults=not all(map(_is_file, names)))  # which reads thousands of files
    loaded: list[Any] = []
    for name in names:
        matches = [name] * Path(name).is_file() if _is_file(name) else known.match_tasks([name])  # * and ? are patterns
        if not matches:
            what = "is no file" if _is_file(name) else "is no task of lm-eval"
            raise ConfigError(f"--lm-eval {name} {what}. `lm-eval ls tasks` lists the tasks; or name a .yaml file.")
        for each in matches:
            try:
                found = known.load(each)
            except Exception as error:  # whatever reads the data, or the network, raises
                why = f"{type(error).__name__}: {' '.join(str(error).split())}"
                remedy = "A file must describe one task, and the data of a task be at hand."
                raise DataError(f"--lm-eval {each} cannot be loaded ({why[:300]}). {remedy}") from error
            loaded += [found["groups"][each]] if each in found["groups"] else found["tasks"].values()
    return known, loaded


def _is_file(name: str) -> bool:
    return name.endswith(".yaml")


def _as_lm(requests: Requests) -> Any:
    """Return what answers requests as a model of lm-eval."""
    from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]

    class Model(LM):
        loglikelihood = staticmethod(requests.loglikelihood)
        loglikelihood_rolling = staticmethod(requests.loglikelihood_rolling)
        generate_until = staticmethod(requests.generate_until)

    return Model()


class Requests:
    """Answers to lm-eval's requests of a model; a request has its arguments in `args`."""

    def __init__(self, model: LanguageModel, seq_len: int):
        self.model, self.seq_len, self.num_cut = model, seq_len, 0
        self._likelihood = Likelihood(model)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return (log-likelihood, whether greedy text would be it) of each (prompt, continuation)."""
        found = list[tuple[float, bool]]()
        for prompt, continuation in self._shown("continuations", requests):
            before, tokens = self._likelihood.tokens_of(prompt, continuation)
            if len(tokens) > self.seq_len:
                raise ConfigError(
                    f"a continuation of {len(tokens)} tokens is longer than model.seq_len={self.seq_len}. Use "
                    f"model.seq_len={len(tokens)} or more."
                )
            score = self._likelihood.of_tokens(self._cut(before, self.seq_len + 1 - len(tokens)), tokens)
            found.append((score.log_probability, score.is_greedy))
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Return the log-likelihood of each whole (text,)."""
        tokenizer, found = self.model.tokenizer, list[float]()
        for (text,) in self._shown("texts", requests):
            pieces = windows(tokenizer.encode([text])[0].tolist(), self.seq_len)
            scores = [self._likelihood.of_tokens(before or tokenizer.start, tokens) for before, tokens in pieces]
            found.append(sum(score.log_probability for score in scores))
        return found

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return the text behind each (prompt, how to go on), without what ends it."""
        asked = [(self.model.encoded(prompt), Stop.of(how)) for prompt, how in (each.args for each in requests)]
        for _, stop in asked:
            if stop.max_tokens >= self.seq_len:
                raise ConfigError(
                    f"max_gen_toks={stop.max_tokens} of a task leaves no room for a prompt in model.seq_len="
                    f"{self.seq_len}. Use model.seq_len={2 * stop.max_tokens} or so."
                )
        asked = [(self._cut(prompt, self.seq_len - stop.max_tokens), stop) for prompt, stop in asked]
        positions = max(positions_for([prompt], stop.max_tokens) for prompt, stop in asked)
        decoder = decoder_of(self.model, jax.devices()[:1], positions)
        return [self._text(decoder, *each) for each in self._shown("texts", asked)]

    def _text(self, decoder: Any, prompt: Sequence[int], stop: Stop) -> str:
        tokenizer, new, text = self.model.tokenizer, list[int](), ""
        for (token,) in continuations(decoder, [prompt], max_tokens=stop.max_tokens, sampling=stop.sampling, seed=0):
            new.append(int(token))
            text = text_of(tokenizer, prompt, new, self.model.ends)
            ends = [place for place in map(text.find, stop.until) if place >= 0]
            if ends:
                return text[: min(ends)]
            if token in self.model.ends:
                break
        return text

    def _cut(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return the last tokens, so many at most."""
        self.num_cut += len(tokens) > most
        return [*tokens[max(0, len(tokens) - most) :]]

    @staticmethod
    def _shown(what: str, requests: Sequence[Any]) -> Iterable[Any]:
        """Yield the arguments of requests, with a bar where stderr is a terminal."""
        from tqdm import tqdm  # lm-eval's own

        return tqdm([getattr(each, "args", each) for each in requests], desc=what, disable=None)


def windows(tokens: Sequence[int], seq_len: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield (tokens before, tokens to predict): each is predicted once, behind as many as a sequence has room for.

    >>> [*windows([0, 1, 2, 3, 4], 3)]
    [([], [0, 1, 2]), ([1, 2], [3, 4])]
    """
    for first in range(0, len(tokens), seq_len):
        last = min(first + seq_len, len(tokens))
        yield [*tokens[max(0, last - seq_len - 1) : first]], [*tokens[first:last]]


class Stop(NamedTuple):
    """How a text goes on, and where it ends."""

    until: tuple[str, ...]
    max_tokens: int
    sampling: Sampling

    @staticmethod
    def of(how: Mapping[str, Any]) -> Stop:
        """Return it of a task's generation_kwargs. ConfigError for those that ppctl has not.

        >>> Stop.of({"until": "end", "max_gen_toks": 8, "do_sample": False, "temperature": 0.7})
        Stop(until=('end',), max_tokens=8, sampling=Sampling(temperature=0, top_k=None, top_p=None))
        """
        known = {"until", "do_sample", "temperature", "top_k", "top_p", *MAX_TOKENS_NAMES}
        for name in how:
            if name not in known:
                raise ConfigError(
                    f"generation_kwargs of a task: ppctl has no {name}={how[name]}. It has {', '.join(sorted(known))}."
                )
        until = how.get("until") or []
        max_tokens = next((how[name] for name in MAX_TOKENS_NAMES if how.get(name) is not None), MAX_TOKENS)
        is_sampled = how.get("do_sample", bool(how.get("temperature")))
        sampling = Sampling(float(how.get("temperature") or 1), how.get("top_k"), how.get("top_p"))
        sampling = sampling if is_sampled else Sampling(0)
        sampling.check()
        return Stop((until,) if isinstance(until, str) else (*filter(None, until),), int(max_tokens), sampling)
