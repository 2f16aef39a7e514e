"""What a request says of its place in the queue and in the prefix cache."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import blake2b

from starlette.requests import Request

from common.wire import Retention
from scheduler_svc.http.errors import invalid, timed_out
from scheduler_svc.http.field_kinds import Integer, Text
from scheduler_svc.http.fields import Fields, show
from scheduler_svc.keys import ApiKey

TENANT_HEADER = "X-Tenant"
TIMEOUT_HEADER = "X-Request-Timeout"
MAX_TENANT = 256
MAX_SALT = 4096
BATCH_PRIORITY = (1 << 31) - 1
"""The lowest class there is: lines of batches have it, and no request can name it."""
MAX_TIMEOUT_S = 1e6
_SECONDS = re.compile(r"[0-9]{1,20}(\.[0-9]{0,20})?([eE][+-]?[0-9]{1,3})?")
PRIORITY = Integer("priority", 0, -(1 << 31), BATCH_PRIORITY - 1)
USER = Text("user", "", MAX_TENANT)
DEADLINE_MS = Integer("deadline_ms", 0, 1, (1 << 31) - 1)
SALT = Text("cache_salt", None, MAX_SALT)
RETENTION = Text("prompt_cache_retention", "in_memory", 64)
RETENTIONS = {
    "in_memory": Retention.NORMAL,
    "in-memory": Retention.NORMAL,
    "24h": Retention.KEEP,
    "none": Retention.DROP,
}
"""`prompt_cache_retention`: OpenAI's values in both of its spellings, and our own `none`."""
TENANT_PATTERN = rf"[\x21-\x7e]{{1,{MAX_TENANT}}}"
_TENANT = re.compile(TENANT_PATTERN)


@dataclass(frozen=True, slots=True)
class Scheduling:
    """The fields of `Submit` that bear on order and caching, as they go on the wire."""

    priority: int
    tenant: str
    salt: bytes
    retention: Retention
    deadline_ms: int


def read_scheduling(fields: Fields) -> Scheduling:
    """Read them from a body. Raises `ApiError` 400."""
    return Scheduling(
        priority=PRIORITY.read(fields),
        tenant=USER.read(fields),
        salt=_read_salt(fields),
        retention=_read_retention(fields),
        deadline_ms=DEADLINE_MS.read(fields),
    )


def tenant_of(request: Request, key: ApiKey) -> str | None:
    """The tenant whatever the body says: the key's, or the one that the header names; None where neither tells one.

    They go before the body's `user`: a gateway sets the header, while `user` is the end user that the tenant itself
    names. Raises `ApiError` 400 for a header that is not there once, is not well formed, or is not the key's tenant.
    """
    named = _header_tenant(request)
    if key.tenant and named not in (None, key.tenant):
        raise invalid(TENANT_HEADER, f"{TENANT_HEADER}: is not the tenant of this API key")
    return key.tenant or named


def _header_tenant(request: Request) -> str | None:
    named = request.headers.getlist(TENANT_HEADER)
    if not named:
        return None
    if len(named) > 1:
        raise invalid(TENANT_HEADER, f"{TENANT_HEADER}: is there {len(named)} times")
    if not _TENANT.fullmatch(named[0]):
        text = f"must be 1 to {MAX_TENANT} printable ASCII characters without spaces"
        raise invalid(TENANT_HEADER, f"{TENANT_HEADER}: {text}")
    return named[0]


class TimeLimit:
    """How long a request may take, counted from now, its arrival."""

    def __init__(self, seconds: float | None) -> None:
        """`seconds`: None for what the core is configured to."""
        self._seconds, self._arrived = seconds, time.monotonic()

    def left_ms(self) -> int:
        """What is left of it; 0 for no limit of its own. Raises `ApiError` 504 when nothing is."""
        if self._seconds is None:
            return 0
        left = self._left_s(self._seconds)
        if left <= 0:
            raise timed_out(f"not done within {self._seconds:g} s")
        return math.ceil(left * 1000)

    @asynccontextmanager
    async def bound(self, headers: dict[str, str] | None = None) -> AsyncIterator[None]:
        """Give up on what is awaited inside when nothing is left. Raises `ApiError` 504, with these headers."""
        try:
            async with asyncio.timeout(None if self._seconds is None else self._left_s(self._seconds)) as timeout:
                yield
        except TimeoutError:
            if not timeout.expired():
                raise
            raise timed_out(f"not done within {self._seconds:g} s", headers) from None

    def _left_s(self, seconds: float) -> float:
        return seconds - (time.monotonic() - self._arrived)


def header_time_limit(request: Request) -> TimeLimit:
    """What the header says, in seconds. Raises `ApiError` 400 for what is not a number above 0, or there twice."""
    named = request.headers.getlist(TIMEOUT_HEADER)
    if not named:
        return TimeLimit(None)
    seconds = float(named[0]) if len(named) == 1 and _SECONDS.fullmatch(named[0]) else math.nan
    if not 0 < seconds <= MAX_TIMEOUT_S:
        raise invalid(TIMEOUT_HEADER, f"{TIMEOUT_HEADER}: must be one number of seconds, above 0 and at most 1000000")
    return TimeLimit(seconds)


def _read_salt(fields: Fields) -> bytes:
    """128 bits of the client's text, so that what the client keeps secret goes no further than this process."""
    salt = SALT.read(fields)
    if salt == "":
        raise invalid("cache_salt", "cache_salt: must not be empty")
    return b"" if salt is None else blake2b(salt.encode(), digest_size=16).digest()


def _read_retention(fields: Fields) -> Retention:
    name = RETENTION.read(fields)
    retention = RETENTIONS.get(name)
    if retention is None:
        choices = ", ".join(RETENTIONS)
        raise invalid("prompt_cache_retention", f"prompt_cache_retention: must be one of {choices}, got {show(name)}")
    return retention
