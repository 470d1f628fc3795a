"""Run files that others wrote: texts, pipes, links, sizes and nesting that no run writes."""

import json
import os
import re
import subprocess
import sys
from dataclasses import asdict

import pytest
import yaml

from ppctl import cli, config
from ppctl.config.groups.schedule_settings import Hanayo
from ppctl.errors import ConfigError
from ppctl.reports import foreign_files as foreign, measured_timeline_file as timeline_io, run_files
from ppctl.reports.foreign_files import check_inside, lines_of, printable, read_settings
from ppctl.reports.terminal_output import replace_file
from ppctl.user_files import open_file

HOSTILE = "bad \\ud800 \\u001b[31mred\\u001b]0;title\\u0007 \\u009b2J"


def make_run(path):
    path.mkdir(parents=True)
    (path / "config.yaml").write_text("model:\n  name: mlp\nrun:\n  num_steps: 5\n")
    (path / "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0}) + "\n")
    return path


def test_texts_of_a_run_are_made_printable(tmp_path, capsys):
    run = make_run(tmp_path / "runs/a")
    make_run(tmp_path / "runs/\x1b[2J")
    (run / "status.jsonl").write_text(
        f'{{"status": "started", "step": 0, "host": "{HOSTILE}", "pid": 1, "at": 1.0}}\n'
        f'{{"status": "failed", "reason": "{HOSTILE}", "at": 2.0}}\n'
    )
    (run / "memory.json").write_text(f'{{"ranks": [{{"{HOSTILE}": 1}}]}}')
    page = tmp_path / "page.html"
    for words in (["runs", str(tmp_path / "runs")], ["runs", "show", "a", str(tmp_path / "runs")]):
        assert cli.main(words) == 0
    assert cli.main(["report", str(run), "--out", str(page)]) == 0
    shown = capsys.readouterr().out + page.read_text()
    assert "\\x1b[31mred" in shown
    assert "\\x1b[2J" in shown
    assert not {"\x1b", "\x07", "\x9b"} & set(shown)


@pytest.mark.parametrize(
    "file", ["metrics.jsonl", "eval.jsonl", "status.jsonl", "config.yaml", "memory.json"]
)
def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path, file, capsys):
    run = make_run(tmp_path / "runs/a")
    (run / file).unlink(missing_ok=True)
    os.mkfifo(run / file)
    assert cli.main(["runs", str(tmp_path / "runs")]) == 0
    assert cli.main(["report", str(run), "--out", str(tmp_path / "page.html")]) in (0, 2)
    with pytest.raises(OSError, match="Not a plain file"):
        open_file(run / file)


def test_only_a_directory_with_the_name_of_a_step_is_a_checkpoint(tmp_path):
    (tmp_path / "7").write_text("")
    for name in ("8", "09", "\u0663", "9" * 200):
        (tmp_path / name).mkdir()
    assert run_files.checkpoint_steps(tmp_path) == (8,)


def test_letters_of_all_languages_stay():
    assert printable("Größe 模型 \u00a0\U0001f680\n\t") == "Größe 模型 \u00a0\U0001f680\n\t"


def test_output_to_a_full_disk_fails_in_one_line():
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "ppctl.cli", "schedule", "list"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert ended.returncode == 1
    assert ended.stderr == "ppctl: the output cannot be written: No space left on device.\n"


# --- sizes and nesting --------------------------------------------------------------------------

