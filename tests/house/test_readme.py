"""What README and docs/ show is so: commands compose, Python runs, links lead somewhere, charts are
as drawn.
"""

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support import tutorial
from support.selection import full

import ppctl
from ppctl.cli import main
from ppctl.schedule.costs import Costs
from ppctl.schedule.families.registry import FAMILIES, build
from ppctl.schedule.simulator import simulate
from ppctl.schedule.tick_lowering import ticks

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": ROOT / "README.md"} | {
    f"docs/{path.name}": path for path in sorted(ROOT.glob("docs/*.md"))
}
TEXTS = {name: path.read_text() for name, path in PAGES.items()}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
OTHER_COMMANDS = {  # they compose no whole config
    *(
        "schedule",
        "tokenize",
        "import",
        "export",
        "generate",
        "evaluate",
        "runs",
        "stop",
        "report",
        "examples",
        "init",
    )
}
SLOW = (
    "docs/api.md",
    "docs/experts.md",
    "docs/flax.md",
    "docs/models.md",
    "docs/quickstart.md",
)  # README.md and other tests run the same code
NEEDS_A_RUN = ("docs/runs.md",)  # its Python reads what `ppctl train recipes=tiny` left
TUTORIAL = "docs/tutorial.md"  # a test below runs it and compares its outputs
PICTURES = {  # docs/images/NAME.svg: settings of `ppctl schedule show`
    "1f1b": "schedule=1f1b",
    "zb_v": "schedule=zb_v",
    "interleaved": "schedule=interleaved",
    "1f1b_vocab": "schedule=1f1b schedule.vocab=parallel",
}


def blocks(text, *languages):
    return [code for language, code in FENCE.findall(text) if language in languages]


def transcripts(text):
    """Yield (command, output) of every console block."""
    for block in blocks(text, "console"):
        for shown in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, printed = shown.replace("\\\n", " ").partition("\n")
            yield command, printed


def commands(text):
    """Every line of shell, and every command inside a sentence or table, that starts with ppctl."""
    lines = [
        line for block in blocks(text, "sh") for line in block.replace("\\\n", " ").splitlines()
    ]
    lines += [command for command, _ in transcripts(text)]
    lines += re.findall(r"`(ppctl [^`]+)`", FENCE.sub("", text))
    words = [
        shlex.split(command, comments=True) for line in lines for command in line.split(" && ")
    ]
    return sorted(
        {shlex.join(line) for line in words if line[:1] == ["ppctl"] and "..." not in line}
    )


def fails(command):
    """Whether a page shows the command with the message that it ends with."""
    return any(
        shown == command and printed.startswith("ppctl: ") for shown, printed in ALL_TRANSCRIPTS
    )


ALL_TRANSCRIPTS = list(
    dict.fromkeys(shown for text in TEXTS.values() for shown in transcripts(text))
)


def composable():
    """Every command that composes a whole config, each once, whatever the page."""
    for command in sorted({command for text in TEXTS.values() for command in commands(text)}):
        _, name, *words = shlex.split(command)
        of_a_project = not {"recipes=mine", "recipes=imported"}.isdisjoint(
            words
        )  # written by `ppctl init` and `import`
        if (
            name not in OTHER_COMMANDS
            and words
            and "--help" not in words
            and not of_a_project
            and not fails(command)
        ):
            yield command


