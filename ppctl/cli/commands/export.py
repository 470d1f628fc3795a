"""`ppctl export`: write a run's parameters as a model directory that transformers loads."""

from argparse import Namespace
from pathlib import Path

from ppctl.cli.command_options import Parser
from ppctl.reports.terminal_output import show_result


def parser() -> Parser:
    """Return the parser for the options of `ppctl export`."""
    notes = (
        "DIR gets safetensors, config.json, generation_config.json and the tokenizer's files; with "
        "--adapter\nadapter_config.json and adapter_model.safetensors."
    )
    usage = "RUN_DIR --out DIR [OPTIONS]"
    options = Parser("export", usage, notes=notes, words="run_dir", nargs=None)
    options.add_argument("--out", metavar="DIR", required=True, help="a new directory")
    about = "step of the checkpoint, a number of finished steps; default: the newest"
    options.add_argument("--step", type=int, metavar="N", help=about)
    about = "float32 | bfloat16 | float16; default: that of an imported model, else float32"
    options.add_argument("--dtype", help=about)
    about = "only the adapters of optim.train=lora, as PEFT loads them; without it they are merged"
    options.add_argument("--adapter", action="store_true", help=about)
    return options


def serve(options: Namespace) -> int:
    """Write the model directory; return 0. ConfigError if transformers has no such model."""
    source, out = Path(options.run_dir), Path(options.out)
    from ppctl.language.export_model import export_model

    found = export_model(
        source, out, step=options.step, dtype=options.dtype, adapter=options.adapter
    )
    files = ", ".join(found.files)
    lines = [f"exported step {found.step} of {source} in {found.dtype}: {files} in {out}"]
    if found.linear_dtype is not None:
        lines += [f"without model.linear_dtype={found.linear_dtype}: its readers round no products"]
    document = {"directory": str(out), **found._asdict()}
    return show_result(document, lines, as_json=options.json)
