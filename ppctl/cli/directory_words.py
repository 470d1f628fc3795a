"""The words of commands that read one directory and write another."""

from __future__ import annotations

from collections.abc import Mapping

from ppctl.cli.choices import did_you_mean
from ppctl.errors import ConfigError


def directories(command: str, words: list[str], options: Mapping[str, str]) -> tuple[str, dict[str, str], bool]:
    """Return (the directory named first, the values of options, whether --json is among the words).

    options: what follows each, for messages.

    >>> directories("import", ["a", "--out", "b", "--json"], {"--out": "DIR"})
    ('a', {'--out': 'b'}, True)
    """
    names, given, rest = list[str](), dict[str, str](), iter(words)
    as_json = False
    for word in rest:
        option, has_value, value = word.partition("=")
        if word == "--json":
            as_json = True
        elif option in options:
            value = value if has_value else next(rest, "")
            if not value:
                raise ConfigError(f"ppctl {command} {option} needs {options[option]} behind it.")
            given[option] = value
        elif word.startswith("-"):
            known = [*options, "--json", "--help"]
            raise ConfigError(
                f"{word} is no option of ppctl {command}.{did_you_mean(word, known)} It has {' '.join(known)}."
            )
        else:
            names.append(word)
    if len(names) != 1:
        raise ConfigError(f"ppctl {command} takes one directory to read, not {' '.join(names) or 'none'}.")
    return names[0], given, as_json
