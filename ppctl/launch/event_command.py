"""The user's command of run.on_event, called with one event as JSON on its standard input."""

import json
import shlex
import subprocess
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ppctl.errors import one_line
from ppctl.reports.terminal_output import json_safe

CALL_S = 60.0  # seconds, after which a call is killed


def event_document(event: str, run_dir: Path, **facts: Any) -> dict[str, Any]:
    """Return the document of an event; numbers that are not finite are None."""
    time = datetime.now(UTC).isoformat(timespec="seconds")
    about = {"event": event, "time": time, "run_dir": str(run_dir.absolute())}
    return json_safe(about | facts)


def fault_of_call(command: str, document: dict[str, Any]) -> str | None:
    """Call the command, split as by a shell; return the reason of a failure, or None."""
    # files, not pipes: a call ends with the command, even if a child of it keeps stderr open
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as errors:
        given.write(json.dumps(document, allow_nan=False).encode() + b"\n")
        given.seek(0)
        how: dict[str, Any] = {"stdin": given, "stdout": subprocess.DEVNULL, "stderr": errors}
        try:
            # in a new session: a Ctrl-C must not reach the command
            done = subprocess.run(
                shlex.split(command), timeout=CALL_S, start_new_session=True, check=False, **how
            )
        except subprocess.TimeoutExpired:
            return f"not finished after {CALL_S:g} s, and killed"
        except OSError as error:
            return f"{error.strerror}: {error.filename}"
        if done.returncode == 0:
            return None
        errors.seek(0)
        last = (errors.read().decode(errors="replace").strip().splitlines() or [""])[-1]
        return f"code {done.returncode}" + (f", {one_line(last)}" if last else "")
