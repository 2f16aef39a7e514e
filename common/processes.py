"""Child processes that do not outlive their parent."""

from __future__ import annotations

import ctypes
import signal
import sys

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def end_with_parent() -> None:
    """Have the kernel send SIGTERM to this process when the thread that started it ends, even by SIGKILL.

    For `preexec_fn` of `subprocess.Popen`; start such children from a thread that lives as long as the process. Linux
    only; elsewhere it does nothing.
    """
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
