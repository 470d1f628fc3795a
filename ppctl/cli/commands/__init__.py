"""One file a command, whose first line is its help: "`ppctl NAME`: about it."

A command that composes a whole config is a function of its own name: `NAME(config, *, as_json) ->
exit code`. Its module imports JAX, so it is imported when the request is known to be right, and its
help is read from the file.

Any other command has `parser()`, its options, and `serve(options) -> exit code`.
"""

from pathlib import Path

# in the order of `ppctl --help`
COMPOSED = ("train", "verify", "doctor", "plan", "rehearse", "tune", "inspect", "bench")
OTHERS = (
    *("schedule", "tokenize", "import", "export", "generate", "evaluate"),
    *("runs", "stop", "report", "examples", "init"),
)


def about(name: str) -> str:
    """Return the help of a command, from the first line of its file."""
    with (Path(__file__).parent / f"{name}.py").open(encoding="utf-8") as file:
        head, _, text = file.readline().partition("`: ")
    assert head == f'"""`ppctl {name}', f"{name}.py does not open with its help"
    return text.rstrip().removesuffix('"""').removesuffix(".")


COMMANDS = {name: about(name) for name in (*COMPOSED, *OTHERS)}