TOO_DEEP = "maximum nesting depth"  # libyaml's message, from PyYAML 6.0.4 on
LAUGHS = "".join(
    f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n"
    for a, b in zip("abcdefghi", "bcdefghij", strict=True)
)
CONFIGS = {
    "aliases": ("run:\n  num_steps: 5\na: &a [x]\n" + LAUGHS, "an alias, which ppctl never writes"),
    "itself": ("run: &a\n  num_steps: 5\n  x: *a\n", "an alias, which ppctl never writes"),
    "nested": ("run:\n  num_steps: 5\nx: " + "[" * 1000, f"while parsing a flow node|{TOO_DEEP}"),
    "deep": ("run:\n  num_steps: 5\nx:\n" + "- " * 4000 + "1", f"recursion|{TOO_DEEP}"),
    "deeper": ("run:\n  num_steps: 5\nx:\n" + "- " * 500_000 + "1", "recursion"),
    "digits": ("run:\n  num_steps: 5\n  x: " + "9" * 5000, "4300 digits"),
    "date": ("run:\n  num_steps: 5\n  x: 2026-99-99", "month must be in 1..12"),
    "code": (
        "run:\n  num_steps: 5\nx: !!python/object/apply:os.mkdir [made]\n",
        "could not determine a constructor",
    ),
}


def shown(tmp_path, run, capsys):
    """What `runs`, `runs show` and `report` say of a run; none of them fails."""
    page = tmp_path / "page.html"
    for words in (
        ["runs", str(run)],
        ["runs", "show", str(run)],
        ["report", str(run), "--out", str(page)],
    ):
        assert cli.main(words) == 0, words
    return capsys.readouterr().out + page.read_text()


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_config_that_is_made_to_harm_its_reader_cannot_be_read(
    tmp_path, monkeypatch, capsys, kind
):
    monkeypatch.chdir(tmp_path)
    run = make_run(tmp_path / "runs/a")
    text, reason = CONFIGS[kind]
    (run / "config.yaml").write_text(text)
    said = shown(tmp_path, run, capsys)
    assert "config.yaml cannot be read: " in said
    assert re.search(reason, said)
    assert not (tmp_path / "made").exists()
    with pytest.raises(ValueError, match=reason):
        read_settings(run / "config.yaml")


@pytest.mark.parametrize("file", ["metrics.jsonl", "eval.jsonl", "status.jsonl", "memory.json"])
@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"step": ' + "9" * 5000 + ', "ranks": []}'], ids=["nested", "digits"]
)
def test_records_of_extreme_depth_or_length_are_dropped(tmp_path, capsys, file, text):
    run = make_run(tmp_path / "runs/a")
    (run / file).write_text(text + "\n")
    assert "a" in shown(tmp_path, run, capsys)


def test_files_far_larger_than_a_run_writes_are_not_read(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(foreign, "MOST_LINE_BYTES", 1000)
    run = make_run(tmp_path / "runs/a")
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b"{" + b" " * 5000 + b"}\n" + b'{"step": 2, "loss": 3.0}\n')
    for name in ("config.yaml", "memory.json", "timeline/timeline.csv"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).touch()
        os.truncate(run / name, 2**36)  # takes no disk
    said = shown(tmp_path, run, capsys)
    assert "1 line of metrics.jsonl is no record" in said
    assert "config.yaml cannot be read: More than 1 MiB" in said
    assert "memory.json cannot be read" in said
    with open_file(run / "metrics.jsonl") as file:
        assert [len(line) for line in lines_of(file)] == [25, 1, 25]


def run_of(path, **parts):
    """A run with these settings."""
    run, words = (
        make_run(path),
        config.Config(model=config.MLP(), mesh=config.Mesh(1, 2, 1), **parts),
    )
    (run / "config.yaml").write_text(yaml.safe_dump(asdict(words), sort_keys=False))
    return run


