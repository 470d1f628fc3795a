"""`ppctl generate`: continue prompts with the model of a run."""

from __future__ import annotations

import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppctl.cli.commands import COMMANDS, runs
from ppctl.cli.commands.runs import DEFAULT_DIR
from ppctl.cli.options import Parser
from ppctl.errors import ConfigError
from ppctl.reports.terminal import show_json

if TYPE_CHECKING:
    from ppctl.training.language_model import LanguageModel

EXAMPLES = (
    'ppctl generate stdlib_2x4 --prompt "import " --max-tokens 100',
    'ppctl generate runs/imported --prompt "Once upon a time" --temperature 0 --json',
    "ppctl generate runs/imported/checkpoints/500 --prompts prompts.txt --top-p 0.9 --seed 1",
)
COMPILED = 1  # the number of the token by which all programs are compiled: the first is of the prompt's
DTYPES = ("float32", "bfloat16", "float64")
HELP = f"""\
ppctl generate: {COMMANDS["generate"]}.

Usage: ppctl generate RUN --prompt TEXT [--max-tokens N] [--temperature T] [--json]

RUN is a path, a name in the list of `ppctl runs`, or a checkpoint (RUN/checkpoints/STEP). Text is read and written by
the tokenizer.json in the run's directory, else by that of its data; without either the tokens are bytes. The model's
stages run one after the other, on as many devices as --devices says.

Options:
  --prompt TEXT    what is continued; may be given several times, and "" is what stands between documents
  --prompts FILE   a prompt a line
  --chat           the prompt is a user's message, written as the tokenizer's chat template has it
  --max-tokens N   new tokens at most (default 64); a token that ends documents ends the text before, so do those of
                   eos_token_id in generation_config.json, and with --chat what ends a turn in the chat template
  --stop TOKEN     one more token that ends the text, such as "<|im_end|>"; may be given several times
  --temperature T  0: the likeliest token; otherwise logits are divided by it (default 1)
  --top-k K        only the K likeliest tokens
  --top-p P        only the fewest likeliest tokens that have the probability P together
  --seed N         of the choice (default 0); the same seed and prompt give the same text
  --devices N      devices that share the model's layers, in order (default 1)
  --dtype DTYPE    of compute: {", ".join(DTYPES)} (default: the run's)
  --json           a list "completions" of text and tokens (the new ones), on stdout
  -h, --help       this text

Examples:
""" + "\n".join(f"  {line}" for line in EXAMPLES)


def serve(words: list[str]) -> int:
    """Continue prompts; return the exit code."""
    options = _parser().read(words)
    if options.help:
        print(HELP)
        return 0
    prompts = _prompts(options)
    for name, least in (("max_tokens", 1), ("devices", 1), ("seed", 0)):
        if getattr(options, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(options, name)} is too few. Use {least} or more.")
    if options.seed >= 2**31:
        raise ConfigError(f"--seed {options.seed} is too large. Use 0 to {2**31 - 1}.")
    path = run_or_checkpoint(options.words, "generate")
    return _generate(path, prompts, options)


def run_or_checkpoint(words: Sequence[str], command: str) -> Path:
    """Return the directory of the run, or of the checkpoint, that the words of a command name."""
    from ppctl.reports import runs_table
    from ppctl.reports.run_files import find_runs, is_run

    if len(words) != 1:
        what = "needs a run" if not words else f"takes one run, not {len(words)}"
        raise ConfigError(f"`ppctl {command}` {what}: ppctl {command} RUN. `ppctl runs` lists them.")
    path, top = Path(words[0]), Path(DEFAULT_DIR)
    if path.is_dir() and (is_run(path) or (path / "config.yaml").is_file() or (path / "config.json").is_file()):
        return path
    if path.parent.name == "checkpoints":
        if path.is_dir():
            return path
        raise ConfigError(f"{path} is no checkpoint: there is no such directory. `ppctl runs show RUN` lists them.")
    if not (top.is_dir() and find_runs(top)):
        raise ConfigError(f"{words[0]} is no run, and none is in {DEFAULT_DIR}/ here. Give the path of one.")
    return runs_table.find_run(words[0], [top])[1]


def _prompts(options: Namespace) -> list[str]:
    prompts: list[str] = [*(options.prompt or ())]
    if options.prompts is not None:
        try:
            prompts += Path(options.prompts).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise ConfigError(f"--prompts {options.prompts} cannot be read: {why}.") from error
    if not prompts:
        raise ConfigError('`ppctl generate` needs a prompt: --prompt TEXT, or --prompt "" for none.')
    return prompts


