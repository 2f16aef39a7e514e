"""`python -m common.curve NAME`: makes a CURVE key pair, with which scheduler and executors meet over a network.

Both files have the form of pyzmq's certificates: NAME.key may be seen by anybody, NAME.key_secret by its owner alone.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import structlog
import zmq

from common.command_parser import command_parser

log = structlog.get_logger()


def create_key_pair(folder: Path, name: str) -> tuple[Path, Path]:
    """Write both files and return their paths, the public one first. Raises OSError, FileExistsError among them.

    The secret file is made with mode 0600, so that nobody could read it at any moment.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    public, secret = (key.decode() for key in zmq.curve_keypair())
    public_path, secret_path = folder / f"{name}.key", folder / f"{name}.key_secret"
    _write(secret_path, 0o600, f'curve\n    public-key = "{public}"\n    secret-key = "{secret}"\n')
    try:
        _write(public_path, 0o644, f'curve\n    public-key = "{public}"\n')
    except OSError:
        secret_path.unlink()
        raise
    return public_path, secret_path


def _write(path: Path, mode: int, text: str) -> None:
    """Write a file that must not be there yet."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)


def warn_if_exposed(path: Path) -> None:
    """Say in the log that other users can read a secret key. Not more: where secrets are mounted, modes are others'."""
    if path.stat().st_mode & 0o077:
        log.warning("a secret key can be read by others: chmod 600", file=str(path))


EXAMPLES = """
  gilir curve scheduler --folder keys
  gilir curve gpu-0 --folder keys
"""


def parser(prog: str) -> argparse.ArgumentParser:
    made = command_parser(prog, "Make a CURVE key pair.", EXAMPLES)
    made.add_argument("name", help="whose keys they are: scheduler, or an executor's name")
    made.add_argument("--folder", type=Path, default=Path(), help="where to put them (default: here)")
    return made


def main(arguments: list[str], prog: str) -> int:
    """Exit status 1, with one plain line, where a file is there already or cannot be written."""
    options = parser(prog).parse_args(arguments)
    if Path(options.name).name != options.name:
        parser(prog).error("the name is part of a file's name: no slashes")
    try:
        public_path, secret_path = create_key_pair(options.folder, options.name)
    except OSError as error:
        print(f"error: {error.filename or options.folder}: {error.strerror or error}", file=sys.stderr)
        return 1
    print(f"public key: {public_path}\nsecret key: {secret_path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:], "python -m common.curve"))
