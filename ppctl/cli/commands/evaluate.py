"""`ppctl evaluate`: perplexity and bits per byte of a run's model, or its choice among answers."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ppctl.cli.choices import request_words
from ppctl.cli.command_options import Parser
from ppctl.cli.commands.generate import run_or_checkpoint
from ppctl.config import DTYPES, Config, Stdlib, Tokens
from ppctl.errors import ConfigError, DataError
from ppctl.reports.terminal_output import show_result

if TYPE_CHECKING:
    from ppctl.language.language_model import LanguageModel

# overrides for one device and batches of 1, since a data set needs at least one full batch
ONE_DEVICE = (
    *("mesh=1x1", "schedule=gpipe", "schedule.num_microbatches=1", "run.eval_every=null"),
    "data.batch_size=1",
)
BY_TOKENIZER = ("data.tokenizer", "data.end_token")  # settings that the run's tokenizer replaces
HELD_OUT = ("data.eval_fraction", "data.eval_path")
# settings that change how a text is read, not which text
SAME_TEXT = ("model.seq_len", "data.packing", "data.cache_dir", "data.batch_size", *BY_TOKENIZER)
NOTES = """\
RUN is a path, a name in the list of `ppctl runs`, or a checkpoint (RUN/checkpoints/STEP). Without
other data, the run's held-out sequences are evaluated. Of other data (data=, data.path= and others)
all sequences are, or those that data.eval_fraction=F holds out. Text is encoded by the run's
tokenizer, and packed as in the run unless data.packing is set. Sequences are as long as in
training, or model.seq_len=N tokens. The output is loss (nats a token), perplexity, bits_per_byte
and num_tokens.

A question of --choices is {"prompt": "2 + 2 =", "choices": [" 4", " 5"], "answer": 0}. The model's
answer is the likeliest choice (accuracy), or the choice with the largest likelihood per byte
(accuracy_per_byte)."""


def parser() -> Parser:
    """Return the parser for the options of `ppctl evaluate`."""
    usage = "RUN [data=... data.SETTING=...] [model.seq_len=N] [OPTIONS]"
    options = Parser("evaluate", usage, notes=NOTES, nargs="+")
    options.add_argument("--choices", metavar="FILE.jsonl", help="questions, a line each")
    about = "only the first N sequences or questions"
    options.add_argument("--limit", type=int, metavar="N", help=about)
    options.add_argument("--dtype", choices=DTYPES, help="dtype of compute (default: the run's)")
    return options


def serve(options: Namespace) -> int:
    """Evaluate a model; return the exit code."""
    overrides = [word for word in options.words if "=" in word and not Path(word).exists()]
    for word in overrides:
        if not word.startswith(("data=", "data.", "+data.", "model.seq_len=")):
            takes = "`ppctl evaluate` takes only data=..., data.SETTING=... and model.seq_len=N"
            raise ConfigError(f"{word}: {takes}.")
    if options.choices is not None and overrides:
        what = f"--choices {options.choices} evaluates questions, not data"
        raise ConfigError(f"{what}. Leave {overrides[0]} out.")
    if options.limit is not None and options.limit < 1:
        raise ConfigError(f"--limit {options.limit} leaves nothing to evaluate. Use 1 or more.")
    runs = [word for word in options.words if word not in overrides]
    if len(runs) != 1:
        raise ConfigError(
            f"`ppctl evaluate` takes one run, not {len(runs)}. `ppctl runs` lists them."
        )
    path = run_or_checkpoint(runs[0])
    from ppctl.language.language_model import open_language_model

    model = open_language_model(path, options.dtype)
    if options.choices is not None:
        return _answer(model, options)
    return _evaluate(model, overrides, options)


def _answer(model: LanguageModel, options: Namespace) -> int:
    from ppctl.language.text_evaluation import answer_questions, read_questions

    questions = read_questions(Path(options.choices))[: options.limit]
    found = answer_questions(model, questions)
    lines = (
        f"model               {model.directory}, step {model.step}",
        f"questions           {found['num_questions']:,} of {options.choices}",
        f"accuracy            {found['accuracy']:.1%}",
        f"accuracy per byte   {found['accuracy_per_byte']:.1%}",
    )
    document = {"run": str(model.directory), "step": model.step, **found}
    return show_result(document, lines, as_json=options.json)


def _evaluate(model: LanguageModel, overrides: Sequence[str], options: Namespace) -> int:
    from ppctl.data.tokenizer import load_tokenizer
    from ppctl.language.text_evaluation import loss_of_data
    from ppctl.training.pipeline.job import open_data

    # 1. the examples
    config, held_out = _config(model, overrides)
    data = open_data(config)
    examples = data.numbers(held_out=held_out)
    if not examples:
        raise DataError("data.eval_fraction=0 of this run holds out no sequences. Name data=...")
    examples = examples[: options.limit]
    # 2. their loss
    name, end_token = (getattr(config.data, key, None) for key in ("tokenizer", "end_token"))
    tokenizer = None if name is None else load_tokenizer(name, end_token)
    found = loss_of_data(model, data, examples, tokenizer)
    # 3. the output
    document = {"run": str(model.directory), "step": model.step, **found}
    lines = [
        f"model          {model.directory}, step {model.step}",
        f"data           {data.source}; {len(examples):,} sequences{', held out' * held_out}",
        f"loss           {found['loss']:.4f} nats a token, of {found['num_tokens']:,}",
        f"perplexity     {found['perplexity']:.3f}",
    ]
    if found["bits_per_byte"] is not None:
        lines += [f"bits per byte  {found['bits_per_byte']:.4f}"]
    return show_result(document | {"num_sequences": len(examples)}, lines, as_json=options.json)


def _config(model: LanguageModel, overrides: Sequence[str]) -> tuple[Config, bool]:
    """Return a config with the data to evaluate on, and whether only its held-out part is."""
    data, keys = model.config.data, {word.lstrip("+").partition("=")[0] for word in overrides}
    names_text = not keys <= {*SAME_TEXT}  # another text than the run's held-out one
    if not names_text and model.step == 0:
        what = f"{model.directory} was imported, and has no held-out sequences"
        raise ConfigError(f"{what}. Name data=...")
    if not overrides:
        kept = {"tokenizer": model.tokenizer_name} if hasattr(data, "tokenizer") else {}
        return replace(model.config, data=replace(data, **kept)), True
    from ppctl.cli.compose import compose

    # later words win: one device, then the run's data unless data= is given, then the user's words
    words = [*ONE_DEVICE, f"model.seq_len={model.transformer.seq_len}"]
    words += ["data.eval_fraction=0"] if names_text else []
    if "data" not in keys:
        left_out = ("data.batch_size", *BY_TOKENIZER, *(HELD_OUT if names_text else ()))
        of_run = request_words({"data": asdict(data)})
        words += [word for word in of_run if not word.startswith(left_out)]
    config = compose([*words, *overrides])
    kept: dict[str, object] = {}
    if "data.tokenizer" not in keys and isinstance(config.data, Tokens):
        kept["tokenizer"] = model.tokenizer_name
    elif "data.tokenizer" not in keys and isinstance(config.data, Stdlib):
        kept["tokenizer"] = model.known_tokenizer_name
        kept |= {} if "data.end_token" in keys else {"end_token": model.end_token}
    if "data.packing" not in keys and isinstance(config.data, Stdlib):
        kept["packing"] = getattr(data, "packing", False)
    share, path = config.data.eval_fraction, getattr(config.data, "eval_path", None)
    is_held_out = not names_text or share > 0 or path is not None
    return replace(config, data=replace(config.data, **kept)), is_held_out
