"""Which cases of a test `make test` runs, and which `make test-full` alone."""

import pytest


def few(cases, number):
    """The first `number` cases, and the others marked `full`: put those that differ most first."""
    return [case if i < number else full(case) for i, case in enumerate(cases)]


def every_other(cases):
    """Every other case, and the others marked `full`."""
    return one_in(2, cases)


def one_in(number, cases):
    """The last of every `number` cases, and the others marked `full`."""
    return [case if i % number == number - 1 else full(case) for i, case in enumerate(cases)]


def full(case):
    """A case of one value, or a tuple of values, or a pytest.param, that `make test-full` alone runs."""
    if hasattr(case, "marks"):
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.full])
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.full)