@pytest.mark.parametrize("command", [*composable()])
def test_commands_compose(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = [
        word for word in shlex.split(command)[1:] if word not in ("-m", "--cfg", "job", "--json")
    ]
    words = [word for word in words if not word.startswith("hydra")]
    words = [
        re.sub(r"=(?:tag\(log,interval\()?([\w-]+),.*", r"=\1", word) for word in words
    ]  # a job of a sweep
    assert main([*words, "--cfg", "job"]) == 0
    assert "num_microbatches" in capsys.readouterr().out


def schedule_commands():
    found = {
        command
        for text in TEXTS.values()
        for command in commands(text)
        if command.startswith("ppctl schedule ")
    }
    slow = ("schedule=auto", "curves", ".csv")  # each has separate tests
    return sorted(command for command in found if not any(word in command for word in slow))


@pytest.mark.parametrize("command", schedule_commands())
def test_schedule_commands_run(command, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(command)[1:]) == 0, capsys.readouterr().err


def test_messages_are_as_printed(capsys):
    shown = [
        (command, printed) for command, printed in ALL_TRANSCRIPTS if printed.startswith("ppctl: ")
    ]
    assert shown
    for command, printed in shown:
        assert main(shlex.split(command)[1:]) == 2
        message = capsys.readouterr().err.strip()
        assert re.fullmatch(re.escape(printed.strip()).replace(r"\.\.\.", ".*"), message), message


def test_charts_are_as_drawn(capsys):
    shown = [
        (command, printed)
        for command, printed in ALL_TRANSCRIPTS
        if command.startswith("ppctl schedule show ")
    ]
    assert shown
    for command, expected in shown:
        assert main(shlex.split(command)[1:]) == 0
        drawn = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
        assert [line for line in expected.splitlines() if line] == [line for line in drawn if line][
            :-1
        ]  # no legend


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_are_as_drawn(name, tmp_path):
    """Their titles, cells, bubbles and peaks; the version of matplotlib sets the rest."""
    out, settings = tmp_path / "drawn.svg", PICTURES[name].split()
    assert main(["schedule", "show", *settings, "mesh=1x4", "--out", str(out)]) == 0
    texts = [
        sorted(re.findall(r"<text[^>]*>([^<]*)", path.read_text()))
        for path in (ROOT / f"docs/images/{name}.svg", out)
    ]
    assert texts[0] == texts[1]


SHOWN = [page for page, text in TEXTS.items() if blocks(text, "python")]
QUICK = tuple(
    page for page in SHOWN if page not in ("README.md", TUTORIAL, *NEEDS_A_RUN, *SLOW)
)  # README.md: tests/promises/


@pytest.mark.parametrize(
    "pages", [QUICK, *(full(((page,),)) for page in (*NEEDS_A_RUN, *SLOW))], ids=" ".join
)
def test_python_runs(pages, tmp_path):
    """Quick pages run in one process, each with separate names."""
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "0", "PYTHONPATH": paths}
    del environment["JAX_NUM_CPU_DEVICES"]  # a page's own mesh simulates its devices
    if pages == NEEDS_A_RUN:
        quick = ["run.num_steps=5", "run.eval_every=null", "run.trackers=[]"]
        train = [sys.executable, "-m", "ppctl.cli", "train", "recipes=tiny", *quick]
        subprocess.run(train, cwd=tmp_path, env=environment, check=True, capture_output=True)
    codes = ["\n".join(blocks(TEXTS[page], "python")) for page in pages]
    code = f"for code in {codes}:\n    exec(code, {{'__name__': '__main__'}})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.full
def test_the_tutorial_shows_the_printed_outputs():
    """`make tutorial` writes new outputs."""
    page = TEXTS[TUTORIAL]
    for cell, output in zip(tutorial.cells(page), tutorial.run(page), strict=True):
        assert tutorial.same_outputs(cell.printed, output.printed), output.printed


def test_the_notebook_is_made_from_the_tutorial():
    """Its cells and its printed outputs are those of the page."""
    page, document = TEXTS[TUTORIAL], tutorial.NOTEBOOK.read_text()
    outputs = tutorial.stored(document)
    assert document == tutorial.notebook(page, outputs), "run `make tutorial`"
    assert page == tutorial.with_outputs(page, outputs), "run `make tutorial`"


def test_the_first_example_is_short():
    (example,) = blocks(TEXTS["README.md"], "python")
    assert len([line for line in example.splitlines() if line]) <= 12


def test_the_example_of_the_python_api_is_short():
    first, *_ = blocks(TEXTS["docs/api.md"], "python")
    assert len([line for line in first.splitlines() if line]) <= 15


