"""`GET /health…`, `/version`, `/load`, `/v1/models` and `/metrics`: all from what the core told last, at once."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from scheduler_svc.frontend.auth import key_of
from scheduler_svc.frontend.batching.access import line_gauges
from scheduler_svc.frontend.exposition import render
from scheduler_svc.frontend.frontend import frontend_of

router = APIRouter()

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

try:
    VERSION = version("gilir")
except PackageNotFoundError:
    VERSION = "0"


@router.get("/health/live")
async def live(request: Request) -> Response:
    """200 while the core's loop turns."""
    return _status(frontend_of(request).live, "live")


@router.get("/health/ready")
@router.get("/health")
async def ready(request: Request) -> Response:
    """200 while an executor is attached and new requests are taken."""
    return _status(frontend_of(request).ready, "ready")


def _status(good: bool, word: str) -> Response:
    return _json({"status": word if good else f"not {word}"}, 200 if good else 503)


@router.get("/version")
async def tell_version() -> Response:
    return _json({"version": VERSION})


@router.get("/load")
async def load(request: Request) -> Response:
    """In vLLM's shape: how many sequences wait or run in the whole service, not at this frontend alone."""
    stats = frontend_of(request).link.stats
    return _json({"server_load": 0 if stats is None else int(stats.gauges.get("gilir_live_sequences", 0))})


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    models = frontend_of(request).models.open_to(key_of(request))
    return _json({"object": "list", "data": [model.describe() for model in models]})


@router.get("/v1/models/{name:path}")
async def tell_model(request: Request, name: str) -> Response:
    return _json(frontend_of(request).models.find(name, key_of(request)).describe())


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """The core's figures in Prometheus' plain text format: the newer one would write `vllm:` names with underscores."""
    stats = frontend_of(request).link.stats
    if stats is not None:
        stats = replace(stats, gauges=stats.gauges | await line_gauges(request))
    text = b"" if stats is None else render(stats)
    return Response(text, headers={"content-type": METRICS_TYPE})


def _json(value: dict[str, Any], status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")
