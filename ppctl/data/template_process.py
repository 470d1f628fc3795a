"""Program that renders chat templates: a line of JSON on standard input, an answer for each.

A template can compute without end, in loops of Jinja, of Python or of C, so that no count of steps
bounds it. In a separate process the kernel does: it ends the process after its CPU time, and
refuses memory. The program runs as a file and imports only Jinja and the standard library.
"""

import json
import resource
import signal
import sys
from contextlib import suppress
from functools import lru_cache
from typing import Any

from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MOST_BYTES = 2**32  # maximum address space


class Generation(Extension):
    """{% generation %} ... {% endgeneration %}: puts the enclosed text between two marks."""

    environment: Any
    tags = {"generation"}  # noqa: RUF012 (as Jinja names it)

    def parse(self, parser: Any) -> Any:
        self.environment.is_marked = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        begin, end = self.environment.marks
        return begin + caller() + end


class Sandbox(ImmutableSandboxedEnvironment):
    is_marked = False
    marks = ("", "")


def refuse(message: str) -> None:
    raise ValueError(message)


def to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


@lru_cache(8)
def compiled(source: str) -> Any:
    """Return a template with the functions of transformers, except strftime_now."""
    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    del environment.globals["lipsum"], environment.filters["random"]  # texts of chance
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    return environment.from_string(source)


def answer(source: str, values: dict[str, Any], cpu_s: float, marks: list[str]) -> dict[str, Any]:
    """Return the text and whether the template marks answers, or why it fails."""
    signal.setitimer(signal.ITIMER_PROF, cpu_s)  # its signal ends the process
    try:
        template = compiled(source)
        template.environment.marks = marks
        text = template.render(values)
        text.encode()  # raises for half of a surrogate pair
        return {"text": text, "is_marked": template.environment.is_marked}
    except Exception as error:  # any error of the template, which is a program
        return {"why": f"{type(error).__name__}: {error}"}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the parent process
    with suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    for line in sys.stdin:
        print(json.dumps(answer(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
