"""A language model that was trained or imported: a transformer of a run, with the tokenizer of its text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ppctl import config as settings
from ppctl.config import Config
from ppctl.config.stored import model_and_data
from ppctl.data.chat import render_question
from ppctl.data.tokenizer import BYTES, FILE, NUM_BYTES, Tokenizer, byte_tokenizer, load_tokenizer
from ppctl.errors import CheckpointError, ConfigError
from ppctl.model.stack import Stack
from ppctl.model.transformer import transformer
from ppctl.training.adapters import merged_params
from ppctl.training.checkpoint.checkpoint import Checkpoints
from ppctl.training.job import DEFAULT_DTYPE
from ppctl.training.kept_tokenizer import configured_ends, kept_tokenizer
from ppctl.training.saved_run import load_run

Tree = Any


@dataclass(frozen=True)
class LanguageModel:
    """A transformer over tokens, and how text becomes tokens. Nothing is read before it is asked for."""

    directory: Path  # of the run
    step: int
    config: Config  # model, data and run of the run; all else has its defaults
    dtype: jnp.dtype  # of compute

    @cached_property
    def params(self) -> Tree:
        """The parameters {"ends", "layers"}, in natural order, whole in the host's memory; adapters are merged in."""
        with self._checkpoints() as checkpoints:
            return merged_params(checkpoints, self.step, jax.local_devices(backend="cpu")[0])

    @cached_property
    def vocab_size(self) -> int:
        """The token ids that the model knows: rows of its embedding."""
        return self.params["ends"]["embedding"].shape[0]

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the run's data, or the one in its directory; without either, bytes.

        Raises ConfigError where there is none and the vocabulary has no room for bytes.
        """
        own = kept_tokenizer(self.directory)
        end_token = getattr(self.config.data, "end_token", None)
        if own is not None:
            return load_tokenizer(str(own), end_token)
        name = getattr(self.config.data, "tokenizer", BYTES)
        if name != BYTES:
            return load_tokenizer(name, end_token)
        if self.vocab_size < NUM_BYTES:
            raise ConfigError(
                f"{self.directory} has no {FILE}, and its {self.vocab_size} token ids are fewer than the {NUM_BYTES} "
                f"bytes. Put the {FILE} of its tokenizer there."
            )
        return byte_tokenizer()

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens that end a text: what ends documents, and what the model's generation config names."""
        return frozenset((self.tokenizer.end, *configured_ends(self.directory)))

    def token_of(self, text: str) -> int:
        """Return the token that is a text, special or not. ConfigError where it is none, or several."""
        ids = self.tokenizer.encode_chat(text, ())[0].tolist()
        if len(ids) != 1:
            raise ConfigError(f"{text!r} is {len(ids)} tokens of the tokenizer of {self.directory}. Name one token.")
        return ids[0]

    def stack(self, *, packed: bool = False) -> Stack:
        """Return the model as it computes whole sequences, on the first device; packed: of several documents each."""
        return transformer(**self.sizes, dtype=self.dtype, packed=packed)

    @property
    def seq_len(self) -> int:
        """Tokens of a sequence in training."""
        assert isinstance(self.config.model, settings.Transformer), "checked by open_language_model"
        return self.config.model.seq_len

    @property
    def sizes(self) -> dict[str, Any]:
        """The model's sizes and variants, as `model.transformer` takes them."""
        left_out = ("name", "seq_len", "attention")
        sizes = {key: value for key, value in asdict(self.config.model).items() if key not in left_out}
        return sizes | {"vocab_size": self.vocab_size}

    def encoded(self, text: str) -> list[int]:
        """Return the tokens of a prompt: what its tokenizer begins with, and the text; of none what ends documents."""
        ids = [*self.tokenizer.start, *self.tokenizer.encode([text])[0].tolist()] or [self.tokenizer.end]
        if max(ids) >= self.vocab_size:
            raise ConfigError(
                f"the tokenizer of {self.directory} gives the token {max(ids)}, and the model has {self.vocab_size}: "
                "it is another model's. Put the right one there."
            )
        return ids

    def encoded_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the tokens of a chat that the model is to answer. ConfigError where its tokenizer has no template."""
        template = self.tokenizer.template
        if template is None:
            raise ConfigError(
                f"the tokenizer of {self.directory} has no chat template (chat_template.jinja, or in "
                "tokenizer_config.json). Leave --chat out, and write the prompt as the model was trained."
            )
        text = render_question(template, messages)
        return self.tokenizer.encode_chat(text, ())[0].tolist()

    def _checkpoints(self) -> Checkpoints:
        return Checkpoints(self.directory / "checkpoints", keep=None)


def open_language_model(path: Path, dtype: str | None = None) -> LanguageModel:
    """Return the model of a run, or of one of its checkpoints, by its directory.

    Raises:
        ConfigError: There is no run, or its model is no transformer.
        CheckpointError: There is no such checkpoint.
    """
    is_checkpoint = path.parent.name == "checkpoints" and path.name.isdecimal()
    directory = path.parent.parent if is_checkpoint else path
    if not (directory / "config.yaml").is_file() and (directory / "config.json").is_file():
        raise ConfigError(
            f"{directory} holds a model of Hugging Face's format. Import it: ppctl import {directory} --out RUN_DIR."
        )
    run = load_run(directory)
    config = model_and_data(run.settings)
    if not isinstance(config.model, settings.Transformer):
        raise ConfigError(f"{directory} has model={config.model.name}, and only the built-in transformer writes text.")
    steps = run.steps
    if not steps or (is_checkpoint and int(path.name) not in steps):
        found = f"of steps {', '.join(map(str, steps))}" if steps else "none"
        raise CheckpointError(f"{path} has no finished checkpoint; there are {found}.")
    name = dtype or config.run.dtype or DEFAULT_DTYPE
    if name == "float64":
        jax.config.update("jax_enable_x64", True)
    return LanguageModel(directory, int(path.name) if is_checkpoint else steps[-1], config, jnp.dtype(name))