def test_a_schedule_that_a_config_only_names_is_not_read_from_a_pipe(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    run = run_of(
        tmp_path / "runs/a", schedule=config.Csv(num_microbatches=4, path=str(tmp_path / "pipe"))
    )
    assert "pipe cannot be read: Not a plain file" in shown(tmp_path, run, capsys)


@pytest.mark.parametrize(
    "schedule",
    [
        config.Interleaved(num_chunks=10**9),
        Hanayo(num_waves=10**9),
        config.Chunked(num_chunks=10**9),
    ],
    ids=lambda schedule: schedule.name,
)
def test_a_schedule_of_a_billion_stages_is_not_drawn(tmp_path, capsys, schedule):
    said = shown(tmp_path, run_of(tmp_path / "runs/a", schedule=schedule), capsys)
    assert re.search("is out of reach|tasks are too many for a chart", said)


@pytest.mark.parametrize(
    "make", [os.mkfifo, lambda path: path.write_text("rank,task\n" + "9" * 200_000 + ",0F0\n")]
)
def test_an_invalid_timeline_has_no_bubble(tmp_path, make):
    make(tmp_path / "timeline.csv")
    assert timeline_io.measured_bubble(tmp_path / "timeline.csv") is None
    with pytest.raises((OSError, ValueError)):
        timeline_io.read_timeline(tmp_path / "timeline.csv", "a")


# --- links --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [*run_files.WRITTEN, "checkpoints/7", "timeline/timeline.csv", "profile/plugins/x"]
)
def test_links_out_of_a_run_directory_are_refused(tmp_path, name):
    run, outside = tmp_path / "run", tmp_path / "outside"
    (run / name).parent.mkdir(parents=True)
    (run / name).symlink_to(outside)  # a missing target would be made
    with pytest.raises(
        ConfigError, match=f"{name} is a link to {outside}, outside of it. Move it away"
    ):
        check_inside(run, run_files.WRITTEN, "run.dir")
    (run / name).unlink()
    os.mkfifo(run / name)
    with pytest.raises(ConfigError, match=f"{name} is neither file nor directory"):
        check_inside(run, run_files.WRITTEN, "run.dir")


def test_a_run_directory_may_be_a_link_and_have_links_to_its_files(tmp_path):
    run = make_run(tmp_path / "disk/run")
    (run / "checkpoints/5/state").mkdir(parents=True)
    (run / "checkpoints/6").symlink_to("5")
    (run / "checkpoints/5/state/deep").symlink_to("/")  # nobody writes there
    (run / "mine").symlink_to("/")  # nor this
    (tmp_path / "run").symlink_to(run)
    check_inside(tmp_path / "run", run_files.WRITTEN, "run.dir")
    check_inside(tmp_path / "nowhere", ["config.yaml"], "run.dir")


def test_a_file_is_not_replaced_through_a_planted_link(tmp_path):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / ".page.html.part").symlink_to("precious")
    replace_file(tmp_path / "page.html", "page")
    assert (tmp_path / "precious").read_text() == "precious"
    assert (tmp_path / "page.html").read_text() == "page"


def test_a_report_is_not_written_through_a_link_of_the_run(tmp_path, capsys):
    run = make_run(tmp_path / "runs/a")
    assert cli.main(["report", str(run), "--out", str(tmp_path / "other.html")]) == 0
    before = (tmp_path / "other.html").read_text()
    (run / "report.html").symlink_to(tmp_path / "other.html")
    assert cli.main(["report", str(run)]) == 2
    assert (
        f"report.html is a link to {tmp_path / 'other.html'}. Name a file: --out"
        in capsys.readouterr().err
    )
    assert (tmp_path / "other.html").read_text() == before


