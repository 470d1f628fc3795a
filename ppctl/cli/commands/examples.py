"""`ppctl examples`: commands for common tasks, to copy and to change."""

from argparse import Namespace

from ppctl.cli.command_options import EXAMPLES, Parser
from ppctl.errors import ConfigError
from ppctl.reports.terminal_output import show_result


def parser() -> Parser:
    """Return the parser for the options of `ppctl examples`."""
    return Parser("examples", "[--json]")


def serve(options: Namespace) -> int:
    """Print the examples; return 0."""
    if options.words:
        raise ConfigError(f"`ppctl examples` takes no words, not {options.words[0]}.")
    documents = [{"want": want, "command": command} for want, command in EXAMPLES]
    text = "\n\n".join(f"# {want}\n{command}" for want, command in EXAMPLES)
    return show_result(documents, [text], as_json=options.json)
