"""A trained or imported language model: a run's transformer and its tokenizer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from ppctl.config import Config, Transformer
from ppctl.config.groups.transformer_sizes import Architecture
from ppctl.data.chat_templates import render_question
from ppctl.data.tokenizer import FILE, Tokenizer, json_object, load_tokenizer, token_with_id
from ppctl.errors import ConfigError
from ppctl.executors.device_mesh import all_devices
from ppctl.model.lora import Lora
from ppctl.model.stack import Stack
from ppctl.model.transformer import transformer
from ppctl.training.checkpoint.stored_checkpoints import (
    StoredCheckpoints,
    merged_params,
    stored_lora,
)
from ppctl.training.pipeline.jax_start import set_arithmetic
from ppctl.training.run import kept_tokenizer as kept
from ppctl.training.run.saved_run import SavedRun, load_run
from ppctl.user_files import check_text

Tree = Any


@dataclass(frozen=True)
class LanguageModel:
    """A transformer over tokens, and its tokenizer. Everything is read on first use."""

    run: SavedRun
    requested: int | None  # step of the checkpoint; None: the newest when it is read
    transformer: Transformer  # its settings
    config: Config  # parts model, data and run as stored; all other parts are defaults
    dtype: jnp.dtype  # compute dtype

    @property
    def directory(self) -> Path:
        """The directory of the run."""
        return self.run.directory

    @property
    def step(self) -> int:
        """The step of the parameters."""
        return self._stored[0]

    @property
    def params(self) -> Tree:
        """The parameters in natural order, in host memory; adapters are merged in."""
        return self._stored[1]

    @cached_property
    def _stored(self) -> tuple[int, Tree]:
        checkpoints, cpu = self._checkpoints, all_devices("cpu")[0]
        return self.run.read(
            self.requested, lambda step: (step, merged_params(checkpoints, step, cpu))
        )

    @cached_property
    def adapters(self) -> tuple[int, Lora, Tree] | None:
        """The step, settings of LoRA, and parameters with adapters; None without adapters."""
        checkpoints = self._checkpoints

        def read(step: int) -> tuple[int, Lora, Tree] | None:
            lora, cpu = stored_lora(checkpoints, step), all_devices("cpu")[0]
            return lora and (step, lora, checkpoints.restore_params(step, cpu))

        return self.run.read(self.requested, read)

    @property
    def _checkpoints(self) -> StoredCheckpoints:
        return StoredCheckpoints(self.directory / "checkpoints")

    @cached_property
    def vocab_size(self) -> int:
        """The number of token ids: rows of the embedding."""
        return self.params["embed_head"]["embedding"].shape[0]

    @cached_property
    def num_positions(self) -> int:
        """The maximum tokens of a text: config.json's number, or the training length if larger."""
        stated = json_object(self.directory / kept.SOURCE / kept.MODEL_CONFIG).get(kept.POSITIONS)
        return max(self.transformer.seq_len, stated if isinstance(stated, int) else 0)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer in the run's directory, else of its data. ConfigError if unknown."""
        return load_tokenizer(self.known_tokenizer_name, self.end_token)

    @property
    def known_tokenizer_name(self) -> str:
        """The value of data.tokenizer that names the run's tokenizer. ConfigError if unknown."""
        if self.tokenizer_name is None:
            raise ConfigError(
                f"{self.directory} has no {FILE}, and its data={self.config.data.name} names no "
                f"tokenizer: the meaning of its ids is unknown. Put the {FILE} of its tokenizer "
                "in the directory."
            )
        return self.tokenizer_name

    @property
    def tokenizer_name(self) -> str | None:
        """The value of data.tokenizer that names the run's tokenizer; None if unknown."""
        return kept.tokenizer_name(self.directory, self.config.data)

    @property
    def end_token(self) -> str | None:
        """The token after a document: of the run's data, else of eos_token_id in the model's files.

        None if the tokenizer states it, or no file does.
        """
        end = getattr(self.config.data, "end_token", None)
        if end is not None or not self.ends_of_model:
            return end
        return token_with_id(self.known_tokenizer_name, self.ends_of_model[0])

    @cached_property
    def ends_of_model(self) -> tuple[int, ...]:
        """The eos_token_id in the model's files. ConfigError if the model lacks one."""
        ends = kept.configured_ends(self.directory)
        for end in ends:
            if not 0 <= end < self.vocab_size:
                what = f"eos_token_id={end} in the files of {self.directory / kept.SOURCE}"
                rest = f"is not one of the model's {self.vocab_size} tokens"
                raise ConfigError(f"{what} {rest}. Correct it, or remove it.")
        return ends

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens that end a text, from the tokenizer and the model's generation config."""
        return frozenset((self.tokenizer.end, *self.ends_of_model))

    def token_of(self, text: str) -> int:
        """Return the token of a text, special or not. ConfigError if it is not a single token."""
        ids = self._special_ids(text)
        if len(ids) != 1:
            tokens = f"{len(ids)} tokens of the tokenizer of {self.directory}"
            raise ConfigError(f"{text!r} is {tokens}. Name one token.")
        return ids[0]

    def stack(self, *, packed: bool = False) -> Stack:
        """Return the model for whole sequences; packed: a sequence holds several documents."""
        return transformer(self.architecture, dtype=self.dtype, packed=packed)

    @property
    def architecture(self) -> Architecture:
        """The model's sizes and variants."""
        # no capacity: which tokens an expert drops would depend on how a text is cut into pieces
        sizes, moe = self.transformer.architecture, replace(self.transformer.moe, capacity=None)
        return replace(sizes, moe=moe, vocab_size=self.vocab_size)

    def _special_ids(self, text: str) -> list[int]:
        """Return the tokens of a text, special ones included."""
        _check_prompt(text)
        return self._checked(self.tokenizer.encode_chat(text, ())[0].tolist())

    def encoded(self, text: str) -> list[int]:
        """Return the start tokens and the tokens of `text`; if both are empty, the end token."""
        _check_prompt(text)
        ids = [*self.tokenizer.start, *self.tokenizer.encode([text])[0].tolist()]
        return self._checked(ids or [self.tokenizer.end])

    def _checked(self, ids: list[int]) -> list[int]:
        """Return `ids` as given. ConfigError if too many, or outside the model's vocabulary."""
        if len(ids) > self.num_positions:
            what = f"the {self.num_positions:,} positions of the model in {self.directory}"
            text = f"a text of {len(ids):,} tokens is longer than"
            raise ConfigError(f"{text} {what}. Use a shorter one.")
        if max(ids, default=0) >= self.vocab_size:
            what = f"the tokenizer of {self.directory} gives the token {max(ids)}"
            remedy = "Put the tokenizer of this model in the directory."
            raise ConfigError(f"{what}, but the model has {self.vocab_size} tokens. {remedy}")
        return ids

    def encoded_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the tokens of a chat up to its next answer. ConfigError without a template."""
        for message in messages:
            _check_prompt(message["content"])
        template = self.tokenizer.template
        if template is None:
            raise ConfigError(
                f"the tokenizer of {self.directory} has no chat template (chat_template.jinja, "
                "or in tokenizer_config.json). Leave --chat out, and write the prompt as the "
                "model was trained."
            )
        return self._special_ids(render_question(template, messages))


def _check_prompt(text: str) -> None:
    try:
        check_text(text)
    except ValueError as error:
        raise ConfigError(f"{text!r} {error}. Write it in UTF-8.") from error


def open_language_model(
    path: Path, dtype: str | None = None, step: int | None = None
) -> LanguageModel:
    """Open the model of a run directory, or of a checkpoint directory of a run.

    dtype: compute dtype; None: the run's. step: the checkpoint's step in a run directory; None:
    the newest. Raises ConfigError if the run is missing or has another model, CheckpointError if
    the checkpoint is missing.
    """
    # 1. load the run and its model
    directory = path
    if path.parent.name == "checkpoints" and path.name.isdecimal():
        directory, step = path.parent.parent, int(path.name)
    if not (directory / "config.yaml").is_file() and (directory / "config.json").is_file():
        remedy = f"Import it: ppctl import {directory} --out RUN_DIR."
        raise ConfigError(f"{directory} holds a model of Hugging Face's format. {remedy}")
    run = load_run(directory)
    config = run.config
    if not isinstance(config.model, Transformer):
        what = f"{directory} has model={config.model.name}"
        raise ConfigError(f"{what}: only the built-in transformer works.")
    # 2. check the checkpoint, and set the arithmetic
    run.step(step)  # raises if it is missing
    name = dtype or run.dtype
    set_arithmetic(name)
    return LanguageModel(run, step, config.model, config, jnp.dtype(name))
