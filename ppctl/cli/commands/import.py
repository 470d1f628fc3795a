"""`ppctl import`: write a language model of transformers, or a GGUF file, as a run to train on
from.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

from ppctl.cli.command_options import Parser
from ppctl.cli.commands import COMMANDS
from ppctl.errors import ConfigError


def serve(words: list[str]) -> int:
    """Write the run directory; return 0. ConfigError where the model is none that ppctl has."""
    options = _parser().read_directory(words)
    if options.help:
        about = COMMANDS["import"]
        print(
            "Usage: ppctl import DIR --out RUN_DIR "
            f"[--json]\n\n{about[0].upper()}{about[1:]}.\n\n"
            "  DIR            a model directory (config.json, *.safetensors, tokenizer files) or "
            "a .gguf file\n"
            "  --out RUN_DIR  a new directory: a checkpoint of step 0, a recipe, the tokenizer's "
            "files\n"
            "  --json         print what was imported as JSON"
        )
        return 0
    if not options.out:
        raise ConfigError(
            "ppctl import needs a directory to write: ppctl import DIR --out RUN_DIR."
        )
    from ppctl.language.import_model import import_model

    started, source, out = time.monotonic(), options.source, Path(options.out)
    found = import_model(Path(source), out)
    model, seconds = found.model, time.monotonic() - started
    command = f"ppctl train --config-dir {out} recipes=imported"
    if options.json:
        shown = {
            "run_dir": str(out),
            "num_parameters": found.num_parameters,
            "num_layers": model.num_layers,
        }
        print(
            json.dumps(
                shown
                | {"files": found.files, "notes": found.notes, "seconds": seconds, "train": command}
            )
        )
        return 0
    print(
        f"imported {source}: {model.num_layers} layers, {found.num_parameters:,} parameters, in "
        f"{seconds:.1f} s"
    )
    for note in found.notes:
        print(f"note     {note}")
    print(f"kept     {', '.join(found.files)} in {out / 'source'}")
    print(f"train    {command} data=tokens data.path=...")
    print(f"export   ppctl export {out} --out DIR")
    return 0


def option_names() -> list[str]:
    """Return every option of `ppctl import`."""
    return _parser().names()


def completions(words: list[str]) -> list[str]:
    """Return no candidates: directories are the shell's."""
    del words
    return []


def _parser() -> Parser:
    parser = Parser("ppctl import")
    parser.add_argument("--out")
    return parser
