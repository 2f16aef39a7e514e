"""Where compiled kernels are kept: a folder that can be written, or nothing would compile."""

from __future__ import annotations

import os
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

import structlog

log = structlog.get_logger()


def prepare_kernel_cache(environment: MutableMapping[str, str] = os.environ) -> None:
    """Point Triton, and torch's compiler, to a new temporary folder where their own cannot be written.

    To be called before the first kernel is compiled. The temporary folder is this process's own: kernels are compiled
    at every start then.
    """
    home = Path(environment.get("TRITON_HOME") or environment.get("HOME") or "/")
    defaults = {
        "TRITON_CACHE_DIR": home / ".triton" / "cache",
        "TORCHINDUCTOR_CACHE_DIR": Path(tempfile.gettempdir()),
    }
    for variable, default in defaults.items():
        folder = Path(environment.get(variable) or default)
        if not _writable(folder):
            environment[variable] = tempfile.mkdtemp(prefix="gilir-kernels-")
            log.warning("compiled kernels are not kept", folder=str(folder), variable=variable)


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
