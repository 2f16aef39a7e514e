"""Opens a span for each generating request, and ends it when its answer has been sent. Imports OpenTelemetry."""

from __future__ import annotations

import time

import structlog
from opentelemetry import propagate
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, TracerProvider, set_span_in_context
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from common.wire import SequenceTimes
from scheduler_svc.frontend.call import Call
from scheduler_svc.frontend.tracing.attributes import failure_of, of_answer, of_task

OPERATIONS = {
    "/v1/completions": "text_completion",
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
}
"""`gen_ai.operation.name` by path."""
MAX_SEQUENCES = 16
"""So many sequences of a request have spans for their steps."""


class Trace:
    """One request's span. The route tells it of the call, the middleware of all else."""

    def __init__(self, tracer: Tracer, span: Span, operation: str) -> None:
        self._tracer, self._span, self._operation = tracer, span, operation
        self._begun_at = time.perf_counter()
        self._submitted_ns, self._prepare_s = 0, 0.0
        self._first_s: float | None = None
        self._call: Call | None = None
        self._status = 0

    def follow(self, call: Call) -> None:
        """The request has become a call, whose sequences have just been submitted."""
        self._call, self._submitted_ns, self._prepare_s = call, time.time_ns(), self._elapsed_s()
        self._span.update_name(f"{self._operation} {call.task.model.name}")
        self._span.set_attributes(of_task(call.task))

    def sent(self, message: Message) -> None:
        """A part of the answer goes out."""
        if message["type"] == "http.response.start":
            self._status = message["status"]
        elif self._first_s is None:
            self._first_s = self._elapsed_s()

    def end(self, code: str) -> None:
        """The answer is sent, or given up. `code`: of the error that was answered, if any."""
        span, call = self._span, self._call
        span.set_attribute("gen_ai.server.request.duration", self._elapsed_s())
        if self._status:
            span.set_attribute("http.response.status_code", self._status)
        failure = code or (str(self._status) if self._status >= 400 else "")
        if call is not None:
            failure = failure_of(call) or failure
            if call.generation.gone and not call.done:
                failure = "client_gone"
            span.set_attributes(of_answer(call))
            self._tell_times(call)
        if failure:
            span.set_attribute("error.type", failure)
        if failure and not 400 <= self._status < 500:  # those are the client's own
            span.set_status(Status(StatusCode.ERROR, failure))
        span.end()

    def _elapsed_s(self) -> float:
        return time.perf_counter() - self._begun_at

    def _tell_times(self, call: Call) -> None:
        """Times to the first token and between the others, and the steps, as far as the core has told of them.

        It tells when it ends a sequence. Those that a stop string has ended, or a client that left, it does not end.
        """
        ended = [(i, output.stream.ended) for i, output in enumerate(call.outputs)]
        times = {i: message.times for i, message in ended if message is not None}
        if call.task.parameters.stream and self._first_s is not None:
            self._span.set_attribute("gen_ai.server.time_to_first_token", self._first_s)
        elif times:
            first_us = min(step.queue_us + step.prefill_us for step in times.values())
            self._span.set_attribute("gen_ai.server.time_to_first_token", self._prepare_s + first_us / 1e6)
        num_gaps = sum(max(0, call.outputs[i].num_tokens - 1) for i in times)
        if num_gaps:
            mean_us = sum(step.decode_us for step in times.values()) / num_gaps
            self._span.set_attribute("gen_ai.server.time_per_output_token", mean_us / 1e6)
        for index, step in list(times.items())[:MAX_SEQUENCES]:
            self._tell_steps(index, step)

    def _tell_steps(self, index: int, times: SequenceTimes) -> None:
        """A span for each step that a sequence has made."""
        parent, at = set_span_in_context(self._span), self._submitted_ns
        told = {
            "gilir.sequence": index,
            "gilir.num_preemptions": times.num_preemptions,
            "gilir.num_failovers": times.num_failovers,
        }
        for name, step_us in (("queue", times.queue_us), ("prefill", times.prefill_us), ("decode", times.decode_us)):
            until = at + 1000 * step_us
            if step_us:
                self._tracer.start_span(name, parent, attributes=told, start_time=at).end(until)
            at = until


class TraceRequests:
    """Around the routes, behind the check of API keys: who has none makes no spans."""

    def __init__(self, app: ASGIApp, provider: TracerProvider) -> None:
        self._app, self._tracer = app, provider.get_tracer("gilir")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        operation = OPERATIONS.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if operation is None:
            await self._app(scope, receive, send)
            return
        span = self._begin(scope, operation)
        if not span.is_recording():
            await self._app(scope, receive, send)
            return
        trace = scope["gilir.trace"] = Trace(self._tracer, span, operation)

        async def send_traced(message: Message) -> None:
            trace.sent(message)
            await send(message)

        try:
            await self._app(scope, receive, send_traced)
        except BaseException as error:
            trace.end(type(error).__name__)
            raise
        trace.end(scope.get("gilir.log", {}).get("code") or "")

    def _begin(self, scope: Scope, operation: str) -> Span:
        """A span below the client's, where a `traceparent` names one (W3C Trace Context)."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        asked = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "gilir"}
        server = scope.get("server")
        if server is not None:
            asked |= {"server.address": server[0], "server.port": server[1]}
        span = self._tracer.start_span(operation, propagate.extract(headers), SpanKind.SERVER, asked)
        structlog.contextvars.bind_contextvars(trace_id=f"{span.get_span_context().trace_id:032x}")
        return span
