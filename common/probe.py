"""Asks a service of this machine whether it is up."""

from __future__ import annotations

import urllib.request
from http.client import HTTPException

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""What listens on this machine is not asked through the proxy that the environment may name."""
_PATIENCE_S = 5.0


def answers(url: str) -> bool:
    """Whether a GET is answered with 200; False also where nobody answers, or not in HTTP."""
    try:
        with _DIRECT.open(url, timeout=_PATIENCE_S) as answer:
            return bool(answer.status == 200)
    except (OSError, HTTPException):
        return False
