"""OpenTelemetry traces: what a span of a request tells, whose child it is, and when there is none."""

from __future__ import annotations

import asyncio
import sys
import threading
import uuid
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_core import Answer, FakeCore
from frontend_service import BYTE_LEVEL, run_service, wait_until
from starlette.testclient import TestClient
from structlog.testing import capture_logs
from tokenizers_for_tests import CHATML, byte_level, card

from common.wire import EndReason, SequenceTimes
from scheduler_svc.frontend import app as app_module
from scheduler_svc.frontend.settings import FrontendSettings
from scheduler_svc.frontend.tracing.provider import close_provider, is_wanted, open_provider

pytest.importorskip("opentelemetry.sdk", reason="the extra otel is not installed")
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from scheduler_svc.frontend.tracing.middleware import Trace

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
TIMES = SequenceTimes(queue_us=250_000, prefill_us=500_000, decode_us=2_000_000, num_preemptions=2, num_failovers=1)
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 40, "temperature": 0.5}


class Traced:
    """A frontend in this process, before a scripted core, whose spans stay in memory."""

    def __init__(self, client: TestClient, core: FakeCore, exporter: InMemorySpanExporter) -> None:
        self.client, self.core, self._exporter = client, core, exporter

    def answer(self, *tokens: int, reason: EndReason = EndReason.LENGTH, **fields: Any) -> None:
        self.core.answer(Answer(tokens, reason, cached_tokens=3, times=TIMES, **fields))

    def chat(self, headers: dict[str, str] | None = None, **fields: Any) -> Any:
        return self.client.post("/v1/chat/completions", json=BODY | fields, headers=headers)

    def spans(self, count: int) -> list[ReadableSpan]:
        """Those that have ended, the request's own last."""
        wait_until(lambda: len(self._exporter.get_finished_spans()) == count)
        return list(self._exporter.get_finished_spans())


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    address = f"ipc://{tmp_path_factory.mktemp('ipc')}/{uuid.uuid4().hex[:8]}"
    core = FakeCore(address, [card(BYTE_LEVEL, byte_level(), CHATML)])
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app_module, "open_provider", lambda: provider)
        app = app_module.create_app(FrontendSettings(core=address))
    with TestClient(app, base_url="http://localhost") as client:
        wait_until(lambda: bool(client.get("/v1/models").json()["data"]))
        yield Traced(client, core, exporter)
    core.close()


@pytest.fixture
def traced(running: Traced) -> Traced:
    running.core.reset()
    running._exporter.clear()
    return running


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


@pytest.mark.parametrize("stream", [False, True])
def test_a_span_tells_of_the_request_and_its_answer_and_is_a_child_of_the_clients(traced: Traced, stream: bool) -> None:
    traced.answer(7, 8, 9, 10, 11)
    assert traced.chat(TRACEPARENT, stream=stream, seed=5, top_p=0.9).status_code == 200
    *_, span = traced.spans(4)
    assert span.name == f"chat {BYTE_LEVEL}" and span.kind is SpanKind.SERVER
    assert span.parent is not None and f"{span.parent.span_id:016x}" == PARENT
    assert f"{span.context.trace_id:032x}" == TRACE and span.status.status_code is StatusCode.UNSET
    told = attributes(span)
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "gilir",
        "gen_ai.request.model": BYTE_LEVEL,
        "gen_ai.request.max_tokens": 40,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.seed": 5,
        "gen_ai.request.stream": stream,
        "gen_ai.response.model": BYTE_LEVEL,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 3,
        "gen_ai.server.time_per_output_token": 0.5,
        "http.response.status_code": 200,
    }
    assert {name: told.get(name) for name in expected} == expected
    assert told["gen_ai.response.id"].startswith("chatcmpl-") and told["gen_ai.usage.input_tokens"] > 0
    first = told["gen_ai.server.time_to_first_token"]
    assert 0 < first <= told["gen_ai.server.request.duration"] if stream else first > 0.75
    assert "error.type" not in told


def test_responses_are_chats(traced: Traced) -> None:
    traced.answer(7, 8)
    answer = traced.client.post("/v1/responses", json={"input": "Hello", "max_output_tokens": 40})
    assert answer.status_code == 200, answer.text
    *_, span = traced.spans(4)
    assert span.name == f"chat {BYTE_LEVEL}"
    assert attributes(span)["gen_ai.response.id"] == answer.json()["id"]


def test_the_steps_of_each_sequence_are_spans_below_it(traced: Traced) -> None:
    traced.answer(7, 8)
    assert traced.chat(n=2).status_code == 200
    *steps, span = traced.spans(7)
    assert span.parent is None and attributes(span)["gen_ai.request.choice.count"] == 2
    assert [step.name for step in steps] == ["queue", "prefill", "decode"] * 2
    for step in steps:
        assert step.parent is not None and step.parent.span_id == span.context.span_id
        assert attributes(step)["gilir.num_failovers"] == 1 and attributes(step)["gilir.num_preemptions"] == 2
    assert [attributes(step)["gilir.sequence"] for step in steps] == [0, 0, 0, 1, 1, 1]
    seconds = [((step.end_time or 0) - (step.start_time or 0)) / 1e9 for step in steps[:3]]
    assert seconds == pytest.approx([0.25, 0.5, 2.0]) and steps[1].start_time == steps[0].end_time


