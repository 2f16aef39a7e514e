"""The file of API keys: one JSON object a line. Blank lines and lines that begin with `#` are passed over."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from scheduler_svc.keys.api_key import ApiKey

MAX_BYTES = 16 << 20


class KeyFileError(ValueError):
    """The file cannot be used as it is; the text says where and why, in one line, and tells no hash."""


def read_keys(path: Path) -> list[ApiKey]:
    """All keys of a file, which may hold none. Raises `KeyFileError`."""
    keys: list[ApiKey] = []
    ids: dict[str, int] = {}
    hashes: dict[str, int] = {}
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        key = _parse(line, f"{path}, line {number}")
        for known, value, what in ((ids, key.id, "id"), (hashes, key.sha256, "key")):
            if value in known:
                raise KeyFileError(f"{path}, line {number}: the {what} of line {known[value]} again")
            known[value] = number
        keys.append(key)
    return keys


def add_key(path: Path, key: ApiKey) -> None:
    """Append a key, to a new file (mode 0600) if there is none. Raises `KeyFileError` where its id is taken."""
    with _locked(path):
        text = ""
        if path.exists():
            if any(other.id == key.id for other in read_keys(path)):
                raise KeyFileError(f"{path}: there is a key with the id {key.id!r} already")
            text = _read(path)
        if text and not text.endswith("\n"):
            text += "\n"
        _replace(path, text + json.dumps(key.model_dump(exclude_defaults=True), ensure_ascii=False) + "\n")


def remove_key(path: Path, key_id: str) -> None:
    """Take a key out and leave all other lines as they are. Raises `KeyFileError` where there is none of this id."""
    with _locked(path):
        if all(key.id != key_id for key in read_keys(path)):
            raise KeyFileError(f"{path}: there is no key with the id {key_id!r}")
        lines = _read(path).splitlines(keepends=True)
        _replace(path, "".join(line for line in lines if not _is_key(line, key_id)))


def _is_key(line: str, key_id: str) -> bool:
    line = line.strip()
    return bool(line) and not line.startswith("#") and json.loads(line)["id"] == key_id


def _parse(line: str, where: str) -> ApiKey:
    try:
        return ApiKey.model_validate_json(line)
    except ValidationError as error:
        # Of what is wrong only the place is told, not the text: it may be a key that was put there by mistake.
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        if first["type"] == "json_invalid":
            raise KeyFileError(f"{where}: is no JSON object") from None
        raise KeyFileError(f"{where}: {field + ': ' if field else ''}{first['msg']}") from None


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise KeyFileError(f"{path}: is larger than {MAX_BYTES} bytes")
        return content.decode()
    except OSError as error:
        raise KeyFileError(f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise KeyFileError(f"{path}: is no UTF-8 text") from error


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One writer at a time: the folder is locked, since the file itself is replaced."""
    folder = os.open(path.resolve().parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _replace(path: Path, text: str) -> None:
    """Write the whole file anew beside it, then put it in its place: a reader sees the old one or the new one."""
    path = path.resolve()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")  # mode 0600
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            status = path.stat()
            Path(name).chmod(status.st_mode & 0o777)
            with contextlib.suppress(PermissionError):  # only root may give files away
                os.chown(name, status.st_uid, status.st_gid)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
