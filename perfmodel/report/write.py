"""Files written whole or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from perfmodel.errors import ConfigError

_NEW_FILE = 0o666


def write_text(path: Path, text: str) -> None:
    """Writes `text` to `path` through a temporary file beside it. Raises ConfigError if the place cannot be written."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise ConfigError(f"{path}: cannot write: {error.strerror}") from error
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, _NEW_FILE & ~_umask())  # mkstemp makes it private; a report is for others too
        os.replace(name, path)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise ConfigError(f"{path}: cannot write: {error.strerror}") from error


def _umask() -> int:
    """The process's umask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
