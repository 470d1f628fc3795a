"""`ppctl import`: convert a transformers model or GGUF file to a run that ppctl can train."""

import time
from argparse import Namespace
from pathlib import Path

from ppctl.cli.command_options import Parser
from ppctl.errors import ConfigError
from ppctl.reports.foreign_files import check_place
from ppctl.reports.terminal_output import show_result


def parser() -> Parser:
    """Return the parser for the options of `ppctl import`."""
    notes = (
        "DIR is a model directory (config.json, *.safetensors, tokenizer files) or a .gguf file;\n"
        "with --base adapters of PEFT (adapter_config.json, adapter_model.safetensors)."
    )
    usage = "DIR --out RUN_DIR [--base RUN_DIR] [--json]"
    options = Parser("import", usage, notes=notes, words="dir", nargs=None)
    about = "a new directory: a checkpoint of step 0, a recipe, the tokenizer's files"
    options.add_argument("--out", metavar="RUN_DIR", required=True, help=about)
    about = "the imported run of the adapters' base model"
    options.add_argument("--base", metavar="RUN_DIR", help=about)
    return options


def serve(options: Namespace) -> int:
    """Write the run directory; return 0. ConfigError if ppctl has no such model."""
    source, out = Path(options.dir), Path(options.out)
    from ppctl.language.import_model import ADAPTER_CONFIG, import_adapter, import_model

    check_place(out, "--out")
    started = time.monotonic()
    if options.base is None and (source / ADAPTER_CONFIG).is_file():
        raise ConfigError(
            f"{source} holds adapters. Import their base model first, then add its --base RUN_DIR."
        )
    base = None if options.base is None else Path(options.base)
    found = import_model(source, out) if base is None else import_adapter(source, base, out)
    number, layers = found.num_parameters, found.model.num_layers
    seconds = time.monotonic() - started
    document = {"run_dir": str(out), "num_parameters": number, "num_layers": layers}
    document |= {"files": found.files, "notes": found.notes, "train": found.commands}
    lines = [
        f"imported {source}: {layers} layers, {number:,} parameters, in {seconds:.1f} s",
        *(f"note     {note}" for note in found.notes),
        f"kept     {', '.join(found.files)} in {out / 'source'}",
        *(f"train    {command}" for command in found.commands),
        f"export   ppctl export {out} --out DIR",
    ]
    return show_result(document | {"seconds": seconds}, lines, as_json=options.json)
