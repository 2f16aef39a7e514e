"""One API key: whose it is and what it may do. The key itself is nowhere kept, only its SHA-256."""

from __future__ import annotations

import hashlib
import secrets

from pydantic import BaseModel, ConfigDict, Field

from common.wire import KeyLimits

PREFIX = "gk-"
"""Begins every key, so that people and scanners for leaked secrets recognise one."""
MOST_URGENT = -(1 << 31)
MAX_COUNT = (1 << 31) - 1


class ApiKey(BaseModel):
    """A line of the key file."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    id: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")
    """Names it in logs, and for revoking."""
    tenant: str = Field(pattern=r"^[\x21-\x7e]{1,256}$")
    """Whose requests they are: for fairness, for the prefix cache, and for who may ask about them."""
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    created: str = Field("", max_length=64)
    """For people."""
    max_concurrent: int = Field(0, ge=0, le=MAX_COUNT)
    """API calls at a time; 0: no limit."""
    tokens_per_minute: int = Field(0, ge=0, le=MAX_COUNT)
    """Prompt and generated tokens; 0: no limit."""
    best_priority: int = Field(0, ge=MOST_URGENT, le=MAX_COUNT)
    """The most urgent `priority` (the lowest number) that its requests get; by default nobody passes ordinary ones."""
    models: tuple[str, ...] = ()
    """Those that it may use; empty: all."""

    def allows(self, model: str) -> bool:
        return not self.models or model in self.models

    def limits(self) -> KeyLimits:
        """What the core counts for it."""
        if not (self.max_concurrent or self.tokens_per_minute):
            return KeyLimits()
        return KeyLimits(self.id, self.max_concurrent, self.tokens_per_minute)


def operators_key(secret: str) -> ApiKey:
    """The one key of `--api-key`: no limits and no tenant of its own, so its holder names tenants as without keys."""
    return ApiKey.model_construct(
        id="operator", tenant="", sha256=fingerprint_of(secret).hex(), best_priority=MOST_URGENT
    )


ANYBODY = ApiKey.model_construct(id="", tenant="", sha256="", best_priority=MOST_URGENT)
"""Stands for the client where no keys are asked for."""


def new_secret() -> str:
    """A fresh key: the prefix and 256 random bits in URL-safe Base64."""
    return PREFIX + secrets.token_urlsafe(32)


def fingerprint_of(secret: str) -> bytes:
    """What is stored of a key: its SHA-256.

    Slow, salted hashes protect passwords, which can be guessed from a list. A key of 256 random bits cannot: who has
    the file would need some 2**255 guesses, however fast each is. So each request is spared the time of a slow hash.
    """
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()
