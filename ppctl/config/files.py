"""Where `conf/` and `recipes/` stand, and what ppctl keeps for its user."""

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
ROOT = _PACKAGE if (_PACKAGE / "conf").is_dir() else _PACKAGE.parent  # a wheel carries conf/ and recipes/ inside


def user_cache_dir() -> Path:
    """Return the directory in which ppctl keeps what it can make again: ~/.cache/ppctl, or in XDG_CACHE_HOME."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ppctl"
