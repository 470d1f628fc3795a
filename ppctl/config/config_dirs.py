"""The directories of `conf/` and `recipes/`, and of the user's cache."""

import os
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
_IN_WHEEL = (_PACKAGE / "conf").is_dir()  # a wheel carries conf/ and recipes/ inside
ROOT = _PACKAGE if _IN_WHEEL else _PACKAGE.parent


def user_cache_dir() -> Path:
    """Return the directory of ppctl's caches: $XDG_CACHE_HOME/ppctl, by default ~/.cache/ppctl."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ppctl"
