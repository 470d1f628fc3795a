"""What mkdocstrings shows of ppctl's docstrings: doctests as code, and a field's comment as its documentation."""

import re

import griffe

DOCTEST = re.compile(r"(?:^>>> .*\n?(?:^(?!\s*$).*\n?)*\n*)+", re.MULTILINE)  # in Markdown >>> would be a quotation


class Docstrings(griffe.Extension):
    """Applied to every object that is read."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Fence the doctests of a docstring."""
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(lambda run: f"```pycon\n{run[0].rstrip()}\n```\n\n", obj.docstring.value)

    def on_attribute(self, *, attr: griffe.Attribute, **_: object) -> None:
        """Document a field by the comment behind it."""
        if attr.docstring is None and attr.is_attribute and (comment := re.search(r"\s# (.*)$", "".join(attr.lines))):
            attr.docstring = griffe.Docstring(comment[1].replace("[", r"\["), parent=attr)
