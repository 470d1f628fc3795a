"""One file per command. Its first line holds the help: "`ppctl NAME`: help."

A command that composes a whole config is a function with the file's name: `NAME(config, *, as_json)
-> exit code`. Its module imports JAX. So the module is imported only after the request is checked,
and the help is read from the file as text.

Every other command has `parser()`, which returns its `Parser`, and `serve(options) -> exit code`.
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