def test_the_readme_is_read_in_two_minutes():
    lines = TEXTS["README.md"].splitlines()
    assert len(lines) <= 150
    first_screen = "\n".join(lines[:30])
    assert all(
        word in first_screen for word in ("docs/images/", "make train", "eval_loss", "verify")
    )


def test_links_lead_somewhere():
    dead = []
    for page, text in TEXTS.items():
        for link in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text)):
            path, _, anchor = link.partition("#")
            if "://" in link:
                continue
            target = (PAGES[page].parent / path) if path else PAGES[page]
            headings = (
                re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
                if target.suffix == ".md"
                else []
            )
            slugs = {
                re.sub(r"[^\w\s-]", "", heading).strip().lower().replace(" ", "-")
                for heading in headings
            }
            if not target.exists() or (anchor and anchor not in slugs):
                dead.append(f"{page}: {link}")
    assert not dead, "\n".join(dead)


def test_every_page_is_in_the_navigation():
    navigation = re.findall(
        r"(\S+\.md)$", (ROOT / "docs/site/mkdocs.yml").read_text(), re.MULTILINE
    )
    assert sorted(f"docs/{page}" for page in navigation) == sorted(PAGES.keys() - {"README.md"})


def test_architecture_names_every_room_and_folder():
    named = set(re.findall(r"`(ppctl/[\w/.]+)`", TEXTS["docs/architecture.md"]))
    folders = {path.parent for path in (ROOT / "ppctl").rglob("*.py")} - {ROOT / "ppctl"}
    there = {f"{folder.relative_to(ROOT)}/" for folder in folders} | {
        "ppctl/errors.py",
        "ppctl/user_files.py",
        "ppctl/__init__.py",
    }
    assert named == there


def test_files_named_in_backticks_exist():
    rooms = "|".join(path.name for path in (ROOT / "ppctl").iterdir() if path.is_dir())
    named = rf"`((?:docs|conf|recipes|tests|ppctl|{rooms})/[\w/.]+)`"
    missing = []
    for page, text in TEXTS.items():
        for name in re.findall(named, text):
            if (
                name == "recipes/tuned.yaml"
                or (ROOT / name).exists()
                or (ROOT / "ppctl" / name).exists()
            ):
                continue
            missing.append(f"{page}: {name}")
    assert not missing, "\n".join(missing)


def test_the_api_page_names_the_whole_api():
    named = set(re.findall(r"`ppctl\.(\w+)`", TEXTS["docs/api.md"]))
    described = re.findall(r"^::: ppctl\.(\w+)$", TEXTS["docs/api.md"], re.MULTILINE)
    assert named == set(described) == set(ppctl.__all__)


def test_every_family_stands_in_the_schedule_table():
    assert set(re.findall(r"^\| `(\w+)`[^|]*\| ", TEXTS["docs/schedules.md"], re.MULTILINE)) >= set(
        FAMILIES
    )


def test_the_schedule_table_has_the_cost_of_lockstep():
    costs, found = (
        Costs(),
        dict(re.findall(r"^\| `(\w+)`.* \| ([^|]+) \|$", TEXTS["docs/schedules.md"], re.MULTILINE)),
    )
    for family in FAMILIES:
        schedule = build(family, 8, 32)
        stretch = ticks(schedule, costs).makespan_s(costs) / simulate(schedule, costs).makespan_s
        assert found[family] == f"{stretch:.2f}", family


def test_each_promise_quotes_the_readme():
    """Each test of tests/promises/ has a sentence of README.md as its docstring."""
    plain = " ".join(TEXTS["README.md"].split())
    quotes = {
        f"{file.name}: {node.name}": " ".join((ast.get_docstring(node) or "no docstring").split())
        for file in sorted(ROOT.glob("tests/promises/test_*.py"))
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    assert len(quotes) >= 20
    assert not {test: quote for test, quote in quotes.items() if quote not in plain}


def test_make_targets_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {target for text in TEXTS.values() for target in re.findall(r"`make ([\w-]+)`", text)}
    assert named - {"help"} <= targets
