"""Compiles the C++ sources beside this file into a shared library, once for each machine and version of the sources."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

SOURCES = Path(__file__).parent
COMPILERS = ("g++", "c++", "clang++")
FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-shared", "-pthread", "-fvisibility=hidden"),
    *("-ffp-contract=off", "-fno-math-errno", "-w"),
)
"""Products and sums must not be fused behind our back: a row would then have other bits in other code. And two
libraries of one process must not share the statics of their inline functions, which differ in size."""
CACHE_VARIABLE = "GILIR_NATIVE_CACHE"
_TIMEOUT_S = 300


class BuildError(Exception):
    """There is no library; the text is one plain line."""


def build(extra_flags: tuple[str, ...], source: str = "step.cpp") -> Path:
    """The shared library of one source file, compiled with `extra_flags` unless the cache has it.

    The cache is the folder that `GILIR_NATIVE_CACHE` names, or else `gilir/native` in the user's cache folder. Where it
    cannot be written the library goes to a folder of this process. Several processes may build at once: each renames
    its finished file into place. Raises `BuildError`.
    """
    compiler = find_compiler()
    name = f"{_digest(compiler, extra_flags, source)}.so"
    kept = _cache_folder() / name
    if kept.is_file():
        return kept
    for folder in (kept.parent, None):
        try:
            if folder is None:
                folder = _own_folder()
            folder.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=folder, prefix=f"{name}.", suffix=".part")
        except OSError as error:
            failure = error
            continue
        os.close(handle)
        try:
            _compile(compiler, extra_flags, source, Path(temporary))
            Path(temporary).rename(folder / name)
        finally:
            Path(temporary).unlink(missing_ok=True)
        return folder / name
    raise BuildError(f"no folder for the compiled kernels: {failure}")


def find_compiler() -> str:
    """Path of a C++ compiler: of the variable CXX, or the first that is installed. Raises `BuildError`."""
    names = (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS
    for name in names:
        found = shutil.which(name)
        if found:
            return found
    raise BuildError(f"no C++ compiler ({', '.join(names)})")


def source_files() -> list[Path]:
    return sorted(path for pattern in ("*.h", "*.cpp") for path in SOURCES.glob(pattern))


def _cache_folder() -> Path:
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gilir" / "native"


@cache
def _own_folder() -> Path:
    # Of this user alone: a library from a folder that others may write to would run their code.
    return Path(tempfile.mkdtemp(prefix="gilir-native-"))


def _digest(compiler: str, extra_flags: tuple[str, ...], source: str) -> str:
    whole = hashlib.blake2b(digest_size=16)
    for part in (_version(compiler), source, *FLAGS, *extra_flags):
        whole.update(part.encode() + b"\0")
    for path in source_files():
        whole.update(path.name.encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()


@cache
def _version(compiler: str) -> str:
    return compiler + _run([compiler, "--version"])


def _compile(compiler: str, extra_flags: tuple[str, ...], source: str, target: Path) -> None:
    _run([compiler, *FLAGS, *extra_flags, str(SOURCES / source), "-o", str(target)])


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or [""]
        raise BuildError(f"{command[0]}: {lines[0]}")
    return done.stdout
