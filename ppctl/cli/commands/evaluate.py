"""`ppctl evaluate`: perplexity and bits per byte of a run's model on any data, its choice among answers, or lm-eval."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppctl.cli.commands import COMMANDS, runs
from ppctl.cli.commands.generate import DTYPES, run_or_checkpoint
from ppctl.cli.options import Parser
from ppctl.errors import ConfigError
from ppctl.reports.terminal import show_json

if TYPE_CHECKING:
    from ppctl.config import Config
    from ppctl.training.language_model import LanguageModel

EXAMPLES = (
    "ppctl evaluate stdlib_2x4",
    "ppctl evaluate runs/imported data=text data.path=novel.txt --json",
    "ppctl evaluate runs/imported/checkpoints/500 --choices questions.jsonl",
    "ppctl evaluate runs/imported --lm-eval arc_easy,my_task.yaml --limit 100",
)
# one device reads all examples; a batch is as small as can be, since a data set with fewer examples is refused
ONE_DEVICE = ("mesh=1x1", "schedule=gpipe", "schedule.num_microbatches=1", "run.eval_every=null")
HELP = f"""\
ppctl evaluate: {COMMANDS["evaluate"]}.

Usage: ppctl evaluate RUN [data=... data.SETTING=...] [model.seq_len=N] [--json]
       ppctl evaluate RUN --choices FILE.jsonl [--json]
       ppctl evaluate RUN --lm-eval TASKS [model.seq_len=N] [--num-fewshot N] [--json]

RUN is a path, a name in the list of `ppctl runs`, or a checkpoint (RUN/checkpoints/STEP). Without data= these are the
sequences that the run holds out; of other data all of them, or what data.eval_fraction=F holds out. Text is read by the
run's own tokenizer. Sequences are as long as in training, or model.seq_len=N tokens.

