"""The docstrings of ppctl for mkdocstrings: doctests as code, comments of fields as text."""

import re

import griffe

DOCTEST = re.compile(
    r"(?:^>>> .*\n?(?:^(?!\s*$).*\n?)*\n*)+", re.MULTILINE
)  # in Markdown >>> would be a quotation


class Docstrings(griffe.Extension):
    """Applied to every object that is read."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Fence the doctests of a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(
                lambda run: f"```pycon\n{run[0].rstrip()}\n```\n\n", obj.docstring.value
            )

    def on_class_members(self, *, cls: griffe.Class, **_: object) -> None:
        """Document the fields of a class in a table, by the comments behind them."""
        fields = [
            member for member in cls.members.values() if member.is_attribute and not member.is_alias
        ]
        found = {field.name: re.search(r"\s# (.*)$", "".join(field.lines)) for field in fields}
        rows = [f"    {name}: {comment[1]}" for name, comment in found.items() if comment]
        if rows and cls.docstring is not None:
            cls.docstring.value += "\n\nAttributes:\n" + "\n".join(rows) + "\n"
