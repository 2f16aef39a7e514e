"""A response, whole or in events, made of what a chat's call says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from scheduler_svc.frontend.call import Call
from scheduler_svc.frontend.output import Entry
from scheduler_svc.frontend.parsing.parts import CallStart, Part
from scheduler_svc.frontend.responses.output import Event, Output, ReasoningTokens
from scheduler_svc.frontend.responses.scores import PlacedLogprobs
from scheduler_svc.frontend.shapes import ChatShape
from scheduler_svc.frontend.sse import ChunkWriter
from scheduler_svc.http.errors import ApiError


class ResponseShape(ChatShape):
    """A chat's shape whose whole message is told in parts, in their order."""

    object_name = "response"
    id_prefix = "resp_"

    def logprobs(self, entries: Sequence[Entry]) -> dict[str, Any]:
        """A chat's, each as JSON, and where its token begins."""
        written = [orjson.dumps(entry) for entry in self._logprobs.chat(entries)]
        return {"offsets": [entry.offset for entry in entries], "entries": written}

    def gathered_logprobs(self) -> PlacedLogprobs:
        return PlacedLogprobs()

    def message(self, parts: list[Part]) -> dict[str, Any]:
        return {"parts": parts}


class ResponseForm:
    """How `/v1/responses` tells an answer. For one call."""

    def __init__(self, told: dict[str, Any], end_id: int | None) -> None:
        """`told`: members that repeat the request; `end_id`: of the token that ends reasoning, if there is one."""
        self._told, self._end_id = told, end_id

    def tokens(self) -> ReasoningTokens:
        return ReasoningTokens(self._end_id)

    def response(self, call: Call, status: str, output: list[dict[str, Any]], **members: Any) -> dict[str, Any]:
        """The object. `members`: in the place of what it has when it begins."""
        sampling = call.task.parameters.sampling
        return {
            "id": call.id,
            "object": call.task.shape.object_name,
            "created_at": call.created,
            "status": status,
            "model": call.task.model.name,
            "output": output,
            "usage": None,
            "error": None,
            "incomplete_details": None,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "background": False,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            **self._told,
            **members,
        }

    def ended(self, call: Call, output: Output, reason: str, usage: dict[str, Any], reasoned: int) -> dict[str, Any]:
        """The object when its call has ended. `reason`: a chat's finish reason."""
        cut = reason == "length"
        return self.response(
            call,
            "incomplete" if cut else "completed",
            output.items,
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            usage={
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": reasoned},
                "total_tokens": usage["total_tokens"],
            },
        )

    # --- what serving asks for ---

    def whole(self, call: Call, answer: dict[str, Any]) -> dict[str, Any]:
        """From the answer of the call."""
        (choice,) = answer["choices"]
        output, tokens = Output(call.task.request_id, choice["logprobs"]), self.tokens()
        reason, usage = choice["finish_reason"], answer["usage"]
        for part in choice["parts"]:
            output.add(part)
        output.close(item_status(reason))
        tokens.add(choice.get("token_ids", []))
        return self.ended(call, output, reason, usage, tokens.count(output, usage["completion_tokens"]))

    def writer(self, call: Call) -> EventWriter:
        return EventWriter(self, call)


def item_status(reason: str) -> str:
    """Of the last item, when its answer has ended."""
    return "incomplete" if reason == "length" else "completed"


class EventWriter(ChunkWriter):
    """Takes the chunks of a chat, and writes the events of a response."""

    def __init__(self, form: ResponseForm, call: Call) -> None:
        super().__init__(call.id, call.created, call.task.model.name, call.task.shape, with_usage=True)
        self._form, self._call = form, call
        self._scores = PlacedLogprobs() if call.task.logprobs else None
        self._output, self._tokens = Output(call.task.request_id, self._scores), form.tokens()
        self._reason = ""
        self._num_events = 0

    def open_choice(self, choice: int, usage: dict[str, Any] | None) -> bytes:
        """Tell that it has begun."""
        if not self._num_events:
            response = self._form.response(self._call, "in_progress", [])
            for kind in ("response.created", "response.in_progress"):
                self._tell([{"type": kind, "response": response}])
        return b""

    def add(self, choice: int, part: Part, told: dict[str, Any], logprobs: Any, usage: dict[str, Any] | None) -> None:
        self.open_choice(choice, usage)
        self._tokens.add(told.get("token_ids", []))
        if self._scores is not None and logprobs is not None:
            self._scores.add(logprobs)
        if isinstance(part, CallStart) or part.text:
            self._tell(self._output.add(part))

    def add_finish(
        self,
        choice: int,
        part: Part,
        told: dict[str, Any],
        logprobs: Any,
        finish_reason: str,
        stop_reason: str | int | None,
        usage: dict[str, Any] | None,
    ) -> None:
        self.add(choice, part, told, logprobs, usage)
        self._reason = finish_reason

    def add_done(self, usage: dict[str, Any] | None) -> None:
        """The open item's end, and the whole response."""
        assert usage is not None
        self._tell(self._output.close(item_status(self._reason)))
        reasoned = self._tokens.count(self._output, usage["completion_tokens"])
        response = self._form.ended(self._call, self._output, self._reason, usage, reasoned)
        self._tell([{"type": f"response.{response['status']}", "response": response}])

    def add_error(self, error: ApiError) -> None:
        """The end of a stream that went wrong."""
        self._output.close("incomplete")
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        told = {"code": code, "message": error.message}
        response = self._form.response(self._call, "failed", self._output.items, error=told)
        self._tell([{"type": "response.failed", "response": response}])

    def _tell(self, events: list[Event]) -> None:
        for event in events:
            numbered = {"type": event["type"], "sequence_number": self._num_events, **event}
            self.unsent.append(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(numbered)))
            self._num_events += 1
