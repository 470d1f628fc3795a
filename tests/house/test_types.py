"""The type checker knows the settings of each part: a misspelt one is an error before anything
runs.
"""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import get_args

import pytest

import ppctl
from ppctl.config.groups.optim_settings import AnyOptim

ROOT = Path(ppctl.__file__).parents[1]
PYRIGHT = Path(sys.executable).parent / "pyright"
HEAD = "from ppctl.config import Config, Mpmd\n\n\ndef read(config: Config) -> None:\n"
CLASSES_WITHOUT = {  # an expression: the classes that lack its last name
    "config.executor.remat": [],
    "isinstance(config.executor, Mpmd) and config.executor.post_validation": [],
    "config.executor.remta": ["Mpmd", "Reference", "Spmd"],
    "config.executor.post_validation": ["Reference", "Spmd"],
    "config.optim.lrr": sorted(kind.__name__ for kind in get_args(AnyOptim)),
    "config.model.d_model": ["CustomModel"],
    "config.hardware.peak_flops": ["AutoHardware"],
}


def test_files_of_the_strict_list_exist():
    """pyright ignores a path that leads nowhere."""
    strict = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]["strict"]
    assert [path for path in strict if not (ROOT / path).exists()] == []


@pytest.mark.full  # starts the type checker
def test_a_setting_that_a_part_may_lack_fails_the_type_check(tmp_path):
    (tmp_path / "request.py").write_text(
        HEAD + "".join(f"    print({text})\n" for text in CLASSES_WITHOUT)
    )
    options = {"extraPaths": [str(Path(ppctl.__file__).parents[1])], "pythonVersion": "3.11"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(options))
    command = [PYRIGHT, "--outputjson", "--pythonpath", sys.executable, "--project", tmp_path]
    report = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    found = {text: [] for text in CLASSES_WITHOUT}
    for fault in report["generalDiagnostics"]:
        text = list(CLASSES_WITHOUT)[fault["range"]["start"]["line"] - HEAD.count("\n")]
        attribute, name = fault["message"].partition("\n")[0].split('"')[1::2]
        assert attribute == text.rpartition(".")[2]
        found[text].append(name)
    assert {text: sorted(names) for text, names in found.items()} == CLASSES_WITHOUT
