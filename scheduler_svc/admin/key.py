"""The admin key: one secret in a file, asked for on every request."""

from __future__ import annotations

import hmac
from hashlib import sha256
from pathlib import Path

from common.curve import warn_if_exposed

MIN_CHARACTERS = 16


class AdminKey:
    """Holds a digest of the key: comparing digests takes the same time whatever is wrong, its length too."""

    def __init__(self, key: str) -> None:
        self._digest = sha256(key.encode()).digest()

    @classmethod
    def read(cls, path: Path) -> AdminKey:
        """The key that a file holds, alone; warns of a file that others can read.

        Raises OSError, and ValueError for what is no key.
        """
        try:
            key = path.read_text().strip()
        except UnicodeDecodeError:
            key = ""
        if len(key) < MIN_CHARACTERS or not key.isascii() or any(c.isspace() for c in key):
            raise ValueError(f"admin-key-file {path} must hold one key of {MIN_CHARACTERS} characters or more, alone")
        warn_if_exposed(path)
        return cls(key)

    def opens(self, authorization: str) -> bool:
        """Whether the header `Authorization` brings this key, as `Bearer KEY`."""
        scheme, _, given = authorization.partition(" ")
        digest = sha256(given.strip().encode()).digest()
        return hmac.compare_digest(digest, self._digest) and scheme.lower() == "bearer"
