"""`ppctl export`: write a run's parameters as a model directory that transformers loads."""

from __future__ import annotations

import json
from pathlib import Path

from ppctl.cli.command_options import Parser
from ppctl.cli.commands import COMMANDS
from ppctl.errors import ConfigError


def serve(words: list[str]) -> int:
    """Write the model directory; return 0. ConfigError where transformers has no such model."""
    options = _parser().read_directory(words)
    if options.help:
        about = COMMANDS["export"]
        print(
            "Usage: ppctl export RUN_DIR --out DIR [--step N] [--dtype DTYPE] [--adapter] "
            "[--json]\n\n"
            f"{about[0].upper()}{about[1:]}.\n\n"
            "  RUN_DIR        a run directory\n"
            "  --out DIR      a new directory: safetensors, config.json, generation_config.json, "
            "tokenizer files\n"
            "  --step N       of the checkpoint; without it the newest\n"
            "  --dtype DTYPE  float32 | bfloat16 | float16; without it that of an imported "
            "model, or float32\n"
            "  --adapter      the adapters of optim.train=lora alone, as PEFT loads them: "
            "adapter_config.json,\n"
            "                 adapter_model.safetensors; without it they are merged into the "
            "model\n"
            "  --json         print what was written as JSON"
        )
        return 0
    if not options.out:
        raise ConfigError(
            "ppctl export needs a directory to write: ppctl export RUN_DIR --out DIR."
        )
    source, step = options.source, options.step
    if step is not None and not step.isdecimal():
        raise ConfigError(f"--step {step} is no number of finished steps.")
    from ppctl.language.export_adapter import export_adapter
    from ppctl.language.export_model import export_model

    out = Path(options.out)
    number = None if step is None else int(step)
    export = export_adapter if options.adapter else export_model
    found = export(Path(source), out, step=number, dtype=options.dtype)
    if options.json:
        print(json.dumps({"directory": str(out), **found._asdict()}))
    else:
        print(
            f"exported step {found.step} of {source} in {found.dtype}: {', '.join(found.files)} "
            f"in {out}"
        )
    return 0


def option_names() -> list[str]:
    """Return every option of `ppctl export`."""
    return _parser().names()


def completions(words: list[str]) -> list[str]:
    """Return no candidates: directories are the shell's."""
    del words
    return []


def _parser() -> Parser:
    parser = Parser("ppctl export")
    for name in ("--out", "--step", "--dtype"):
        parser.add_argument(name)
    parser.add_argument("--adapter", action="store_true")
    return parser
