"""The pieces of `make bench-scale`, at tiny sizes: rows, their measurement, tables and picture."""

import json
import re
import sys
from dataclasses import asdict, replace
from types import SimpleNamespace

import jax
import pytest
from benchmarks.scaling.measure import Measured, add_result, measure, measured_apart, read_results
from benchmarks.scaling.rows import Row, compiled_rows, planned_rows, whole
from benchmarks.scaling.show import PAGE, growths, page_tables, picture

from ppctl.executors import described_devices

TINY = (
    "model=transformer",
    "model.num_layers=2",
    "model.d_model=32",
    "model.num_heads=8",
    "model.seq_len=16",
    "model.vocab_size=64",
    "data.vocab_size=64",
)
ROW = Row("ranks", "405B", "h100", 1, 1, 4, compiles=False, settings=TINY)
COSTS = Measured(1.0, 0.5, 2.0, 4.0, 9.0, 1, 3000, 6_000_000, 40_000, 2**29)


def test_names_distinguish_rows_and_layouts_have_their_devices():
    rows = [*planned_rows(), *compiled_rows()]
    assert len({row.name for row in rows}) == len(rows)
    assert {row.devices for row in rows} == {8 * 2**k for k in range(12)}
    for row in rows:
        sizes = [int(size) for size in re.findall(r"\d+", row.topology.partition(":")[2])]
        assert row.devices == sizes[0] * sizes[1] * (sizes[2] if len(sizes) > 2 else 1)


def test_the_largest_layout_divides_all_devices():
    row = whole("mixture", 16384, compiles=False)
    axes = dict(each[5:].split("=") for each in row.overrides if each.startswith("mesh."))
    assert axes == {"dp": "16", "pp": "16", "fsdp": "8", "ep": "8"}


def test_a_row_is_planned():
    found = measure(ROW)
    assert found.step_s is not None
    assert found.step_s > 0
    assert found.plan_s > 0
    assert found.host_bytes > 2**26
    assert found.compile_s is None


@pytest.mark.full
def test_a_row_is_compiled(monkeypatch):
    devices = SimpleNamespace(devices=jax.devices())  # eight simulated ones
    monkeypatch.setattr(described_devices, "has_plugin", lambda: True)
    monkeypatch.setattr(described_devices.topologies, "get_topology_desc", lambda **asked: devices)
    found = measure(replace(ROW, compiles=True))
    assert found.compile_s is not None
    assert found.num_instructions is not None
    assert found.lowered_bytes is not None
    assert found.compile_s > 0
    assert found.num_programs == 1
    assert found.num_instructions > 100
    assert found.lowered_bytes > found.table_bytes


def test_a_process_gives_results_or_its_error(monkeypatch, tmp_path):
    process = tmp_path / "python"
    monkeypatch.setattr(sys, "executable", str(process))
    for line, found in (
        (f"echo warning; echo '{json.dumps(asdict(COSTS))}'", COSTS),
        ("echo trace >&2; echo 'ConfigError: no' >&2; exit 1", "ConfigError: no"),
        ("exit 3", "exit code 3"),
    ):
        process.write_text(f"#!/bin/sh\n{line}\n")
        process.chmod(0o755)
        assert measured_apart(ROW) == found


def test_results_are_read_in_the_order_of_the_rows(tmp_path):
    file, rows = tmp_path / "results.jsonl", planned_rows()[:3]
    assert read_results(file, rows) == {}
    for row, start_s in ((rows[2], 3.0), (rows[0], 1.0)):
        add_result(file, row, replace(COSTS, start_s=start_s))
    found = read_results(file, rows)
    assert [*found] == [rows[0], rows[2]]
    assert [costs.start_s for costs in found.values()] == [1.0, 3.0]


@pytest.fixture
def results():
    rows = [*planned_rows(), *compiled_rows()]
    seconds = lambda row: 4.0 + row.devices / 512 + row.num_microbatches / 64
    return {row: replace(COSTS, compile_s=seconds(row) if row.compiles else None) for row in rows}


def test_growth_is_relative_to_32_devices_and_8_microbatches(results):
    found = growths(results)
    by_devices = {each.ratio for each in found if "devices" in each.span}
    by_number = {each.ratio for each in found if "microbatches" in each.span}
    assert by_devices == {6 / (5 + 1 / 16)}
    assert by_number == {(5 + 1 / 16) / (4 + 1 / 16 + 1 / 8)}
    assert {each.most for each in found} == {1.1, 1.3}


def test_tables_have_every_row_and_equal_results_give_the_same_picture(results):
    tables = page_tables(results)
    assert len(tables.splitlines()) > len(compiled_rows()) + 12
    drawn = picture(results)
    assert drawn == picture(results)
    for text in ("planned: mixture, h100, whole", "compiled: 405B, v5p, replicas", "devices"):
        assert text in drawn.decode()


def test_the_page_has_the_tables_of_all_rows(results):
    page = PAGE.read_text(encoding="utf-8")
    for line in page_tables(results).splitlines():
        if "---" in line or "compile time, times" in line or line.startswith("| devices"):
            assert line in page
