"""The names of the commands, and the help in the first lines of their files."""

from pathlib import Path

# in the order of `ppctl --help`
COMPOSED = ("train", "verify", "doctor", "plan", "rehearse", "tune", "inspect", "bench")
OTHERS = (
    *("schedule", "tokenize", "import", "export", "generate", "evaluate"),
    *("runs", "stop", "report", "examples", "init"),
)


def about(name: str) -> str:
    """Return the help of a command, from the first line of its file."""
    with (Path(__file__).parent / "commands" / f"{name}.py").open(encoding="utf-8") as file:
        head, _, text = file.readline().partition("`: ")
    assert head == f'"""`ppctl {name}', f"{name}.py does not open with its help"
    return text.rstrip().removesuffix('"""').removesuffix(".")


COMMANDS = {name: about(name) for name in (*COMPOSED, *OTHERS)}
