"""The words of commands that read one directory and write another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ppctl.cli.choices import did_you_mean
from ppctl.errors import ConfigError


def directories(
    command: str, words: list[str], options: Mapping[str, str], flags: Sequence[str] = ("--json",)
) -> tuple[str, dict[str, str], set[str]]:
    """Return (the directory named first, the values of options, the flags among the words).

    options: what follows each, for messages. flags: options that nothing follows.

    >>> directories("import", ["a", "--out", "b", "--json"], {"--out": "DIR"})
    ('a', {'--out': 'b'}, {'--json'})
    """
    names, given, rest = list[str](), dict[str, str](), iter(words)
    found = set[str]()
    for word in rest:
        option, has_value, value = word.partition("=")
        if word in flags:
            found.add(word)
        elif option in options:
            value = value if has_value else next(rest, "")
            if not value:
                raise ConfigError(f"ppctl {command} {option} needs {options[option]} behind it.")
            given[option] = value
        elif word.startswith("-"):
            known = [*options, *flags, "--help"]
            raise ConfigError(
                f"{word} is no option of ppctl {command}.{did_you_mean(word, known)} It has {' '.join(known)}."
            )
        else:
            names.append(word)
    if len(names) != 1:
        raise ConfigError(f"ppctl {command} takes one directory to read, not {' '.join(names) or 'none'}.")
    return names[0], given, found
