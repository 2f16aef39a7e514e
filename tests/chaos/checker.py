"""Compares every answer with the undisturbed one. Pure: it is fed records, also doctored ones by its own tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from tests.chaos.client import Answer, End
from tests.chaos.schedule import Ask


class Fault(StrEnum):
    """What can be wrong."""

    LOST = "lost"
    """A request has no end, or not all of its answer, or an error that nothing explains."""
    CHANGED = "changed"
    """The answer is another one."""
    DUPLICATED = "duplicated"
    """Something came twice."""
    LEFT_OVER = "left over"
    """The services did not return to rest."""


class Excuse(StrEnum):
    """Why a request may end with an error."""

    POISON = "poison"
    FRONTEND = "frontend"
    """Its frontend was killed."""
    HOLD = "hold"
    """There was no executor for longer than the hold time."""
    SHUTDOWN = "shutdown"
    """The scheduler was told to end."""
    DEAD = "dead"
    """The scheduler was killed."""


ALLOWED = {
    Excuse.POISON: {(500, "failed")},
    Excuse.FRONTEND: set(),
    Excuse.HOLD: {(503, "no_executor"), (503, "no_model")},
    Excuse.SHUTDOWN: {(503, "shutting_down")},
    Excuse.DEAD: {(503, "shutting_down"), (503, "no_scheduler"), (503, "service_unavailable")},
}
"""Status and code of the error that each may end with."""
BREAKS = {Excuse.FRONTEND, Excuse.DEAD}
"""With these the connection itself may end."""
STATUS_OF = {"server_error": 500, "service_unavailable": 503, "rate_limit_error": 429, "invalid_request_error": 400}
"""The status that an error in mid-stream stands for."""


@dataclass(frozen=True)
class Finding:
    fault: Fault
    text: str
    ask: int | None = None


@dataclass
class Choice:
    """One sequence of an answer, put together."""

    text: str = ""
    finish_reason: str | None = None
    stop_reason: Any = None
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    num_finishes: int = 0


@dataclass
class Told:
    """An answer, put together."""

    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, int] | None = None
    error: dict[str, Any] | None = None


def of_plain(body: Any) -> Told:
    """Put together an answer that came as one JSON object. Raises KeyError and TypeError where it has another shape."""
    told = Told(usage=_usage(body["usage"]))
    for raw in body["choices"]:
        text = raw["text"] if "text" in raw else raw["message"]["content"]
        choice = Choice(text, raw["finish_reason"], raw["stop_reason"], num_finishes=1)
        _add_logprobs(choice, raw["logprobs"])
        told.choices[raw["index"]] = choice
    return told


def of_stream(answer: Answer) -> Told:
    """Put together a stream. Raises KeyError and TypeError where an event has another shape."""
    told = Told()
    for _, event in answer.events:
        if "error" in event:
            told.error = event["error"]
            continue
        if event.get("usage") is not None:
            told.usage = _usage(event["usage"])
        for raw in event["choices"]:
            choice = told.choices.setdefault(raw["index"], Choice())
            choice.text += raw["text"] if "text" in raw else raw["delta"].get("content") or ""
            _add_logprobs(choice, raw["logprobs"])
            if raw["finish_reason"] is not None:
                choice.finish_reason, choice.stop_reason = raw["finish_reason"], raw["stop_reason"]
                choice.num_finishes += 1
    return told


def _usage(raw: dict[str, Any]) -> dict[str, int]:
    """What of it does not depend on the cache."""
    return {name: raw[name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


def _add_logprobs(choice: Choice, raw: dict[str, list[Any]] | None) -> None:
    for name, values in (raw or {}).items():
        if values is not None:
            choice.logprobs.setdefault(name, []).extend(values)


def check(ask: Ask, answer: Answer, expected: Told | None, excuses: set[Excuse]) -> list[Finding]:
    """Everything that is wrong with one answer. `expected`: None for a poisoned request, which has no right answer."""
    try:
        return [Finding(fault, text, ask.number) for fault, text in _faults(ask, answer, expected, excuses)]
    except (KeyError, TypeError, AttributeError) as error:
        return [Finding(Fault.CHANGED, f"an answer of another shape: {error!r}", ask.number)]


def _faults(ask: Ask, answer: Answer, expected: Told | None, excuses: set[Excuse]) -> list[tuple[Fault, str]]:
    if answer.end is End.REFUSED:
        return [] if excuses & {Excuse.SHUTDOWN, Excuse.DEAD} else [(Fault.LOST, "the connection was refused")]
    if answer.end in (End.OPEN, End.STUCK):
        return [(Fault.LOST, f"no end after {answer.ended - answer.began:.1f} s, status {answer.status}")]
    told = of_stream(answer) if answer.events else Told()
    found = _doubles(answer, told)
    if expected is not None:
        found += _mismatches(told, expected, is_prefix=True)
    if answer.end is End.LEFT:
        return found
    if answer.end is End.BROKEN:
        unheard = not answer.status and Excuse.SHUTDOWN in excuses
        if not excuses & BREAKS and not unheard:
            found.append((Fault.LOST, f"the connection broke after {len(answer.events)} events"))
        return found
    if ask.streams and answer.status == 200 and not answer.num_done:
        found.append((Fault.LOST, "the stream did not say that it is over"))
    error, status = told.error, answer.status
    if status != 200:
        error = (answer.json or {}).get("error")
        if error is None:
            return [*found, (Fault.LOST, f"status {status} without an error in the body")]
    elif error is not None:
        status = STATUS_OF.get(error["type"], 0)
    if error is not None:
        return found + _explained(status, error, excuses)
    if expected is None:
        return [*found, (Fault.CHANGED, "a poisoned request was answered")]
    whole = told if ask.streams else of_plain(answer.json)
    return found + _incomplete(whole, expected) + _mismatches(whole, expected, is_prefix=False)


def _explained(status: int, error: dict[str, Any], excuses: set[Excuse]) -> list[tuple[Fault, str]]:
    """An error must be one that an excuse allows, and say something."""
    if not error["message"]:
        return [(Fault.LOST, f"an error without a message: {error}")]
    if any((status, error["code"]) in ALLOWED[excuse] for excuse in excuses):
        return []
    return [(Fault.LOST, f"an error that nothing explains: {status} {error}")]


def _doubles(answer: Answer, told: Told) -> list[tuple[Fault, str]]:
    found = []
    if answer.num_done > 1 or answer.num_trailing:
        found.append((Fault.DUPLICATED, "something came after the end of the stream"))
    for index, choice in told.choices.items():
        if choice.num_finishes > 1:
            found.append((Fault.DUPLICATED, f"choice {index} finished {choice.num_finishes} times"))
    return found


def _incomplete(told: Told, expected: Told) -> list[tuple[Fault, str]]:
    missing = sorted(set(expected.choices) - {i for i, choice in told.choices.items() if choice.num_finishes})
    return [(Fault.LOST, f"choices {missing} did not finish")] if missing else []


def _mismatches(told: Told, expected: Told, *, is_prefix: bool) -> list[tuple[Fault, str]]:
    """`is_prefix`: what came may be cut off anywhere."""
    found = []
    for index, choice in told.choices.items():
        right = expected.choices.get(index)
        if right is None:
            found.append((Fault.CHANGED, f"there is a choice {index}"))
            continue
        fault = text_fault(choice.text, right.text, is_prefix=is_prefix and not choice.num_finishes)
        if fault is not None:
            found.append((fault, f"choice {index}: {choice.text[-200:]!r} for {right.text[-200:]!r}"))
        elif choice.num_finishes and (choice.finish_reason, choice.stop_reason) != (
            right.finish_reason,
            right.stop_reason,
        ):
            told_end, right_end = (choice.finish_reason, choice.stop_reason), (right.finish_reason, right.stop_reason)
            found.append((Fault.CHANGED, f"choice {index} ended with {told_end} for {right_end}"))
        elif not _logprobs_fit(choice, right, is_prefix=is_prefix and not choice.num_finishes):
            found.append((Fault.CHANGED, f"choice {index}: other logprobs"))
    if told.usage is not None and told.usage != expected.usage and not is_prefix:
        found.append((Fault.CHANGED, f"usage {told.usage} for {expected.usage}"))
    return found


def _logprobs_fit(choice: Choice, right: Choice, *, is_prefix: bool) -> bool:
    if not is_prefix:
        return choice.logprobs == right.logprobs
    return all(values == right.logprobs.get(name, [])[: len(values)] for name, values in choice.logprobs.items())


def text_fault(text: str, right: str, *, is_prefix: bool) -> Fault | None:
    """What is wrong with a text: a stretch of it came twice, a stretch is missing, or it is another one."""
    if text == right or (is_prefix and right.startswith(text)):
        return None
    common = next((i for i, (a, b) in enumerate(zip(text, right, strict=False)) if a != b), min(len(text), len(right)))
    surplus = len(text) - len(right)
    if is_prefix:
        # Where it was cut off is not known: a repetition begins anew with what has been said already.
        rest = text[common:]
        if any(right[start:].startswith(rest) for start in range(common)) and len(rest) > 3:
            return Fault.DUPLICATED
        return Fault.CHANGED
    for start in range(common, -1, -1):
        if surplus > 0 and text[start + surplus :] == right[start:]:
            repeated = text[start : start + surplus]
            return Fault.DUPLICATED if repeated in right else Fault.CHANGED
        if surplus < 0 and text[start:] == right[start - surplus :]:
            return Fault.LOST
    return Fault.CHANGED