Options:
  --choices FILE  questions, {{"prompt": "2 + 2 =", "choices": [" 4", " 5"], "answer": 0}} a line: the choice that the
                  model finds likeliest is its answer (accuracy), also by likelihood for each byte (accuracy_per_byte)
  --lm-eval TASKS tasks of the package lm-eval (pip install 'ppctl[eval]'): TASK,TASK by its names, or .yaml files
  --num-fewshot N of lm-eval: examples with their answers before each question (default: as the task says)
  --limit N       only the first N sequences, questions, or examples of each task
  --dtype DTYPE   of compute: {", ".join(DTYPES)} (default: the run's)
  --json          print loss (nats a token), perplexity, bits_per_byte, num_tokens as JSON on stdout
  -h, --help      this text

Examples:
""" + "\n".join(f"  {line}" for line in EXAMPLES)


def serve(words: list[str]) -> int:
    """Evaluate a model; return the exit code."""
    options = _parser().read(words)
    if options.help:
        print(HELP)
        return 0
    overrides = [word for word in options.words if "=" in word and not Path(word).exists()]
    for word in overrides:
        if not word.startswith(("data=", "data.", "+data.", "model.seq_len=")):
            raise ConfigError(f"{word}: `ppctl evaluate` takes data=..., data.SETTING=... and model.seq_len=N alone.")
    if options.choices is not None and overrides:
        raise ConfigError(f"--choices {options.choices} has its own text. Leave {overrides[0]} out.")
    _check_tasks(options, overrides)
    if options.limit is not None and options.limit < 1:
        raise ConfigError(f"--limit {options.limit} leaves nothing to evaluate. Use 1 or more.")
    path = run_or_checkpoint([word for word in options.words if word not in overrides], "evaluate")
    from ppctl.training.language_model import open_language_model

    model = open_language_model(path, options.dtype)
    if options.choices is not None:
        return _answer(model, options)
    if options.lm_eval is not None:
        return _run_tasks(model, overrides, options)
    return _evaluate(model, overrides, options)


def _check_tasks(options: Namespace, overrides: Sequence[str]) -> None:
    """Raise ConfigError for what does not go with --lm-eval."""
    if options.lm_eval is None:
        if options.num_fewshot is not None:
            raise ConfigError(f"--num-fewshot {options.num_fewshot} is of tasks: it goes with --lm-eval TASK alone.")
        return
    if options.choices is not None:
        raise ConfigError("--choices and --lm-eval exclude each other.")
    others = [word for word in overrides if not word.startswith("model.seq_len=")]
    if others:
        raise ConfigError(f"--lm-eval {options.lm_eval} has its own text. Leave {others[0]} out.")
    if not all(options.lm_eval.split(",")):
        raise ConfigError(f"--lm-eval {options.lm_eval} names an empty task. Write TASK,TASK.")
    if options.num_fewshot is not None and options.num_fewshot < 0:
        raise ConfigError(f"--num-fewshot {options.num_fewshot} is too few. Use 0 or more.")


def _run_tasks(model: LanguageModel, overrides: Sequence[str], options: Namespace) -> int:
    from ppctl.training.lm_eval_adapter import evaluate_tasks

    names, seq_len = options.lm_eval.split(","), model.seq_len
    for word in overrides:  # the last one counts
        seq_len = _number(word)
    found = evaluate_tasks(model, names, seq_len=seq_len, limit=options.limit, num_fewshot=options.num_fewshot)
    if found.num_cut:
        note = f"note: {found.num_cut:,} prompts are longer than model.seq_len={seq_len}; they lost their beginning"
        print(note, file=sys.stderr)
    if options.json:
        shown = {"run": str(model.directory), "step": model.step, "results": found.results, "num_cut": found.num_cut}
        show_json(shown)
        return 0
    print(f"model  {model.directory}, step {model.step}\n\n{found.table}")
    return 0


def _number(word: str) -> int:
    """Return N of model.seq_len=N. ConfigError where it is none, or too few."""
    text = word.partition("=")[2]
    if not text.isdecimal() or int(text) < 2:
        raise ConfigError(f"{word} is no length of a sequence. Use 2 or more.")
    return int(text)


def _answer(model: LanguageModel, options: Namespace) -> int:
    from ppctl.training.text_evaluation import answer_questions, read_questions

    questions = read_questions(Path(options.choices))[: options.limit]
    with _progress("questions", len(questions)) as progress:
        found = answer_questions(model, questions, progress)
    if options.json:
        show_json({"run": str(model.directory), "step": model.step, **vars(found)})
        return 0
    print(f"model               {model.directory}, step {model.step}")
    print(f"questions           {found.num_questions:,} of {options.choices}")
    print(f"accuracy            {found.accuracy:.1%}")
    print(f"accuracy per byte   {found.accuracy_per_byte:.1%}")
    return 0


def _evaluate(model: LanguageModel, overrides: Sequence[str], options: Namespace) -> int:
    from ppctl.data.tokenizer import load_tokenizer
    from ppctl.errors import DataError
    from ppctl.training.job import open_data
    from ppctl.training.text_evaluation import loss_of_data

    config = _config(model, overrides)
    data = open_data(config)
    total = data.num_examples + data.num_eval_examples
    held_out = not overrides or config.data.eval_fraction > 0
    examples = range(data.num_examples, total) if held_out else range(total)
    if not examples:
        raise DataError("data.eval_fraction=0 of this run holds out nothing to evaluate on. Name data=...")
    examples = examples[: options.limit]
    name = getattr(config.data, "tokenizer", None)
    tokenizer = None if name is None else load_tokenizer(name, getattr(config.data, "end_token", None))
    with _progress("sequences", len(examples)) as progress:
        found = loss_of_data(model, data, examples, tokenizer, progress)
    if options.json:
        show_json(
            {
                "run": str(model.directory),
                "step": model.step,
                "loss": found.loss,
                "perplexity": found.perplexity,
                "bits_per_byte": found.bits_per_byte,
                "num_tokens": found.num_tokens,
                "num_sequences": len(examples),
            }
        )
        return 0
    print(f"model          {model.directory}, step {model.step}")
    print(f"data           {data.source}; {len(examples):,} sequences{', held out' if held_out else ''}")
    print(f"loss           {found.loss:.4f} nats a token, of {found.num_tokens:,}")
    print(f"perplexity     {found.perplexity:.3f}")
    if found.bits_per_byte is not None:
        print(f"bits per byte  {found.bits_per_byte:.4f}")
    return 0


def _config(model: LanguageModel, overrides: Sequence[str]) -> Config:
    """Return a request with the data to evaluate on."""
    if not overrides:
        kept = {"tokenizer": model.tokenizer.name} if hasattr(model.config.data, "tokenizer") else {}
        return replace(model.config, data=replace(model.config.data, **kept))
    from ppctl.cli.compose import compose
    from ppctl.cli.request_words import request_words

    own = [] if any(word.startswith("data=") for word in overrides) else _data_words(request_words, model)
    usual = ["data.batch_size=1", "data.eval_fraction=0"]
    given = {word.partition("=")[0] for word in (*own, *overrides)}
    words = [*own, *overrides, *(word for word in usual if word.partition("=")[0] not in given)]
    if "model.seq_len" not in given:
        words.append(f"model.seq_len={model.seq_len}")
    found: Any = compose([*ONE_DEVICE, *words], [], [])
    if "data.tokenizer" not in given and hasattr(found.data, "tokenizer"):
        found.data.tokenizer = model.tokenizer.name
        found.data.end_token = getattr(model.config.data, "end_token", None)
    return found


def _data_words(request_words: Callable[..., tuple[list[str], list[str]]], model: LanguageModel) -> list[str]:
    """Return the words of the run's own data, without those that say how it trains, and by which tokenizer."""
    from dataclasses import asdict

    words, _ = request_words({"data": asdict(model.config.data)})
    left_out = "data.batch_size", "data.eval_fraction", "data.tokenizer", "data.end_token"  # the last two: see _config
    return [word for word in words if not word.startswith(left_out)]


def _progress(what: str, number: int) -> AbstractContextManager[Callable[[int], object]]:
    """Return a context with a function of the number done, which a bar shows where stderr is a terminal."""
    from contextlib import contextmanager

    from rich.console import Console
    from rich.progress import Progress

    @contextmanager
    def shown() -> Any:
        console = Console(stderr=True)
        if not sys.stderr.isatty():
            yield lambda done: None
            return
        with Progress(console=console, transient=True) as bar:
            task = bar.add_task(what, total=number)
            yield lambda done: bar.update(task, completed=done)

    return shown()


def _parser() -> Parser:
    parser = Parser("ppctl evaluate")
    parser.add_argument("--choices")
    parser.add_argument("--lm-eval")
    parser.add_argument("--num-fewshot", type=int)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--dtype", choices=DTYPES)
    return parser


def completions(words: list[str]) -> list[str]:
    """Return the runs that may follow `ppctl evaluate`."""
    del words
    return runs.completions(["show"])


def option_names() -> list[str]:
    """Return every option of `ppctl evaluate`."""
    return _parser().names()