@pytest.mark.parametrize(
    ("reason", "status", "kind"),
    [
        (EndReason.QUEUE_FULL, 429, StatusCode.UNSET),
        (EndReason.NO_EXECUTOR, 503, StatusCode.ERROR),
        (EndReason.FAILED, 500, StatusCode.ERROR),
    ],
)
def test_an_error_has_its_type(traced: Traced, reason: EndReason, status: int, kind: StatusCode) -> None:
    traced.core.answer(Answer(reason=reason, message="it could not be", times=SequenceTimes(queue_us=500_000)))
    assert traced.chat().status_code == status
    step, span = traced.spans(2)
    told = attributes(span)
    assert step.name == "queue" and (told["error.type"], told["http.response.status_code"]) == (
        reason.name.lower(),
        status,
    )
    assert span.status.status_code is kind


def test_an_error_in_a_stream_has_its_type_though_its_status_is_200(traced: Traced) -> None:
    traced.answer(7, 8, reason=EndReason.FAILED, message="it broke")
    traced.core.interval_s = 0.02
    assert "it broke" in traced.chat(stream=True).text
    *_, span = traced.spans(4)
    assert attributes(span)["error.type"] == "failed" and span.status.status_code is StatusCode.ERROR


@pytest.mark.parametrize(("gone", "failure"), [(True, "client_gone"), (False, None)])
def test_who_leaves_is_told_and_a_sequence_that_goes_on_has_no_finish_reason(gone: bool, failure: str | None) -> None:
    """A resumable stream goes on without its client."""
    provider, exporter = TracerProvider(), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("a test")
    running = SimpleNamespace(finished=False, finish_reason=None, failure=None, num_tokens=3)
    running.stream = SimpleNamespace(ended=None)
    ended = SimpleNamespace(**{**vars(running), "finished": True, "finish_reason": "stop"})
    usage = {"prompt_tokens": 2, "completion_tokens": 6, "prompt_tokens_details": {"cached_tokens": 0}}
    call: Any = SimpleNamespace(id="cmpl-1", usage=lambda: usage, outputs=(running, ended), done=False)
    call.generation = SimpleNamespace(gone=gone)
    call.task = SimpleNamespace(model=SimpleNamespace(name="m"), parameters=SimpleNamespace(stream=True))
    trace = Trace(tracer, tracer.start_span("chat"), "chat")
    trace._call = call
    trace.end("")
    (span,) = exporter.get_finished_spans()
    told = attributes(span)
    assert told["gen_ai.response.finish_reasons"] == ("stop",) and told.get("error.type") == failure


def test_a_refused_request_has_a_span_without_what_the_client_made_up(traced: Traced) -> None:
    assert traced.chat(model="made-up").status_code == 404
    (span,) = traced.spans(1)
    assert span.name == "chat" and attributes(span)["error.type"] == "model_not_found"
    assert "made-up" not in str(attributes(span)) and span.status.status_code is StatusCode.UNSET


def test_what_is_not_sampled_or_generates_nothing_makes_no_span(traced: Traced) -> None:
    traced.answer(7)
    assert traced.chat({"traceparent": f"00-{TRACE}-{PARENT}-00"}).status_code == 200
    for path in ("/metrics", "/health", "/v1/models"):
        traced.client.get(path)
    traced.client.get("/v1/chat/completions")
    assert not traced._exporter.get_finished_spans()


@pytest.mark.parametrize(
    ("environment", "wanted"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://x:4318/v1/traces"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318", "OTEL_SDK_DISABLED": "true"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://x:4318", "OTEL_TRACES_EXPORTER": "none"}, False),
    ],
)
def test_the_environment_says_whether(environment: dict[str, str], wanted: bool) -> None:
    assert is_wanted(environment) is wanted


def test_without_an_endpoint_requests_pass_no_tracing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)  # an import would fail, and be logged
    for endpoint, complaints in (("", 0), ("http://127.0.0.1:1", 1)):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
        with capture_logs() as logs:
            assert open_provider() is None
        assert len([line for line in logs if ".[otel]" in line["event"]]) == complaints
    app = app_module.create_app(FrontendSettings(core="ipc://nowhere"))
    assert "TraceRequests" not in str(app.user_middleware)


@pytest.mark.nightly
def test_spans_are_exported_over_otlp_as_the_environment_says(tmp_path: Path) -> None:
    received: list[tuple[str, str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append((self.path, self.headers["x-tenant"], body))
            self.send_response(200)
            self.end_headers()

    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{server.server_port}",
        "OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=a",
        "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
        "OTEL_SERVICE_NAME": "gilir-of-a-test",
        "OTEL_BSP_SCHEDULE_DELAY": "50",
    }
    with run_service(tmp_path, environment=environment) as service:
        service.core.answer(Answer([7, 8], times=TIMES))
        assert service.chat().status_code == 200
        wait_until(lambda: bool(received))
    server.shutdown()
    server.server_close()
    path, tenant, body = received[0]
    assert (path, tenant) == ("/v1/traces", "a")
    assert b"gilir-of-a-test" in body and f"chat {BYTE_LEVEL}".encode() in body


@pytest.mark.parametrize("name", ["OTEL_BSP_MAX_QUEUE_SIZE", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT"])
def test_a_variable_that_cannot_be_read_ends_no_service(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv(name, "-1")
    with capture_logs() as logs:
        assert open_provider() is None
    assert [line["log_level"] for line in logs] == ["error"]


def test_the_end_does_not_wait_for_an_endpoint_that_does_not_answer() -> None:
    answered = threading.Event()

    class Hung(InMemorySpanExporter):
        def shutdown(self) -> None:
            answered.wait(60)

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(Hung()))
    asyncio.run(close_provider(provider, 0.01))
    assert not answered.is_set()
    answered.set()
