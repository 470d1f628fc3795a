"""`ppctl import`: write a language model of transformers, or a GGUF file, as a run to train on from."""

from __future__ import annotations

import json
import time
from pathlib import Path

from ppctl.cli.commands import COMMANDS
from ppctl.cli.directory_words import directories
from ppctl.errors import ConfigError

OPTIONS = {"--out": "DIR"}


def serve(words: list[str]) -> int:
    """Write the run directory; return 0. ConfigError where the model is none that ppctl has."""
    if words in (["-h"], ["--help"]):
        about = COMMANDS["import"]
        print(
            f"Usage: ppctl import DIR --out RUN_DIR [--json]\n\n{about[0].upper()}{about[1:]}.\n\n"
            "  DIR            a model directory (config.json, *.safetensors, tokenizer files) or a .gguf file\n"
            "  --out RUN_DIR  a new directory: a checkpoint of step 0, a recipe, the tokenizer's files\n"
            "  --json         print what was imported as JSON"
        )
        return 0
    source, given, flags = directories("import", words, OPTIONS)
    if "--out" not in given:
        raise ConfigError("ppctl import needs a directory to write: ppctl import DIR --out RUN_DIR.")
    from ppctl.training.exchange.import_model import import_model

    started, out = time.monotonic(), Path(given["--out"])
    found = import_model(Path(source), out)
    model, seconds = found.model, time.monotonic() - started
    command = f"ppctl train --config-dir {out} recipes=imported"
    if "--json" in flags:
        shown = {"run_dir": str(out), "num_parameters": found.num_parameters, "num_layers": model.num_layers}
        print(json.dumps(shown | {"files": found.files, "notes": found.notes, "seconds": seconds, "train": command}))
        return 0
    print(f"imported {source}: {model.num_layers} layers, {found.num_parameters:,} parameters, in {seconds:.1f} s")
    for note in found.notes:
        print(f"note     {note}")
    print(f"kept     {', '.join(found.files)} in {out / 'source'}")
    print(f"train    {command} data=tokens data.path=...")
    print(f"export   ppctl export {out} --out DIR")
    return 0


def option_names() -> list[str]:
    """Return every option of `ppctl import`."""
    return [*OPTIONS, "--json", "--help"]


def completions(words: list[str]) -> list[str]:
    """Return no candidates: directories are the shell's."""
    del words
    return []
