"""The cases that only `make test-full` runs, each marked by its name or value."""

import pytest


def full(case):
    """A case of one value, or a tuple of values, or a pytest.param, that only `make test-full`
    runs.
    """
    if hasattr(case, "marks"):
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.full])
    return pytest.param(*_values(case), marks=pytest.mark.full)


def full_except(cases, *kept):
    """The cases, each marked `full` but those in `kept`.

    Of a mapping `kept` are names, and the names are the ids; otherwise the values themselves.
    """
    cases = list(cases.items()) if isinstance(cases, dict) else [(case, case) for case in cases]
    absent = [each for each in kept if not any(each == name for name, _ in cases)]
    assert not absent, f"no such cases: {absent}"
    ids = [name if isinstance(name, str) else None for name, _ in cases]
    return [
        pytest.param(
            *_values(case),
            id=id_,
            marks=() if any(name == each for each in kept) else pytest.mark.full,
        )
        for id_, (name, case) in zip(ids, cases, strict=True)
    ]


def _values(case):
    return case if isinstance(case, tuple) else (case,)
