"""What our processes set up for themselves and for their children."""

from __future__ import annotations

import ctypes
import resource
import signal
import sys

import structlog

log = structlog.get_logger()

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def end_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when the thread that started it ends, even by SIGKILL.

    For `preexec_fn` of `subprocess.Popen`; start such children from a thread that lives as long as the process. Linux
    only; elsewhere it does nothing.
    """
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def raise_descriptor_limit() -> None:
    """Raise the soft limit of open descriptors to the hard one: every connection takes one, and 1024 are soon gone.

    Does not fail: where it cannot be raised, the limit stays. Children inherit it.
    """
    try:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if soft != hard:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:
        log.debug("the limit of open descriptors stays", error=str(error))
        return
    log.debug("open descriptors", limit=hard, before=soft)
