"""The API keys that a frontend knows, kept up to date with their file."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from scheduler_svc.http.errors import unavailable
from scheduler_svc.keys import ANYBODY, ApiKey, KeyFileError, fingerprint_of, operators_key, read_keys

log = structlog.get_logger()

CHECK_S = 1.0
"""The file is looked at this often at most: a revoked key is refused so soon."""
MAX_SECRET = 512
"""Characters of the longest key that is looked up."""


class KeyRing:
    """`find` tells whose key it is. A file that cannot be read leaves the keys as they were and is tried again at each
    look; each reason is logged once.
    """

    def __init__(self, path: Path | None, operators: str | None, clock: Callable[[], float] = time.monotonic) -> None:
        """`operators`: the one key without a file. No key is asked for where there is neither."""
        self._path, self._clock = path, clock
        self._operators = [] if operators is None else [operators_key(operators)]
        self._blinding = secrets.token_bytes(32)
        self._keys: dict[bytes, ApiKey] = {}
        self._seen: tuple[int, ...] | None = None
        """What the file looked like when it was last read well."""
        self._failure = ""
        """Why it could not be read at the last look; empty when it could."""
        self._next_check = -1.0
        self._unread = path is not None
        """The file has never been read well."""
        self._take([])
        if self.asked_for:
            self._refresh()

    @property
    def asked_for(self) -> bool:
        return self._path is not None or bool(self._operators)

    def find(self, secret: str) -> ApiKey | None:
        """The key, if it is one. Raises `ApiError` 503 while its file could not be read at all.

        What is looked up is a hash under a key that this process drew, so the time that it takes tells nothing of what
        is known; the digests themselves are compared in constant time.
        """
        self._refresh()
        if len(secret) <= MAX_SECRET:
            digest = fingerprint_of(secret)
            key = self._keys.get(self._blind(digest))
            if key is not None and hmac.compare_digest(digest, bytes.fromhex(key.sha256)):
                return key
        if self._unread:
            raise unavailable("the API keys cannot be read", "no_api_keys")
        return None

    def named(self, key_id: str) -> ApiKey | None:
        """The key of this id: what was asked for in its name goes on under it, until it is revoked.

        `ANYBODY` without an id, or where no keys are asked for. Raises as `find` does.
        """
        self._refresh()
        if not key_id or not self.asked_for:
            return ANYBODY
        key = next((key for key in self._keys.values() if key.id == key_id), None)
        if key is None and self._unread:
            raise unavailable("the API keys cannot be read", "no_api_keys")
        return key

    def _blind(self, digest: bytes) -> bytes:
        return hashlib.blake2b(digest, key=self._blinding, digest_size=32).digest()

    def _refresh(self) -> None:
        """Look at the file, unless that was just done."""
        now = self._clock()
        if self._path is None or now < self._next_check:
            return
        self._next_check = now + CHECK_S
        try:
            status = self._path.stat()
            looks: tuple[int, ...] = (status.st_mtime_ns, status.st_size, status.st_ino)
        except OSError:
            looks = ()
        if looks == self._seen:
            return
        try:
            keys = read_keys(self._path)
        except KeyFileError as error:
            # Why it failed may pass with no change of the file: its mode, its folder's, descriptors that ran out.
            if str(error) != self._failure:
                self._failure = str(error)
                log.error("API keys not read: those known before stay", error=self._failure, known=len(self._keys))
            return
        self._seen, self._failure, self._unread = looks, "", False
        self._take(keys)
        log.info("API keys read", keys=len(keys))

    def _take(self, keys: list[ApiKey]) -> None:
        self._keys = {self._blind(bytes.fromhex(key.sha256)): key for key in [*keys, *self._operators]}
