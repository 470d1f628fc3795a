"""`ppctl report`: one run, or several compared, as an html page to look at and to send; starts no JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ppctl.cli.choices import schema_of
from ppctl.cli.commands import COMMANDS, runs
from ppctl.cli.commands.runs import DEFAULT_DIR
from ppctl.cli.options import Parser
from ppctl.config import Auto, Csv, Mesh
from ppctl.errors import ConfigError, PpctlError
from ppctl.reports.run_files import SCHEDULE_FILE
from ppctl.reports.terminal import replace_file

if TYPE_CHECKING:
    from ppctl.config.schedule_from_config import Pipeline
    from ppctl.reports.run_page.read import RecordedRun

EXAMPLES = ("ppctl report tiny", "ppctl report tiny runs/other --out both.html", "ppctl report runs/sweep/*/ --json")
HELP = f"""\
ppctl report: {COMMANDS["report"]}.

Usage: ppctl report RUN [--out FILE.html] [--json]           one run: status, curves, predicted vs. measured
       ppctl report RUN RUN ... [--out FILE.html] [--json]   any number: what differs, curves drawn together

RUN is a path, a name in the list of `ppctl runs`, or a part of one that no other has. The page holds all it shows: it
can be mailed, and opens without a network. It is of the moment; write it again while a run goes on.

Options:
  --out FILE  where to write it (default: report.html in the run's directory; of several runs, here). A file that is no
              report is not overwritten
  --json      print its numbers as JSON on stdout, too
  -h, --help  this text

Examples:
""" + "\n".join(f"  {line}" for line in EXAMPLES)


def serve(words: list[str]) -> int:
    """Write the page of a run or of several; return the exit code."""
    options = _parser().read(words)
    if options.help:
        print(HELP)
        return 0
    if not options.words:
        raise ConfigError("`ppctl report` needs a run: ppctl report RUN. `ppctl runs` lists them.")
    from ppctl.reports.run_page import write_report as report

    found = [_find(word) for word in options.words]
    places: dict[Path, str] = {}
    for word, (_, path) in zip(options.words, found, strict=True):
        if path.resolve() in places:
            raise ConfigError(f"{places[path.resolve()]} and {word} are the same run. Name each once.")
        places[path.resolve()] = word
    file = report.place_of(options.out, [path for _, path in found])
    read = [_read(*each, is_alone=len(found) == 1) for each in found]
    return report.write_report(read, file, as_json=options.json)


def write_report_of(run_dir: Path) -> None:
    """Write the report of a run in its directory, if there is a run and the file is not another's."""
    from ppctl.reports.run_files import is_run
    from ppctl.reports.run_page import write_report as report
    from ppctl.reports.run_page.page import run_page

    if not is_run(run_dir):
        return
    with suppress(PpctlError, OSError):
        file = report.place_of(None, [run_dir])
        replace_file(file, run_page(_read(str(run_dir), run_dir, is_alone=True), file))


def _find(word: str) -> tuple[str, Path]:
    """Return (name, directory) of the run that a word means."""
    from ppctl.reports import runs_table
    from ppctl.reports.run_files import find_runs, is_run

    top = Path(DEFAULT_DIR)
    if not is_run(Path(word)) and not (top.is_dir() and find_runs(top)):
        raise ConfigError(f"{word} is no run, and none is in {DEFAULT_DIR}/ here. Give the path of one.")
    return runs_table.find_run(word, [top])


def _read(name: str, path: Path, *, is_alone: bool) -> RecordedRun:
    from ppctl.cli.overrides import resumption
    from ppctl.reports.run_page.read import read_run

    found = resumption(path)
    pipeline = _pipeline(path, found.config, found.words) if is_alone else "Not drawn of several runs."
    return read_run(name, path, found.config, found.words, found.command, found.notes, pipeline)


def _pipeline(run_dir: Path, config: Mapping[str, Any], words: Sequence[str]) -> Pipeline | str:
    """Return the schedule of a run as its settings have it, or why it cannot be drawn.

    What schedule=auto found for the model is in the run's directory.
    """
    from ppctl.config.schedule_from_config import pipeline_of, trained_share
    from ppctl.reports.run_page.gantt import most_chunks, too_large

    try:
        parts = {part: schema_of(part, config[part]["name"])(**config[part]) for part in ("schedule", "executor")}
        mesh, num_layers = Mesh(**config["mesh"]), config["model"]["num_layers"]
        for part in (mesh, *parts.values()):
            part.check()
        if parts["executor"].name == "reference":
            return "executor=reference has no pipeline to draw."
        path = getattr(parts["schedule"], "path", None)
        if path is not None and Path(path).exists() and not Path(path).is_file():
            return f"The schedule cannot be drawn: {path} cannot be read: it is no file."  # but a pipe, or has no end
        is_found = isinstance(parts["schedule"], Auto) and (run_dir / SCHEDULE_FILE).is_file()
        if is_found:
            number = parts["schedule"].num_microbatches
            parts["schedule"] = Csv(name="csv", path=str(run_dir / SCHEDULE_FILE), num_microbatches=number)
        chunks = most_chunks(parts["schedule"], mesh.pp, num_layers)
        large = too_large(mesh.pp, parts["schedule"].num_microbatches, chunks, words)
        if large:
            return large
        trained = 1.0
        if config.get("optim", {}).get("train") == "lora":
            trained = trained_share(
                *(schema_of(part, config[part]["name"])(**config[part]) for part in ("model", "optim"))
            )
        found = pipeline_of(**parts, num_ranks=mesh.pp, num_layers=num_layers, trained=trained)
        return replace(found, label="auto") if is_found else found
    except PpctlError as error:
        return f"The schedule cannot be drawn: {' '.join(str(error).split())}"
    except (KeyError, TypeError, ValueError, AttributeError, OSError):
        return "The schedule cannot be drawn: the settings of the run are not such as there are now."


def completions(words: list[str]) -> list[str]:
    """Return the runs that may follow `ppctl report`."""
    del words
    return runs.completions(["show"])


def option_names() -> list[str]:
    """Return every option of `ppctl report`."""
    return _parser().names()


def _parser() -> Parser:
    parser = Parser("ppctl report")
    parser.add_argument("--out")
    return parser
