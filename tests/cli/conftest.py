"""Commands that only note that they were reached."""

from __future__ import annotations

import sys
import types

import pytest

from ppctl.cli.command_options import COMPOSED
from ppctl.config import Config


class StandIn(types.ModuleType):
    pass


@pytest.fixture
def in_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def served(monkeypatch):
    """The (command, config, as_json) of each command that was reached, of launched ones their
    settings; the commands themselves do nothing.
    """
    calls: list[tuple[str, Config, bool]] = []

    def stand_in(command):
        def serve(config, words=(), *, as_json):
            calls.append((command, config, as_json))
            return 0

        return serve

    for command in COMPOSED:
        module = StandIn(f"ppctl.cli.commands.{command}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        setattr(module, command, stand_in(command))
    monkeypatch.setattr(
        "ppctl.cli.entry.launch",
        lambda settings, *_, as_json: stand_in("launch")(settings, as_json=as_json),
    )
    return calls
