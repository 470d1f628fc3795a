"""Schedules equal those of the published figures, cell by cell."""

import pytest
from support import golden


@pytest.mark.parametrize("name", golden.CASES)
def test_schedule_equals_its_golden_file(name):
    assert golden.render(name) == (golden.FOLDER / name).read_text()


def test_every_golden_file_has_a_case():
    assert {path.name for path in golden.FOLDER.glob("*.csv")} == set(golden.CASES)
