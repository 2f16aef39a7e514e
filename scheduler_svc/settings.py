"""Settings of the scheduler service."""

from __future__ import annotations

from dataclasses import fields
from enum import StrEnum
from pathlib import Path
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, SecretStr, field_validator, model_validator

from common.addresses import is_loopback
from common.settings import ServiceSettings
from scheduler_svc.core import SchedulerConfig


class SchedulerSettings(ServiceSettings):
    """Flags of `python -m scheduler_svc`."""

    table: ClassVar[str] = "scheduler"

    host: str = Field("127.0.0.1", description="address of the REST API")
    port: int = Field(8000, ge=0, le=65535, description="port of the REST API; 0 takes a free one")
    frontends: int = Field(1, ge=1, le=64, description="frontend processes on the one listening socket")
    api_keys: Path | None = Field(None, description="file of the API keys that clients need, see gilir keys")
    api_key: SecretStr | None = Field(
        None, description="one API key for all; rather in GILIR_API_KEY: other users of the machine see command lines"
    )
    open_metrics: bool = Field(False, description="answer /metrics without an API key")
    allow_no_api_keys: bool = Field(False, description="without API keys, serve beyond loopback and whoever asks")
    executor_bind: str = Field("tcp://127.0.0.1:5570", description="ZeroMQ address that executors dial")
    curve_secret_key: Path | None = Field(None, description="file with this service's CURVE secret key (for tcp)")
    curve_client_keys: Path | None = Field(None, description="folder of the executors' public key files")
    allow_insecure_bind: bool = Field(False, description="let executors dial over a network without CURVE keys")
    run_dir: Path | None = Field(None, description="folder of the frontends' socket; none: a fresh private one")

    admin_host: str = Field("127.0.0.1", description="address of the admin API")
    admin_port: int | None = Field(
        None, ge=0, le=65535, description="port of the admin API; 0 takes a free one; none: there is no admin API"
    )
    admin_key_file: Path | None = Field(None, description="file with the key that requests to the admin API bring")

    max_num_seqs: int = Field(256, ge=1, le=65535, description="sequences that run on one executor at a time")
    max_num_batched_tokens: int = Field(2048, ge=1, description="token budget of one iteration")
    batching: Literal["iteration", "request"] = Field("iteration", description="when the batch may change")
    prefill: Literal["mixed", "separate"] = Field("mixed", description="may prefills and decodes share iterations")
    chunked_prefill: bool = Field(True, description="cut prefills to fill the token budget")
    kv: Literal["paged", "contiguous"] = Field("paged", description="blocks one by one, or one run at admission")
    preemption: Literal["recompute", "swap", "none"] = Field("recompute", description="of the KV of who gives way")
    handover: Literal["auto", "always", "never"] = Field(
        "auto", description="send KV to another executor where one drains; auto: where that is quicker than computing"
    )
    eviction: Literal["lru", "lfu", "fifo"] = Field("lru", description="which cached block goes first")
    discipline: Literal["fcfs", "priority", "fair", "deadline"] = Field("priority", description="order of service")
    admission: Literal["predicted", "immediate", "worst_case"] = Field(
        "predicted", description="what must fit before a seat is given"
    )
    max_prefill_chunk: int = Field(0, ge=0, description="most prompt tokens of a sequence an iteration; 0: no cap")
    long_prefill_threshold: int = Field(0, ge=0, description="prompts above it are long; 0: a quarter of the budget")
    target_itl_ms: float = Field(0, ge=0, description="prefill rides along while iterations stay within; 0: off")
    watermark: float = Field(0.01, ge=0, lt=1, description="share of the KV blocks that admissions leave free")
    prefix_caching: bool = Field(True, description="reuse the KV of common prefixes")
    isolate_tenants: bool = Field(
        False, description="share cached prefixes within a tenant only; with API keys that is the default"
    )
    ageing_s: float = Field(30.0, ge=0, description="waiting that lifts a request by one priority class; 0: never")
    tenant_weights: dict[str, float] = Field(default_factory=dict, description="shares of tenants, for fair (JSON)")
    output_token_weight: float = Field(2.0, gt=0, description="a generated token beside a prompt token, for fair")
    default_deadline_s: float = Field(60.0, gt=0, description="of requests that name none, for deadline")
    max_waiting: int = Field(4096, ge=1, description="sequences that may wait before new ones get 429")
    max_waiting_tokens: int = Field(0, ge=0, description="prompt tokens of those that wait, likewise; 0: any number")
    request_timeout_s: float = Field(
        0, ge=0, description="seconds after which a request ends with 504, unless it says otherwise; 0: never"
    )
    hold_s: float = Field(30.0, ge=0, description="seconds that requests wait for an executor when there is none")

    max_strikes: int = Field(4, ge=1, description="lost plans in a row after which a request is given up")

    heartbeat_ms: int = Field(500, ge=10, description="executors show a sign of life this often")
    heartbeat_timeout_s: float = Field(3.0, gt=0, description="an executor silent for so long is lost")
    iteration_timeout_s: float = Field(60.0, gt=0, description="an executor that takes longer for a plan is lost")
    iteration_floor_s: float = Field(10.0, gt=0, description="least of the deadline learned from measured iterations")
    frontend_timeout_s: float = Field(
        20.0, ge=3, description="a frontend, the batch runner or the admin process, silent for so long, is started anew"
    )
    grace_s: float = Field(8.0, ge=0, description="seconds that running requests get at SIGTERM")
    max_body_mb: int = Field(32, ge=1, le=256, description="largest request body")
    batch_dir: Path | None = Field(None, description="folder of files and batches; none: they are off")
    batch_database: str | None = Field(None, description="postgresql://… instead, for files and batches")
    batch_max_file_mb: int = Field(200, ge=1, le=2048, description="largest file that may be uploaded")
    batch_max_tenant_mb: int = Field(0, ge=0, description="uploaded files that a tenant may store; 0: any number")
    batch_max_in_flight: int = Field(16, ge=1, le=4096, description="sequences of batches that may run at a time")
    batch_model_wait_s: float = Field(600.0, ge=0, description="seconds that lines wait for a model that is not served")
    max_bodies_mb: int = Field(256, ge=1, description="request bodies that a frontend holds at a time, all together")
    resume_hold_s: float = Field(
        30.0, ge=0, description="seconds that a resumable stream is kept without a reader; 0: there are none"
    )
    resume_buffer_mb: int = Field(256, ge=1, description="events of resumable streams that a frontend keeps")
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral", "none"] = Field(
        "auto", description="how models write calls of tools; auto: as their chat templates tell; none: calls stay text"
    )
    reasoning_parser: Literal["auto", "think", "none"] = Field(
        "auto", description="think: split <think>…</think> from answers; auto: where the chat template knows it"
    )
    plan_log: Path | None = Field(None, description="folder for a log of every input and plan (holds prompts)")
    plan_log_segment_mb: int = Field(64, ge=1, description="size at which the plan log begins a new file")
    plan_log_segments: int = Field(8, ge=1, description="files of the plan log that are kept")

    @field_validator("executor_bind")
    @classmethod
    def _known_transport(cls, value: str) -> str:
        if not value.startswith(("tcp://", "ipc://")):
            raise ValueError("must begin with tcp:// or ipc://")
        return value

    @model_validator(mode="after")
    def _belong_together(self) -> SchedulerSettings:
        self._close_the_door()
        executor_host = urlsplit(self.executor_bind).hostname or ""
        exposed = self.executor_bind.startswith("tcp://") and not is_loopback(executor_host)
        if exposed and self.curve_secret_key is None and not self.allow_insecure_bind:
            raise ValueError(
                f"{self.executor_bind} is open to the network: give curve-secret-key, or allow-insecure-bind"
            )
        if (self.curve_secret_key is None) != (self.curve_client_keys is None):
            raise ValueError("curve-secret-key and curve-client-keys go together")
        if self.admin_port is not None and self.admin_key_file is None and not is_loopback(self.admin_host):
            raise ValueError(f"admin-host {self.admin_host} is open to the network: give admin-key-file")
        if self.heartbeat_timeout_s * 1000 < 2 * self.heartbeat_ms:
            raise ValueError("heartbeat-timeout-s must be at least twice heartbeat-ms")
        if self.batch_database is not None and not self.batch_database.startswith(("postgresql://", "postgres://")):
            raise ValueError("batch-database must begin with postgresql://")
        for tenant, weight in self.tenant_weights.items():
            if not weight > 0:
                raise ValueError(f"tenant-weights: {tenant!r} needs a weight above 0")
        return self

    @property
    def serves_batches(self) -> bool:
        return self.batch_dir is not None or self.batch_database is not None

    def _close_the_door(self) -> None:
        """What hangs on API keys: who may listen without, and what holds with them."""
        if self.api_keys is None and self.api_key is None:
            if not (self.allow_no_api_keys or is_loopback(self.host)):
                text = "opens the REST API to the network: set GILIR_API_KEY, or GILIR_API_KEYS to a file of keys, or"
                text = f"{text} GILIR_ALLOW_NO_API_KEYS=true"
                raise ValueError(f"host {self.host} {text}")
        elif "isolate_tenants" not in self.model_fields_set:
            self.isolate_tenants = True
        secret = "" if self.api_key is None else self.api_key.get_secret_value()
        if self.api_key is not None and not (secret.isascii() and secret.isprintable() and secret.split() == [secret]):
            raise ValueError("api-key must be printable ASCII characters without spaces")
        if self.max_bodies_mb < self.max_body_mb:
            raise ValueError("max-bodies-mb must be at least max-body-mb")

    def scheduler_config(self) -> SchedulerConfig:
        """The part that the core needs."""
        values: dict[str, Any] = {}
        for choice in fields(SchedulerConfig):
            value = getattr(self, choice.name)
            values[choice.name] = type(choice.default)(value) if isinstance(choice.default, StrEnum) else value
        return SchedulerConfig(**values)
