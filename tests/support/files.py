"""Files that tests write, and a full disk."""

import contextlib
import resource
from pathlib import Path


def write(path: Path, text: str) -> Path:
    """Write a file and the directories above it; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@contextlib.contextmanager
def full_disk(limit_bytes):
    """Files stop growing at a size, as all do on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
