"""Settings of a frontend process."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, SecretStr, model_validator

from common.addresses import is_loopback
from common.settings import ServiceSettings


class FrontendSettings(ServiceSettings):
    """Flags of `python -m scheduler_svc.frontend`."""

    table: ClassVar[str] = "frontend"

    core: str = Field(description="ZeroMQ address of the core, ipc://…")
    name: str = Field("frontend-0", min_length=1, max_length=200, description="routing identity towards the core")
    fd: int | None = Field(None, ge=0, description="inherited listening socket; without it, host and port are bound")
    host: str = Field("127.0.0.1", description="address to listen on, where no socket is inherited")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    grace_s: float = Field(8.0, ge=0, description="seconds that open requests get at SIGTERM")
    max_body_mb: int = Field(32, ge=1, le=256, description="largest request body")
    max_bodies_mb: int = Field(256, ge=1, description="request bodies held at a time, all together")
    api_keys: Path | None = Field(None, description="file of the API keys that clients need")
    api_key: SecretStr | None = Field(None, description="one API key that clients need")
    open_metrics: bool = Field(False, description="answer /metrics without an API key")
    allow_no_api_keys: bool = Field(False, description="without API keys, answer whoever asks")
    resume_hold_s: float = Field(
        30.0, ge=0, description="seconds that a resumable stream is kept without a reader; 0: there are none"
    )
    resume_buffer_mb: int = Field(256, ge=1, description="events of resumable streams that are kept, all together")
    max_streams_per_request: int = Field(
        512, ge=1, le=4096, description="most sequences (prompts times n) of a request"
    )
    core_timeout_s: float = Field(5.0, gt=0, description="silence of the core after which the frontend is not live")
    core_lost_s: float = Field(
        30.0, gt=0, description="silence of the core after which open requests end with an error"
    )
    max_unsent_tokens: int = Field(2048, ge=16, description="tokens a slow reader may fall behind before it is dropped")
    stalled_client_s: float = Field(
        60.0, gt=0, description="seconds that a client may take for the next bytes, either way, before it is dropped"
    )
    tokenizer_threads: int = Field(
        2, ge=1, le=64, description="threads for long prompts and large chats; one more for those that will hardly fit"
    )
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral", "none"] = Field(
        "auto", description="how models write calls of tools; auto: as their chat templates tell; none: calls stay text"
    )
    reasoning_parser: Literal["auto", "think", "none"] = Field(
        "auto", description="think: split <think>…</think> from answers; auto: where the chat template knows it"
    )
    grammar_cpu_s: int = Field(
        10, ge=1, le=600, description="processor seconds that a grammar of a request may take to compile"
    )

    batch_dir: Path | None = Field(None, description="folder of files and batches; none: they are off")
    batch_database: str | None = Field(None, description="postgresql://… instead, for files and batches")
    batch_max_file_mb: int = Field(200, ge=1, le=2048, description="largest file that may be uploaded")
    batch_max_tenant_mb: int = Field(0, ge=0, description="uploaded files that a tenant may store; 0: any number")

    @property
    def binds(self) -> bool:
        """Whether it binds a socket of its own; an inherited one was judged by who bound it."""
        return self.fd is None

    @model_validator(mode="after")
    def _no_open_door(self) -> FrontendSettings:
        keys = self.api_keys is not None or self.api_key is not None
        if self.binds and not (keys or self.allow_no_api_keys or is_loopback(self.host)):
            raise ValueError(f"{self.host} is open to the network: give api-keys or api-key, or allow-no-api-keys")
        if self.max_bodies_mb < self.max_body_mb:
            raise ValueError("max-bodies-mb must be at least max-body-mb")
        return self

    @property
    def max_body_bytes(self) -> int:
        return self.max_body_mb << 20
