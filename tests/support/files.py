"""Files that tests write."""

from pathlib import Path


def write(path: Path, text: str) -> Path:
    """Write a file and the directories above it; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path
