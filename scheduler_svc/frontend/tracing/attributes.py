"""What a span tells of a call, under the names of OpenTelemetry's semantic conventions for generative AI.

No prompt, no answer, no key, and nothing that a client made up.
"""

from __future__ import annotations

from common.wire import EndReason
from scheduler_svc.frontend.call import Call, Task

Value = str | int | float | bool | list[str]


def of_task(task: Task) -> dict[str, Value]:
    """What is asked for."""
    parameters, sampling = task.parameters, task.samplings[0]
    asked: dict[str, Value] = {
        "gen_ai.request.model": task.model.name,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.stream": parameters.stream,
    }
    if sampling.top_k:
        asked["gen_ai.request.top_k"] = sampling.top_k
    if parameters.n > 1:
        asked["gen_ai.request.choice.count"] = parameters.n
    if parameters.seeded and sampling.seed < 1 << 63:  # attributes are signed
        asked["gen_ai.request.seed"] = sampling.seed
    return asked


def of_answer(call: Call) -> dict[str, Value]:
    """What has come of it so far. Sequences whose client has left, or will resume them, have no finish reason."""
    usage, ended = call.usage(), [output for output in call.outputs if output.finished or output.failure is not None]
    return {
        "gen_ai.response.id": call.id,
        "gen_ai.response.model": call.task.model.name,
        "gen_ai.response.finish_reasons": [output.finish_reason or "error" for output in ended],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": usage["completion_tokens"],
        "gen_ai.usage.cache_read.input_tokens": usage["prompt_tokens_details"]["cached_tokens"],
    }


def failure_of(call: Call) -> str:
    """How its first sequence failed that did, as an `error.type`; empty where none has."""
    failures = (output.failure for output in call.outputs)
    return next((EndReason(failure.reason).name.lower() for failure in failures if failure is not None), "")
