"""`ppctl export`: write a run's parameters as a model directory that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path

from ppctl.cli.commands import COMMANDS
from ppctl.cli.directory_words import directories
from ppctl.errors import ConfigError

FLAGS = ("--adapter", "--json")
OPTIONS = {"--out": "DIR", "--step": "N", "--dtype": "DTYPE"}


def serve(words: list[str]) -> int:
    """Write the model directory; return 0. ConfigError where transformers has no such model."""
    if words in (["-h"], ["--help"]):
        about = COMMANDS["export"]
        print(
            f"Usage: ppctl export RUN_DIR --out DIR [--step N] [--dtype DTYPE] [--adapter] [--json]\n\n"
            f"{about[0].upper()}{about[1:]}.\n\n"
            "  RUN_DIR        a run directory\n"
            "  --out DIR      a new directory: safetensors, config.json, generation_config.json, tokenizer files\n"
            "  --step N       of the checkpoint; without it the newest\n"
            "  --dtype DTYPE  float32 | bfloat16 | float16; without it that of an imported model, or float32\n"
            "  --adapter      the adapters of optim.train=lora alone, as PEFT loads them: adapter_config.json,\n"
            "                 adapter_model.safetensors; without it they are merged into the model\n"
            "  --json         print what was written as JSON"
        )
        return 0
    source, given, flags = directories("export", words, OPTIONS, FLAGS)
    if "--out" not in given:
        raise ConfigError("ppctl export needs a directory to write: ppctl export RUN_DIR --out DIR.")
    step = given.get("--step")
    if step is not None and not step.isdecimal():
        raise ConfigError(f"--step {step} is no number of finished steps.")
    from ppctl.training.exchange.export_adapter import export_adapter
    from ppctl.training.exchange.export_model import export_model

    out = Path(given["--out"])
    number = None if step is None else int(step)
    export = export_adapter if "--adapter" in flags else export_model
    found = export(Path(source), out, step=number, dtype=given.get("--dtype"))
    if "--json" in flags:
        print(json.dumps({"directory": str(out), **found._asdict()}))
    else:
        print(f"exported step {found.step} of {source} in {found.dtype}: {', '.join(found.files)} in {out}")
    return 0


def option_names() -> list[str]:
    """Return every option of `ppctl export`."""
    return [*OPTIONS, *FLAGS, "--help"]


def completions(words: list[str]) -> list[str]:
    """Return no candidates: directories are the shell's."""
    del words
    return []
