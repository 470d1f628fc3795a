"""The settings that a message suggests, to be tried."""

import re

from ppctl.errors import REMEDY

SETTING = re.compile(r"(?<![\w./])[a-z_.]+=(?:\[[^\]]*\]|[^\s,;()?]+)")
PLACEHOLDER = re.compile(r"=(\.\.\.|[A-Z][A-Z_:.]*$)|[A-Z]{2,}")


def suggestions(message: str) -> list[list[str]]:
    """The alternatives of a message's remedy, each its KEY=VALUE words; those to fill in are not
    among them, nor examples in quotes.
    """
    found = REMEDY.search(message)
    text = "" if found is None else re.sub(r"'[^']*'", "", found[0])
    alternatives = re.split(r",? or |, (?![^\[]*\])", text)
    settings = [[word.rstrip(".:") for word in SETTING.findall(each)] for each in alternatives]
    return [words for words in settings if words and not any(map(PLACEHOLDER.search, words))]


def with_suggestion(words: list[str], suggestion: list[str]) -> list[str]:
    """A request with suggested settings replaced; another choice drops settings."""
    keys = [word.partition("=")[0] for word in suggestion]
    own = [
        word
        for word in words
        if not f"{word.lstrip('+').partition('=')[0]}.".startswith(tuple(f"{key}." for key in keys))
    ]
    return [*own, *suggestion]
