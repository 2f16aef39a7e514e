"""Settings of the runner process."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from scheduler_svc.frontend.settings import FrontendSettings


class RunnerSettings(FrontendSettings):
    """Flags of `python -m scheduler_svc.batch_runner`: it is a client of the core as the frontends are."""

    table: ClassVar[str] = "frontend"

    batch_max_in_flight: int = Field(16, ge=1, le=4096, description="sequences of batches that may run at a time")
    batch_model_wait_s: float = Field(600.0, ge=0, description="seconds that lines wait for a model that is not served")

    @property
    def binds(self) -> bool:
        """It listens nowhere, whatever the environment that it shares with the scheduler says of a host."""
        return False
