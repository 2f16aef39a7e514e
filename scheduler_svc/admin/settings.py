"""Settings of the admin process, which the scheduler starts."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from pydantic import Field

from common.settings import ServiceSettings


class AdminSettings(ServiceSettings):
    """Flags of `python -m scheduler_svc.admin`."""

    table: ClassVar[str] = "admin"

    core: str = Field(description="ZeroMQ address of the core's admin socket, ipc://…")
    fd: int = Field(ge=0, description="inherited listening socket")
    key_file: Path | None = Field(None, description="file with the key that every request must bring")
