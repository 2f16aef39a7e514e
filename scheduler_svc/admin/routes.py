"""`/admin/executors…` and `/admin/models…`."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from common.wire import Action, Command, ExecutorAccount, Loss, ModelAccount, Outcome, Roster, Survey, Verdict
from scheduler_svc.admin.link import AdminLink
from scheduler_svc.http.body import parse_fields, read_body
from scheduler_svc.http.body_budget import BodyBudget
from scheduler_svc.http.errors import ApiError, invalid, unavailable
from scheduler_svc.http.fields import Fields

router = APIRouter(prefix="/admin")

MAX_BODY_BYTES = 4096
BODIES = BodyBudget(1 << 20)
STALLED_CLIENT_S = 10.0
MAX_TIMEOUT_S = 86_400.0
MAX_NAME = 256


@router.get("/executors")
async def list_executors(request: Request) -> Response:
    """All that are attached, who was lost, and which names are paused though nobody is attached under them."""
    roster = await _survey(request)
    losses = {loss.executor: loss for loss in roster.losses}
    attached = [_describe(account, losses.pop(account.name, None)) for account in roster.executors]
    lost = [{"name": loss.executor, **_describe_loss(loss)} for loss in losses.values()]
    return _json({"object": "list", "data": attached, "lost": lost, "paused": list(roster.paused)})


@router.get("/executors/{name:path}")
async def tell_executor(request: Request, name: str) -> Response:
    roster = await _survey(request)
    loss = next((loss for loss in roster.losses if loss.executor == name), None)
    for account in roster.executors:
        if account.name == name:
            return _json(_describe(account, loss))
    raise _unknown(f"no executor named {name[:MAX_NAME]!r} is attached")


@router.post("/executors/{name:path}/drain")
async def drain_executor(request: Request, name: str) -> Response:
    """Body, optional: `timeout_s`, `release`."""
    fields = await _fields(request)
    timeout_s = fields.number("timeout_s", 0.0, 0.0, MAX_TIMEOUT_S, above=True)
    action = Action.RELEASE if fields.boolean("release", False) else Action.DRAIN
    _refuse_unknown(fields)
    return await _command(request, action, name, timeout_s=timeout_s)


@router.delete("/executors/{name:path}")
async def release_executor(request: Request, name: str) -> Response:
    """Drain it and let it go: its process ends."""
    return await _command(request, Action.RELEASE, name)


@router.post("/executors/{name:path}/resume")
async def resume_executor(request: Request, name: str) -> Response:
    _refuse_unknown(await _fields(request))
    return await _command(request, Action.RESUME, name)


@router.get("/models")
async def list_models(request: Request) -> Response:
    """All that are known; one that nobody has served for the hold time is not offered."""
    roster = await _survey(request)
    return _json({"object": "list", "data": [_describe_model(model) for model in roster.models]})


@router.post("/models/{name:path}/pause")
async def pause_model(request: Request, name: str) -> Response:
    """Drain all executors of a model: what runs ends there, what comes waits."""
    _refuse_unknown(await _fields(request))
    return await _command(request, Action.DRAIN, name, of_model=True)


@router.post("/models/{name:path}/resume")
async def resume_model(request: Request, name: str) -> Response:
    _refuse_unknown(await _fields(request))
    return await _command(request, Action.RESUME, name, of_model=True)


# --- the core ---


async def _survey(request: Request) -> Roster:
    link: AdminLink = request.app.state.link
    answer = await link.ask(Survey)
    if not isinstance(answer, Roster):
        raise unavailable("the scheduler does not answer", "no_scheduler")
    return answer


async def _command(
    request: Request, action: Action, name: str, *, of_model: bool = False, timeout_s: float = 0.0
) -> Response:
    """202 with how the executors stand then; 404 and 409 by the core's verdict."""
    if len(name) > MAX_NAME:
        raise _unknown("no name is so long")
    link: AdminLink = request.app.state.link
    # A timeout of less than a millisecond is still one.
    timeout_ms = max(1, round(timeout_s * 1000)) if timeout_s else 0
    outcome = await link.ask(lambda number: Command(number, action, of_model, name, timeout_ms))
    if not isinstance(outcome, Outcome):
        raise unavailable("the scheduler does not answer", "no_scheduler")
    if outcome.verdict == Verdict.UNKNOWN:
        raise _unknown(outcome.message)
    if outcome.verdict == Verdict.CONFLICT:
        raise ApiError(409, outcome.message, code="wrong_state")
    roster = await _survey(request)
    accounts = [a for a in roster.executors if (a.model if of_model else a.name) == name]
    states = [{"name": account.name, "state": account.state, "running": account.running} for account in accounts]
    return _json({"object": "list", "data": states}, 202)


# --- JSON ---


async def _fields(request: Request) -> Fields:
    """The fields of the body; none where it is empty."""
    with BODIES.hold() as held:
        body = await read_body(request, held, MAX_BODY_BYTES, STALLED_CLIENT_S)
    return parse_fields(body) if body.strip() else Fields({})


def _refuse_unknown(fields: Fields) -> None:
    """A word that was mistyped must not drain an executor in another way than was meant."""
    for name in fields.unknown():
        raise invalid(name, f"{name[:MAX_NAME]}: there is no such field")


def _unknown(text: str) -> ApiError:
    return ApiError(404, text, code="not_found")


def _describe(account: ExecutorAccount, loss: Loss | None) -> dict[str, Any]:
    return {
        "name": account.name,
        "object": "executor",
        "epoch": account.epoch,
        "model": account.model,
        "fingerprint": account.fingerprint.hex(),
        "device": account.device,
        "state": account.state,
        "spare": account.spare,
        "seats": account.seats,
        "running": account.running,
        "kv_blocks": account.kv_blocks,
        "kv_blocks_used": account.kv_blocks_used,
        "iterations": account.iterations,
        "iteration_s": {
            "mean": round(account.mean_iteration_s, 6),
            "slowest": round(account.slowest_iteration_s, 6),
            "deadline": round(account.deadline_s, 3),
            "in_flight": round(account.in_flight_s, 6),
        },
        "attached_s": round(account.attached_s, 3),
        "silent_s": round(account.silent_s, 3),
        "last_failure": None if loss is None else _describe_loss(loss),
    }


def _describe_loss(loss: Loss) -> dict[str, Any]:
    return {"reason": loss.reason, "ago_s": round(loss.ago_s, 3)}


def _describe_model(model: ModelAccount) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "offered": model.offered,
        "executors": list(model.executors),
        "waiting": model.waiting,
        "running": model.running,
        "kv_tokens": model.kv_tokens,
    }


def _json(value: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")
