"""Files of ours: JSON with a format name and a version, written atomically, read with clear errors."""

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from trajectory_guard.errors import FileFormatError

__all__ = ["atomic_write", "read_json", "write_json"]

MAX_JSON_BYTES = 64 * 2**20
"""Largest file of ours that is read: a fit with every rung point of a large ladder is below 10 MiB."""


@contextlib.contextmanager
def atomic_write(path: str | Path) -> Iterator[IO[str]]:
    """Open a text file that appears at `path` whole or not at all.

    The text goes to a temporary file in the same folder, is synced to disk and renamed over `path`. On an error the
    temporary file is removed and `path` keeps what it had.

    Example:
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "note.txt"
        >>> with atomic_write(path) as file:
        ...     _ = file.write("all of it")
        >>> path.read_text()
        'all of it'
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes the file private; give it the permissions any new file would have.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def write_json(path: str | Path, content: dict[str, Any]) -> None:
    """Write `content` as indented JSON, atomically; equal contents give equal bytes.

    Raises:
        FileFormatError: a number in it is NaN or infinite, which JSON cannot hold; nothing is written.
    """
    try:
        text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False)
    except ValueError as error:
        raise FileFormatError(f"{path}: not written, a value in it is not finite ({error})") from error
    with atomic_write(path) as file:
        file.write(text + "\n")


def read_json(path: str | Path, *, format: str, version: int) -> dict[str, Any]:
    """Read a JSON object and check that it says it is `format`, of a version from 1 to `version`.

    Args:
        path: the file.
        format: expected value of its `format` field, such as `"trajectory-guard-fit"`.
        version: newest version this code reads.

    Raises:
        FileFormatError: the file is missing, too large, not JSON, not an object, of another format or a newer version,
            or holds a number that is not finite.
    """
    file = Path(path)
    try:
        size = file.stat().st_size
        if size > MAX_JSON_BYTES:
            raise FileFormatError(f"{file}: {size} bytes, more than the limit of {MAX_JSON_BYTES} for a {format}")
        content = json.loads(file.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except FileFormatError:
        raise
    except FileNotFoundError as error:
        raise FileFormatError(f"{file}: no such file; expected a {format} there") from error
    except OSError as error:
        raise FileFormatError(f"{file}: cannot be read as a {format}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors.
        raise FileFormatError(f"{file}: not valid JSON, cut off or damaged ({error}); restore the file") from error
    if not isinstance(content, dict):
        raise FileFormatError(f"{file}: holds a JSON {type(content).__name__}, expected an object of a {format}")
    if content.get("format") != format:
        raise FileFormatError(f"{file}: its `format` is {content.get('format')!r}, expected {format!r}")
    found = content.get("version")
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise FileFormatError(f"{file}: its `version` is {found!r}, expected an integer from 1 to {version}")
    if found > version:
        raise FileFormatError(
            f"{file}: {format} version {found} is newer than {version}, the newest this release reads; "
            "upgrade trajectory-guard"
        )
    _refuse_infinite(content, str(file))
    return content


def _refuse_constant(name: str) -> float:
    raise FileFormatError(f"it holds {name}, and every number in a file of ours is finite")


def _refuse_infinite(value: Any, where: str) -> None:
    """Numbers like 1e999 parse to infinity without passing `parse_constant`."""
    if isinstance(value, float) and not math.isfinite(value):
        raise FileFormatError(f"{where}: holds a number out of float64's range")
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_infinite(item, f"{where}: {key}")
    elif isinstance(value, list):
        for item in value:
            _refuse_infinite(item, where)
