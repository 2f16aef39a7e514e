"""Compiles the C++ sources beside this file into a shared library, once for each machine and version of the sources."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
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
_STALE_S = 2 * _TIMEOUT_S
"""No build is this old: what it left was of one that was killed."""
_SEAL_BYTES = 16


class BuildError(Exception):
    """There is no library; the text is one plain line."""


def build(extra_flags: tuple[str, ...], source: str = "step.cpp") -> Path:
    """The shared library of one source file, compiled with `extra_flags` unless the cache has it.

    The cache is the folder that `GILIR_NATIVE_CACHE` names, or else `gilir/native` in the user's cache folder. Where it
    cannot be read and written the library goes to a folder of this process. Several processes may build at once: each
    renames its finished file into place. A kept file that is not whole is built again. Raises `BuildError`.
    """
    compiler = find_compiler()
    name = f"{_digest(compiler, extra_flags, source)}.so"
    failure: Exception | None = None
    for choose in (_cache_folder, _own_folder):
        try:
            kept = choose() / name
            if _is_whole(kept):
                return kept
            kept.parent.mkdir(parents=True, exist_ok=True)
            _clear_stale(kept.parent)
            handle, temporary = tempfile.mkstemp(dir=kept.parent, prefix=f"{name}.", suffix=".part")
        except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home
            failure = error
            continue
        os.close(handle)
        try:
            _compile(compiler, extra_flags, source, Path(temporary))
            _seal(Path(temporary))
            Path(temporary).rename(kept)
        finally:
            Path(temporary).unlink(missing_ok=True)
        return kept
    raise BuildError(f"no folder for the compiled kernels: {failure}")


def is_built(extra_flags: tuple[str, ...], source: str = "step.cpp") -> bool:
    """Whether `build` would find the library in the cache. Raises `BuildError` where there is no compiler."""
    name = f"{_digest(find_compiler(), extra_flags, source)}.so"
    try:
        return _is_whole(_cache_folder() / name)
    except (OSError, RuntimeError):
        return False


def _clear_stale(folder: Path) -> None:
    for part in folder.glob("*.so.*.part"):
        with contextlib.suppress(OSError):  # another process may be faster
            if time.time() - part.stat().st_mtime > _STALE_S:
                part.unlink()


def _seal(path: Path) -> None:
    """Append the digest of a library to it, which the loader passes over, and see both onto the disk."""
    whole = path.read_bytes()
    if not whole:
        raise BuildError("the C++ compiler wrote nothing")
    with path.open("ab") as file:
        file.write(hashlib.blake2b(whole, digest_size=_SEAL_BYTES).digest())
        file.flush()
        os.fsync(file.fileno())
    path.chmod(0o755)  # others may use the cache too


def _is_whole(path: Path) -> bool:
    """Whether a sealed library is there. To load one that was cut short would end the process."""
    if not path.is_file():
        return False
    data = path.read_bytes()
    return hashlib.blake2b(data[:-_SEAL_BYTES], digest_size=_SEAL_BYTES).digest() == data[-_SEAL_BYTES:]


def find_compiler() -> tuple[str, ...]:
    """Command of a C++ compiler: of the variable CXX, or the first that is installed. Raises `BuildError`."""
    names = (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS
    for name in names:
        program, *options = shlex.split(name)  # such as "ccache g++"
        found = shutil.which(program)
        if found:
            return (found, *options)
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


def _digest(compiler: tuple[str, ...], extra_flags: tuple[str, ...], source: str) -> str:
    whole = hashlib.blake2b(digest_size=16)
    for part in (_version(compiler), source, *FLAGS, *extra_flags):
        whole.update(part.encode() + b"\0")
    for path in source_files():
        whole.update(path.name.encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()


@cache
def _version(compiler: tuple[str, ...]) -> str:
    return " ".join(compiler) + _run([*compiler, "--version"])


def _compile(compiler: tuple[str, ...], extra_flags: tuple[str, ...], source: str, target: Path) -> None:
    _run([*compiler, *FLAGS, *extra_flags, str(SOURCES / source), "-o", str(target)])


_GROUP = """trap 'trap - TERM; kill 0' TERM; "$@" & wait $!"""
"""For a shell that leads a process group: it runs a command, and SIGTERM to it ends all of the group. A compiler is
several processes."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def _end_with_parent() -> None:
    """For `preexec_fn`: SIGTERM when the thread that started this process ends, even by SIGKILL. Linux only."""
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _run(command: list[str]) -> str:
    """The standard output. The command does not outlive the caller."""
    try:
        process = subprocess.Popen(
            ["/bin/sh", "-c", _GROUP, "sh", *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
    except OSError as error:
        raise BuildError(f"{command[0]}: {error}") from error
    with process:
        try:
            output, errors = process.communicate(timeout=_TIMEOUT_S)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise BuildError(f"{command[0]}: not done after {_TIMEOUT_S} s") from error
            raise
    if process.returncode:
        lines = [line for line in errors.splitlines() if "error" in line] or errors.splitlines() or [""]
        raise BuildError(f"{command[0]}: {lines[0]}")
    return output