def _generate(path: Path, prompts: Sequence[str], options: Namespace) -> int:
    from ppctl.model.sampling import Sampling
    from ppctl.training.generation import StreamedText, continuations, decoder_of, positions_for, text_of
    from ppctl.training.language_model import open_language_model

    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    sampling.check()
    devices = start_devices(options.devices)
    model = open_language_model(path, options.dtype)
    tokenizer = model.tokenizer
    ids = [_encoded(model, prompt, is_chat=options.chat) for prompt in prompts]
    decoder = decoder_of(model, devices, positions_for(ids, options.max_tokens))
    ends = _ends(model, options)
    streams = len(prompts) == 1 and not options.json
    text_of_first = partial(text_of, tokenizer, ids[0], ends=ends)
    written = StreamedText(text_of_first, partial(print, end="", flush=True)) if streams else None
    if streams:
        print(prompts[0], end="", flush=True)
    new: list[list[int]] = [[] for _ in prompts]
    is_done = [False] * len(prompts)
    began, timed_from = 0.0, 0
    found = continuations(decoder, ids, max_tokens=options.max_tokens, sampling=sampling, seed=options.seed)
    for place, tokens in enumerate(found):
        if place == COMPILED:
            began, timed_from = time.perf_counter(), sum(map(len, new)) + len(prompts) - sum(is_done)
        for row, token in enumerate(tokens.tolist()):
            if not is_done[row]:
                new[row].append(token)
                is_done[row] = token in ends
        if written is not None and not is_done[0]:
            written.add(new[0])
        if all(is_done):
            break
    seconds = time.perf_counter() - began
    texts = [text_of(tokenizer, prompt, found, ends) for prompt, found in zip(ids, new, strict=True)]
    number = sum(map(len, new))
    per_s = (number - timed_from) / seconds if began and number > timed_from else None
    if options.json:
        reasons = ["end" if done else "length" for done in is_done]
        found = zip(prompts, texts, new, reasons, strict=True)
        keys = ("prompt", "text", "tokens", "finished")
        show_json({"completions": [dict(zip(keys, each, strict=True)) for each in found], "tokens_per_s": per_s})
        return 0
    if written is not None:
        written.end(new[0])
        print()
    else:
        for prompt, text in zip(prompts, texts, strict=True):
            print(f"{prompt}{text}\n")
    speed = "" if per_s is None else f", {per_s:.1f} tokens/s"
    print(f"{number} tokens of {model.directory}, step {model.step}{speed}", file=sys.stderr)
    return 0


def _encoded(model: LanguageModel, prompt: str, *, is_chat: bool) -> list[int]:
    if not is_chat:
        return model.encoded(prompt)
    return model.encoded_chat([{"role": "user", "content": prompt}])


def _ends(model: LanguageModel, options: Namespace) -> frozenset[int]:
    """Return the tokens that end a text; a note on stderr says where no file names what ends an answer."""
    from ppctl.data.tokenizer import turn_end

    named = frozenset(map(model.token_of, options.stop or ()))
    turn = turn_end(model.tokenizer) if options.chat else None
    if turn is not None:
        return model.ends | named | {turn}
    if options.chat and not named and len(model.ends) == 1:  # what ends documents
        note = "note: the chat template ends an answer with no special token. Name what does with --stop TOKEN."
        print(note, file=sys.stderr)
    return model.ends | named


def start_devices(number: int) -> list[Any]:
    """Return the first devices here, so many; CPU devices are simulated. ConfigError where there are fewer."""
    import jax

    from ppctl.training.start import simulate

    simulate(number)
    found = jax.devices()
    if len(found) < number:
        raise ConfigError(
            f"--devices {number} are more than the {len(found)} here ({found[0].device_kind}). Use fewer."
        )
    return found[:number]


def _parser() -> Parser:
    parser = Parser("ppctl generate")
    parser.add_argument("--prompt", action="append")
    parser.add_argument("--prompts")
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--stop", action="append")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--dtype", choices=DTYPES)
    return parser


def completions(words: list[str]) -> list[str]:
    """Return the runs that may follow `ppctl generate`."""
    del words
    return runs.completions(["show"])


def option_names() -> list[str]:
    """Return every option of `ppctl generate`."""
    return _parser().names()
