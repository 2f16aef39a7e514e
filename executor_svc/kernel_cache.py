"""Where compiled kernels are kept: a folder that can be written, or nothing would compile."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

import structlog

log = structlog.get_logger()
VARIABLE = "TRITON_CACHE_DIR"


def prepare_kernel_cache(environment: MutableMapping[str, str] = os.environ) -> None:
    """Point Triton to a new temporary folder where its own cannot be written.

    To be called before the first kernel is compiled. The temporary folder is this process's own, and goes with it:
    kernels are compiled at every start then.
    """
    home = Path(environment.get("TRITON_HOME") or environment.get("HOME") or "/")
    folder = Path(environment.get(VARIABLE) or home / ".triton" / "cache")
    if not _writable(folder):
        environment[VARIABLE] = own = tempfile.mkdtemp(prefix="gilir-kernels-")
        atexit.register(shutil.rmtree, own, ignore_errors=True)
        log.warning("compiled kernels are not kept", folder=str(folder), variable=VARIABLE)


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
