"""Files that are whole or not there: written beside their place, then moved into it."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Put text (as UTF-8) or bytes at `path`; interrupted or failed, it leaves what was there before.

    Only a process that is killed may leave a hidden file beside it. Raises OSError that names the file and
    says what became of the old one, on a full disk say.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            beside.write_bytes(content.encode() if isinstance(content, str) else content)
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        before = "what it held before is still there" if path.is_file() else "nothing of it is left behind"
        raise OSError(error.errno, f"{path.name} could not be written in {path.parent} "
                                   f"({error.strerror or error}); {before}") from error