# --- short ways of reading ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        yaml.safe_dump(asdict(config.Config()), sort_keys=False),
        "run:\n  num_steps: 5\n\nmodel:\n  name: mlp\n",
        "# a note\nrun:\n  num_steps: 5\n",
        "---\nrun: {num_steps: 5,\nname: x}\n",
        'name: "a\nb: c"\nrun: 1\n',
        "run: 1\nrun: 2\n",
        "- 1\n- 2\n",
        "text: |\n  a\n\n  b\nlast: >\n  c\n",
        "",
    ],
)
def test_settings_read_group_by_group_equal_the_whole_files(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    for _ in range(2):
        assert read_settings(tmp_path / "config.yaml") == yaml.safe_load(text)


@pytest.mark.parametrize(
    "text",
    [
        b'{"step": 1, "loss": NaN, "name": "a b~"}\n',
        b'{"name": "\\u001b[31m"}',
        b'{"name": "\x7f"}',
        '{"name": "\x9b2J ä"}'.encode(),
        b'{"a": {"b": ["\\u0007"]}}',
        '{"name": "\u200b"}'.encode("utf-16-le"),
    ],
)
def test_a_record_without_odd_letters_reads_like_others(text):
    assert repr(foreign.from_json(text)) == repr(foreign.cleaned(json.loads(text)))


# --- without rights -------------------------------------------------------------------------------


@pytest.fixture
def closed_runs(tmp_path, monkeypatch):
    """Two runs, for a user without rights to the directory of one."""
    monkeypatch.chdir(tmp_path)
    tmp_path.chmod(0o777)
    for name in ("closed", "open"):
        make_run(tmp_path / "runs" / name)
    for words in (["runs"], ["runs", "show", "open"], ["report", "open", "--out", "a.html"]):
        assert cli.main(words) == 0  # imports all that they need
    assert cli.main(["runs", "rm", "elsewhere", "--yes"]) == 2
    (tmp_path / "runs/closed").chmod(0)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    yield
    if is_root:
        os.seteuid(0)
    (tmp_path / "runs/closed").chmod(0o755)


def test_a_directory_without_permissions_is_named_in_one_line(closed_runs, capsys):
    line = "runs/closed cannot be read: Permission denied."
    capsys.readouterr()
    assert cli.main(["runs"]) == 0
    assert line in capsys.readouterr().out.splitlines()
    assert cli.main(["runs", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert ([run["name"] for run in document["runs"]], document["problems"]) == (["open"], [line])
    for words in (["runs", "show"], ["report"], ["runs", "rm", "--yes"]):
        for name in ("closed", "runs/closed"):
            assert cli.main([*words, name]) == 2
            out, err = capsys.readouterr()
            assert out == ""
            assert err.startswith(f"ppctl: {line}")
            assert err.count("\n") == 1


def test_the_page_names_an_unreadable_timeline(tmp_path, capsys):
    run = make_run(tmp_path / "runs/a")
    (run / "timeline/timeline.csv").mkdir(parents=True)
    assert "timeline.csv cannot be drawn: Is a directory." in shown(tmp_path, run, capsys)


def test_a_file_without_rights_that_no_command_expects_is_no_bug(capsys, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied", "some/file")

    monkeypatch.setattr("ppctl.reports.runs_table.names_of", refuse)
    assert cli.main(["runs", "--json"]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("ppctl: some/file: Permission denied. Change its permissions")
    assert json.loads(out)["error"]["kind"] == "config"


# --- invalid numbers ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "shown", "loss"),
    [
        ('{"step": 2, "loss": NaN}', "not finite", None),
        ('{"step": 2, "loss": Infinity}', "not finite", None),
        ('{"step": 2, "loss": null}', "not finite", None),
        ('{"step": 2, "loss": "3.5"}', "has no step or no loss", None),
        ('{"step": "2", "loss": 3.5}', "has no step or no loss", 3.5),
        ('{"step": 2}', "has no step or no loss", None),
    ],
)
def test_a_loss_that_is_not_a_number_is_named(tmp_path, capsys, line, shown, loss):
    run = make_run(tmp_path / "runs/a")
    (run / "metrics.jsonl").write_text(line + "\n")
    assert cli.main(["runs", str(tmp_path / "runs")]) == 0
    assert shown in capsys.readouterr().out
    assert run_files.run_summary("a", run).loss == loss


def test_a_status_of_another_program_is_named(tmp_path):
    run = make_run(tmp_path / "runs/a")
    (run / "status.jsonl").write_text('{"status": "ok", "pid": "x"}\n')
    found = run_files.run_summary("a", run)
    assert found.status == "no end recorded"
    assert found.problems == ("the last line of status.jsonl has no status of a run",)


def test_a_finished_run_without_records_has_the_steps_of_its_end(tmp_path):
    run = make_run(tmp_path / "runs/a")
    (run / "metrics.jsonl").write_text("")
    (run / "status.jsonl").write_text('{"status": "finished", "step": 5, "at": 1.0}\n')
    assert run_files.run_summary("a", run).steps_text == "5 of 5"
