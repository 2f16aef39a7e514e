"""From the standard environment variables of OpenTelemetry to a tracer provider, or to none."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING

import structlog

from scheduler_svc.frontend.health import VERSION

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

log = structlog.get_logger()

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


CLOSING_S = 2.0
"""For the last spans to be taken by their endpoint: one that does not answer is not waited for."""


def is_wanted(environment: Mapping[str, str]) -> bool:
    """Whether an endpoint is named and traces are not switched off (OpenTelemetry's environment specification)."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporter = environment.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    return exporter == "otlp" and any(environment.get(name, "").strip() for name in ENDPOINTS)


def open_provider() -> TracerProvider | None:
    """The provider that this process's environment asks for; None, and a line in the log, where it cannot be had.

    Sampler, batching, headers and limits follow the other `OTEL_…` variables, which the SDK reads by itself.
    """
    if not is_wanted(os.environ):
        return None
    try:
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        exporter = _exporter(os.environ)
        ours = Resource.create({"service.name": "gilir", "service.version": VERSION})
        provider = TracerProvider(resource=ours.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(exporter))
    except ImportError as error:
        log.warning("no traces: pip install -e '.[otel]' in Gilir's folder", error=str(error))
        return None
    except Exception as error:  # a variable that the SDK cannot read ends no service
        log.error("no traces: an OTEL_… variable is wrong", error=str(error))
        return None
    return provider


async def close_provider(provider: TracerProvider, patience_s: float = CLOSING_S) -> None:
    """Send what is left. The SDK itself would try for `OTEL_EXPORTER_OTLP_TIMEOUT`, longer than a service may take."""
    closing = threading.Thread(target=provider.shutdown, daemon=True)
    closing.start()
    await asyncio.to_thread(closing.join, patience_s)


def _exporter(environment: Mapping[str, str]) -> SpanExporter:
    """For the protocol that the environment names. gRPC needs `opentelemetry-exporter-otlp-proto-grpc` besides."""
    protocol = next((environment[name] for name in PROTOCOLS if environment.get(name)), "http/protobuf")
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        grpc: SpanExporter = GrpcExporter()
        return grpc
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()
