"""Settings of the executor service."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path
from typing import ClassVar, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator, model_validator

from common.curve import warn_if_exposed
from common.settings import ServiceSettings
from executor_svc.fake_model import DEFAULT_MODEL
from executor_svc.handover import TransferSocket
from executor_svc.sockets import Dialing, is_local, read_key


def default_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}"


class ExecutorSettings(ServiceSettings):
    """Flags of `python -m executor_svc`."""

    table: ClassVar[str] = "executor"

    scheduler: str = Field("tcp://127.0.0.1:5570", description="address of the scheduler, tcp:// or ipc://")
    name: str = Field(default_factory=default_name, min_length=1, max_length=256, description="name of this executor")
    curve_server_key: Path | None = Field(None, description="file with the scheduler's public CURVE key (for tcp)")
    curve_secret_key: Path | None = Field(None, description="file with this executor's own CURVE secret key")
    allow_insecure_dial: bool = Field(False, description="dial over a network without CURVE keys")
    scheduler_timeout_s: float = Field(5.0, gt=0, description="a scheduler silent for so long is lost")
    grace_s: float = Field(10.0, ge=0, description="seconds that the scheduler gets at SIGTERM to move the sequences")
    spare: bool = Field(False, description="take sequences only while no other executor of the model does")
    transfer_bind: str = Field(
        "tcp://127.0.0.1:*",
        description="address where other executors read KV that is handed over; none: no hand-overs",
    )
    status_file: Path | None = Field(None, description="a file that exists while this executor is attached")

    model: str = Field("", description="model folder, GGUF file, or hub id; empty: the embedded model")
    served_model_name: str = Field("", max_length=256, description="name for clients; empty: the folder's")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="auto: the model's own")
    quantization: Literal["none", "int8", "fp8"] = Field(
        "none", description="weights in eight bits, as they are loaded"
    )
    device: str = Field("auto", description="auto, cpu, cuda, or auto:N or cuda:N for a GPU's number")
    max_model_len: int | None = Field(None, ge=1, description="longest sequence; none: the model's own")
    cpu_step: Literal["native", "torch"] = Field(
        "native", description="the CPU path: compiled kernels, where the model and the machine allow, or torch"
    )
    batch_invariant: bool = Field(
        False,
        description="on a GPU: a sequence's answer has the same bits in any batch, which is slower; CPUs always do",
    )
    threads: int | None = Field(None, ge=1, description="threads of the CPU path; none: one a core")

    block_size: int = Field(16, ge=1, le=4096, description="token positions of one KV block")
    num_blocks: int | None = Field(None, ge=1, description="KV blocks; none: from kv-cache-gib")
    kv_cache_gib: float | None = Field(
        None, gt=0, description="memory of the KV blocks; none: 1 on a CPU, on a GPU what is left"
    )
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="share of the GPU's memory to be used in all")
    num_host_blocks: int = Field(0, ge=0, description="KV blocks in host memory, for swapping")
    max_num_seqs: int = Field(64, ge=1, le=65535, description="sequences at a time")
    max_num_batched_tokens: int = Field(2048, ge=1, description="tokens of one iteration")
    kv_cache_dtype: Literal["auto", "fp8"] = Field("auto", description="of the KV blocks; auto: the model's own")
    cuda_graphs: bool = Field(True, description="replay iterations as CUDA graphs; without them all runs step by step")

    @field_validator("scheduler")
    @classmethod
    def _known_transport(cls, value: str) -> str:
        if not value.startswith(("tcp://", "ipc://")):
            raise ValueError("must begin with tcp:// or ipc://")
        return value

    @field_validator("transfer_bind")
    @classmethod
    def _one_address(cls, value: str) -> str:
        if value != "none" and not value.startswith(("tcp://", "ipc://")):
            raise ValueError("must begin with tcp:// or ipc://, or be none")
        if (urlsplit(value).hostname or "") in ("*", "0.0.0.0", "::"):
            raise ValueError("must name the address that other executors dial")
        return value

    @field_validator("device")
    @classmethod
    def _known_device(cls, value: str) -> str:
        if not re.fullmatch(r"cpu|(auto|cuda)(:\d{1,3})?", value):
            raise ValueError("must be auto, cpu, cuda, auto:N or cuda:N")
        return value

    @model_validator(mode="after")
    def _keys_beyond_loopback(self) -> ExecutorSettings:
        if (self.curve_server_key is None) != (self.curve_secret_key is None):
            raise ValueError("curve-server-key and curve-secret-key go together")
        if self.curve_server_key is None and not is_local(self.scheduler) and not self.allow_insecure_dial:
            raise ValueError(
                f"scheduler {self.scheduler} is beyond this machine: give curve-server-key, or allow-insecure-dial"
            )
        if self.curve_secret_key is None and not is_local(self.transfer_bind) and not self.allow_insecure_dial:
            raise ValueError(
                f"transfer-bind {self.transfer_bind} is open to the network: give curve-secret-key, or "
                "allow-insecure-dial"
            )
        return self

    @property
    def model_source(self) -> str:
        return self.model or str(DEFAULT_MODEL)

    def dialing(self) -> Dialing:
        """How to reach the scheduler. Raises OSError and ValueError for key files that cannot be used."""
        if self.curve_server_key is None or self.curve_secret_key is None:
            return Dialing(self.scheduler, self.scheduler_timeout_s)
        warn_if_exposed(self.curve_secret_key)
        return Dialing(
            self.scheduler,
            self.scheduler_timeout_s,
            read_key(str(self.curve_server_key), "public"),
            read_key(str(self.curve_secret_key), "secret"),
        )

    def transfer_socket(self) -> TransferSocket | None:
        """Where others read KV blocks; None: nowhere. Raises as `dialing`."""
        if self.transfer_bind == "none":
            return None
        return TransferSocket(self.transfer_bind, self.dialing().secret_key)
