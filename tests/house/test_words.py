"""Plain English: patterns of hard sentences are rare in ppctl/ and docs/, and absent where users look first.

A pattern finds words and not riddles. A text that it finds may be right, so each has a bar above 0.
"""

import ast
import inspect
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

from support.source_trees import nodes

import ppctl

ROOT = Path(ppctl.__file__).parents[1]
MOST_IN_TESTS = 10  # places in docstrings and comments of tests, over all rules
RULES = {  # name: pattern, most places
    "a noun instead of what ...": (
        r"\b[Ww]hat (is|are|was|has|have|it|they|a|the|ranks|devices|runs|others|there)\b",
        20,
    ),
    "unsupported or no match instead of is none": (
        # "is one line" and the like have their noun
        r"\b(is|are|was|were) (none|nothing)\b|\b(is|are) one\b(?! [a-z])"
        r"|\bthere (is|are) (none|nothing|no)\b",
        16,
    ),
    "two sentences instead of of which": (
        r"\b(of|in|at|by|to|from|for|on|with|over|behind|without) which\b|\bof whose\b",
        22,
    ),
    "custom or separate instead of its own": (
        r"\b(one's|their|its|his|of (the|a) [a-z]+'s) own\b",
        8,
    ),
    "requested or printed instead of asked or said": (r"\b(said|told|asked|asks|says)\b", 8),
    "only before the verb instead of alone": (r"\balone\b", 8),
    "after or next to instead of behind or beside": (r"\b(beside|behind)\b", 6),
    "a number instead of so many": (r"\bso (many|much)\b", 4),
    "embed_head instead of ends": (  # the noun; a run ends, and a token ends a text
        r"\b(the|both|two|of|and|or|for|without) ends\b|\bends' ",
        8,
    ),
    "a noun first in a comment": (r"^# (of|as|what|that|whose|which)\b", 8),
}


def without_code(text):
    """Return a text without names and commands, in which any word may be right."""
    return re.sub(r"``?[^`]*``?", "", re.sub(r"(?ms)^ *```.*?^ *```", "", text))


def texts():
    """Yield (place, text) of docstrings, messages, comments and pages."""
    for path in sorted((ROOT / "ppctl").rglob("*.py")):
        source, place = path.read_text(), path.relative_to(ROOT)
        for node in nodes(path):
            value = node.value if isinstance(node, ast.Constant) else None
            if isinstance(value, str) and " " in value and len(value) > 40:
                yield f"{place}:{node.lineno}", value
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield f"{place}:{token.start[0]}", token.string
    for path in sorted((ROOT / "docs").glob("*.md")):
        yield str(path.relative_to(ROOT)), path.read_text()


def texts_of_tests():
    """Yield (place, text) of docstrings and comments of tests."""
    for path in sorted((ROOT / "tests").rglob("*.py")):
        source, place = path.read_text(), path.relative_to(ROOT)
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                yield f"{place}:{getattr(node, 'lineno', 1)}", ast.get_docstring(node) or ""
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield f"{place}:{token.start[0]}", token.string


def public_docstrings():
    """Yield (name, docstring) of what `import ppctl` gives, and of the methods of its classes."""
    for name in ppctl.__all__:
        value = getattr(ppctl, name)
        yield name, inspect.getdoc(value) or ""
        if inspect.isclass(value):
            for method, member in vars(value).items():
                if not method.startswith("_") and (inspect.isfunction(member)):
                    yield f"{name}.{method}", inspect.getdoc(member) or ""


def found_in(place, text):
    plain = without_code(text)
    return [
        (rule, f"{place}: ...{' '.join(plain[max(0, m.start() - 50) : m.end() + 40].split())}...")
        for rule, (pattern, _) in RULES.items()
        for m in re.finditer(pattern, plain, re.MULTILINE)
    ]


def test_hard_patterns_are_rare():
    found = [each for place, text in texts() for each in found_in(place, text)]
    counts = Counter(rule for rule, _ in found)
    above = [rule for rule, (_, most) in RULES.items() if counts[rule] > most]
    assert not above, "\n".join(f"{rule}\n  {where}" for rule, where in found if rule in above)


def test_hard_patterns_are_rare_in_tests():
    found = [each for place, text in texts_of_tests() for each in found_in(place, text)]
    listed = "\n".join(f"{rule}: {where}" for rule, where in found)
    assert len(found) <= MOST_IN_TESTS, listed


def test_the_first_texts_that_users_read_have_no_hard_pattern():
    readme = ("README.md", (ROOT / "README.md").read_text())
    found = [
        each for place, text in (readme, *public_docstrings()) for each in found_in(place, text)
    ]
    assert not found, "\n".join(f"{rule}: {where}" for rule, where in found)


def test_each_pattern_finds_its_example():
    examples = (
        "Return what is kept",
        "this is none of ours",
        "the tick in which it runs",
        "a loop of its own",
        "as the option says",
        "this rank alone",
        "the rank behind it",
        "so many layers",
        "the gradients of both ends",
        "# of a microbatch",
    )
    for example, rule in zip(examples, RULES, strict=True):
        assert [name for name, _ in found_in("here", example)] == [rule]
