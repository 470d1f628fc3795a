"""Where `conf/` and `recipes/` stand."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parents[1]
ROOT = _PACKAGE if (_PACKAGE / "conf").is_dir() else _PACKAGE.parent  # a wheel carries conf/ and recipes/ inside
