"""`ppctl generate`: continue prompts with the model of a run."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Container, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppctl.cli.command_options import Parser
from ppctl.cli.commands.runs import run_named
from ppctl.config import DTYPES
from ppctl.errors import ConfigError, os_errors
from ppctl.reports.run_files import is_run
from ppctl.reports.terminal_output import show_json
from ppctl.user_files import lines_of_text, read_text

if TYPE_CHECKING:
    from ppctl.language.language_model import LanguageModel

NOTES = """\
RUN is a path, a name in the list of `ppctl runs`, or a checkpoint (RUN/checkpoints/STEP). Text is
encoded by the tokenizer.json in the run's directory, else by the tokenizer of its data; without
either, tokens are bytes. The model's layers run one after the other on --devices devices. --chat
without a prompt starts a conversation: each line of the input is a message, an empty line ends it.
A text ends at an end-of-document token, at eos_token_id in generation_config.json, and with --chat
at the end of a turn in the chat template."""


def parser() -> Parser:
    """Return the parser for the options of `ppctl generate`."""
    usage = "RUN --prompt TEXT [OPTIONS]"
    options = Parser("generate", usage, notes=NOTES, words="run", nargs=None)
    add = options.add_argument
    about = 'the text to continue; may be repeated; "" is the end of a document'
    add("--prompt", action="append", default=[], metavar="TEXT", help=about)
    add("--prompts", metavar="FILE", help="a file with a prompt a line")
    about = "the prompt is a user's message, written by the tokenizer's chat template"
    add("--chat", action="store_true", help=about)
    about = "the system message before the user's; with --chat"
    add("--system", metavar="TEXT", help=about)
    add("--max-tokens", type=int, default=64, metavar="N", help="new tokens at most (default: 64)")
    about = 'another token that ends the text, such as "<|im_end|>"; may be repeated'
    add("--stop", action="append", metavar="TOKEN", help=about)
    about = "0: the likeliest token; otherwise logits are divided by it (default: 1)"
    add("--temperature", type=float, default=1.0, metavar="T", help=about)
    add("--top-k", type=int, metavar="K", help="only the K likeliest tokens")
    about = "only the likeliest tokens, as few as reach the probability P together"
    add("--top-p", type=float, metavar="P", help=about)
    about = "seed of the choice (default: 0); the same seed and prompt give the same text"
    add("--seed", type=int, default=0, metavar="N", help=about)
    about = "devices that share the model's layers, in order (default: 1)"
    add("--devices", type=int, default=1, metavar="N", help=about)
    add("--dtype", choices=DTYPES, help="dtype of compute (default: the run's)")
    return options


def serve(options: Namespace) -> int:
    """Continue prompts; return the exit code."""
    if options.system is not None and not options.chat:
        raise ConfigError("--system is a message of a chat template. Add --chat, or leave it out.")
    prompts = _prompts(options)
    for name, least in (("max_tokens", 1), ("devices", 1), ("seed", 0)):
        if getattr(options, name) < least:
            given = f"--{name.replace('_', '-')} {getattr(options, name)}"
            raise ConfigError(f"{given} is too small. Use {least} or more.")
    if options.seed >= 2**31:
        raise ConfigError(f"--seed {options.seed} is too large. Use 0 to {2**31 - 1}.")
    return _generate(run_or_checkpoint(options.run), prompts, options)


def run_or_checkpoint(word: str) -> Path:
    """Return the directory of the run or checkpoint that a word names."""
    path = Path(word)
    if path.parent.name == "checkpoints" or is_run(path) or (path / "config.json").is_file():
        return path
    return run_named(word)[1]


def _prompts(options: Namespace) -> list[str]:
    prompts: list[str] = [*options.prompt]
    if options.prompts is not None:
        with os_errors(f"--prompts {options.prompts} cannot be read", "Use another file."):
            prompts += lines_of_text(read_text(options.prompts))
    if not prompts and not options.chat:
        raise ConfigError('`ppctl generate` needs a prompt: --prompt TEXT, or "" for none.')
    return prompts


def _generate(path: Path, prompts: Sequence[str], options: Namespace) -> int:
    from ppctl.language import generation
    from ppctl.language.language_model import LanguageModel, open_language_model

    # 1. the model and its prompts
    sampling = generation.Sampling(options.temperature, options.top_k, options.top_p)
    sampling.check()
    devices = start_devices(options.devices)
    model = open_language_model(path, options.dtype)
    how = {"max_tokens": options.max_tokens, "sampling": sampling, "seed": options.seed}
    if not prompts:
        return _converse(model, devices, options, how)
    encoded = partial(_question, system=options.system) if options.chat else LanguageModel.encoded
    ids = [encoded(model, prompt) for prompt in prompts]
    num_positions = generation.positions_for(ids, options.max_tokens)
    decoder, ends = generation.decoder_of(model, devices, num_positions), _ends(model, options)
    if max(map(len, ids)) + options.max_tokens > model.num_positions:
        learned = f"{model.num_positions:,} positions, the number that the model has learned"
        print(f"note: text beyond {learned}, may make no sense.", file=sys.stderr)
    # 2. the continuations; the text of a single prompt is printed as it is generated
    how |= {"num_tokens": model.tokenizer.vocab_size}
    tokens = generation.continuations(decoder, ids, **how)
    if len(prompts) == 1 and not options.json:
        print(prompts[0], end="", flush=True)
        number = _print_pieces(
            generation.pieces_of_text(model.tokenizer, ids[0], tokens, ends, options.max_tokens)
        )
    else:
        new = _rows(tokens, len(prompts), ends)
        texts = [
            generation.text_of(model.tokenizer, prompt, each, ends)
            for prompt, each in zip(ids, new, strict=True)
        ]
        if options.json:
            reasons = ["end" if each[-1] in ends else "length" for each in new]
            rows = zip(prompts, texts, new, reasons, strict=True)
            keys = ("prompt", "text", "tokens", "finished")
            show_json({"completions": [dict(zip(keys, row, strict=True)) for row in rows]})
            return 0
        for prompt, text in zip(prompts, texts, strict=True):
            print(f"{prompt}{text}\n")
        number = sum(map(len, new))
    print(f"{number} tokens of {model.directory}, step {model.step}", file=sys.stderr)
    return 0


def _rows(tokens: Iterable[Any], number: int, ends: Container[int]) -> list[list[int]]:
    """Return the new tokens of each prompt, up to and including the first token in `ends`.

    tokens: for each step, an array [number] with the next token of each prompt. number: prompts.
    """
    new: list[list[int]] = [[] for _ in range(number)]
    for chosen in tokens:
        for row, token in zip(new, chosen.tolist(), strict=True):
            if not row or row[-1] not in ends:
                row.append(token)
        if all(row[-1] in ends for row in new):
            break
    return new


def _print_pieces(pieces: Iterable[str]) -> int:
    """Print the pieces of a text as they are generated; return their number."""
    number = 0
    for piece in pieces:
        print(piece, end="", flush=True)
        number += 1
    print()
    return number


def _converse(
    model: LanguageModel, devices: Sequence[Any], options: Namespace, how: dict[str, Any]
) -> int:
    """Answer each line of the input, until an empty line or the end of the input; return 0."""
    from ppctl.language.generation import Conversation, first_messages

    _question(model, "", options.system)  # raises the template's errors before the first message
    ends = _ends(model, options)
    conversation = Conversation(model, devices, ends, first_messages(options.system), **how)
    number = 0
    prompt = "> " if sys.stdin.isatty() and not options.json else ""
    for message in _messages(prompt):
        pieces = conversation.answer(message)
        number += len([*pieces]) if options.json else _print_pieces(pieces)
    if not number:
        raise ConfigError(
            "`ppctl generate --chat` got no message. Write one a line, or use --prompt TEXT."
        )
    if options.json:
        show_json({"messages": conversation.messages})
        return 0
    print(f"{number} tokens of {model.directory}, step {model.step}", file=sys.stderr)
    return 0


def _messages(prompt: str) -> Iterator[str]:
    """Yield the lines of the input up to an empty one; print `prompt` before each."""
    try:
        while message := input(prompt).strip():
            yield message
    except EOFError:
        return
    except UnicodeDecodeError as error:
        raise ConfigError(f"the input is not UTF-8 text: {error}. Convert it.") from error


def _question(model: LanguageModel, prompt: str, system: str | None) -> list[int]:
    from ppctl.language.generation import first_messages

    return model.encoded_chat([*first_messages(system), {"role": "user", "content": prompt}])


def _ends(model: LanguageModel, options: Namespace) -> frozenset[int]:
    """Return the tokens that end a text; print a note if no token is known to end an answer."""
    from ppctl.data.tokenizer import turn_end

    named = frozenset(map(model.token_of, options.stop or ()))
    turn = turn_end(model.tokenizer) if options.chat else None
    if turn is not None:
        return model.ends | named | {turn}
    # the only token known to end a text is the one that ends documents
    if options.chat and not named and len(model.ends) == 1:
        note = "note: the chat template ends an answer with no special token. Name one with --stop."
        print(note, file=sys.stderr)
    return model.ends | named


def start_devices(number: int) -> list[Any]:
    """Return the first `number` devices; CPU devices are simulated. ConfigError if too few."""
    from ppctl.executors.device_mesh import all_devices
    from ppctl.training.pipeline.jax_start import simulate

    simulate(number)
    devices = all_devices()
    if len(devices) < number:
        here = f"the {len(devices)} attached ({devices[0].device_kind})"
        raise ConfigError(f"--devices {number} are more than {here}. Use fewer.")
    return devices[:number]
