"""`ppctl runs prune`: remove old checkpoints of a run that no process writes to.

Checkpoints that the run set aside (renamed to STEP.damaged or STEP.after-N) are removed too.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ppctl.cli.subcommands.runs_remove import alive, ask, checked_run
from ppctl.errors import ConfigError
from ppctl.reports.foreign_files import printable
from ppctl.reports.recorded_settings import setting_value
from ppctl.reports.run_files import ASIDE, REMOVED, checkpoint_steps, disk_bytes, run_summary
from ppctl.reports.run_status import HeldError, kept_still
from ppctl.reports.runs_table import few
from ppctl.reports.terminal_output import show_json, size_text


def prune(
    names: Sequence[str], top: Path, keep: int | None, *, is_sure: bool, as_json: bool
) -> int:
    """Remove a run's checkpoints except the newest `keep` and the permanent ones; return 0.

    names: a list with only the run's name or path. top: directory of runs. is_sure: remove without
    asking. ConfigError for other numbers of names, or if `keep` is None.
    """
    if len(names) != 1 or keep is None:
        raise ConfigError(
            "`ppctl runs prune` needs one run and the number of checkpoints to keep: "
            "ppctl runs prune NAME --keep 1."
        )
    if keep < 1:
        raise ConfigError(f"--keep {keep} leaves no checkpoint. Use 1 or more, or `ppctl runs rm`.")
    # 1. the checkpoints to remove
    run = checked_run(names[0], top)
    folder = run.path / "checkpoints"
    steps = checkpoint_steps(folder)
    often = setting_value(run_summary(run.name, run.path).config, "run.checkpoint.keep_every")
    permanent = {step for step in steps if isinstance(often, int) and step % often == 0}
    kept = {*steps[-keep:], *permanent}
    gone = [str(step) for step in steps if step not in kept]
    gone += sorted(name for name in _listed(folder) if ASIDE.fullmatch(name))
    stays = ", ".join(map(str, sorted(kept))) or "none"
    if not gone:
        line = f"{printable(str(run.path))} has nothing to prune: checkpoints of step {stays}."
        print(line, file=sys.stderr if as_json else sys.stdout)
        if as_json:
            show_json({"removed": [], "kept": sorted(kept), "disk_bytes": 0})
        return 0
    # 2. the confirmation, and the removal
    size = sum(disk_bytes(folder / name) or (folder / name).lstat().st_size for name in gone)
    line = f"{folder}: {few(gone)}, {size_text(size)}; kept: {stays}"
    count = f"{len(gone)} checkpoint{'s' * (len(gone) > 1)}"
    ask([printable(line)], f"Remove {count} for good?", "prune", is_sure=is_sure)
    try:
        with kept_still(run.path):
            for name in gone:
                _remove(folder / name)
    except HeldError as error:
        raise alive(run.name, error.pid) from None
    except OSError as error:
        what = f"{error.filename} cannot be removed: {error.strerror}"
        raise ConfigError(f"{what}. Make it writable, or leave it.") from error
    print(f"ppctl: removed {count} in {printable(line)}", file=sys.stderr)
    if as_json:
        show_json({"removed": gone, "kept": sorted(kept), "disk_bytes": size})
    return 0


def _listed(folder: Path) -> list[str]:
    return os.listdir(folder) if folder.is_dir() else []


def _remove(path: Path) -> None:
    """Remove a file or directory. Renaming a directory first hides a half-removed checkpoint."""
    if not path.is_dir() or path.is_symlink():
        path.unlink()
        return
    remains = path.with_name(f"{REMOVED}{path.name}-{os.getpid()}")
    path.rename(remains)
    shutil.rmtree(remains)
