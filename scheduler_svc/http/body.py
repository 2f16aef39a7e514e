"""Reading a request's body: bounded while it arrives, then one JSON object, with errors that name what is wrong."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson
from starlette.requests import Request

from scheduler_svc.http.body_budget import HeldBody
from scheduler_svc.http.errors import ApiError, ClientGone, invalid
from scheduler_svc.http.fields import Fields

_NOT_FINITE = re.compile(rb"NaN|Infinity|\d[eE]\+?\d{3,}")
MAX_COMMAS = 1 << 21
"""Bounds how long the parser, which nothing can interrupt, takes for long arrays: about 0.2 s."""
MAX_BRACKETS = 1 << 18
"""Likewise for lists and objects: each costs the parser about half a microsecond."""
_SEARCH_LIMIT = 1 << 17
"""Longer bodies that do not parse are not searched for the parameter that holds a NaN."""


def announced_bytes(request: Request) -> int:
    """The body's length as `Content-Length` says it; 0 where it says none."""
    # Python refuses to read thousands of digits, which leading zeros may be.
    digits = request.headers.get("content-length", "").lstrip("0")
    return int(digits) if digits.isdecimal() else 0


async def body_parts(request: Request, stalled_s: float) -> AsyncGenerator[bytes]:
    """The body as it comes. Raises `ApiError` 408 when nothing comes for so many seconds, and `ClientGone` on a
    disconnect.
    """
    more = True
    while more:
        try:
            async with asyncio.timeout(stalled_s):
                message = await request.receive()
        except TimeoutError:
            text = f"nothing came of the body for {stalled_s:g} s"
            raise ApiError(408, text, code="client_timeout", headers={"connection": "close"}) from None
        if message["type"] == "http.disconnect":
            raise ClientGone
        more = message.get("more_body", False)
        yield message.get("body", b"")


async def read_body(request: Request, held: HeldBody, max_bytes: int, stalled_s: float) -> bytes:
    """The whole body. Raises as `body_parts`, and `ApiError` 413 as soon as it is known to be too large, 503 when there
    is no room for it beside those of others.
    """
    if announced_bytes(request) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size = 0
    async with aclosing(body_parts(request, stalled_s)) as coming:
        async for part in coming:
            size += len(part)
            if size > max_bytes:
                raise _too_large(max_bytes)
            held.grow(len(part))
            parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def parse_fields(body: bytes) -> Fields:
    """Parse one JSON object. Raises `ApiError` 400 for anything else, nesting bombs and non-finite numbers included."""
    if body.count(b",") > MAX_COMMAS:
        raise ApiError(413, f"the body has more than {MAX_COMMAS} commas", code="request_too_large")
    if body.count(b"[") + body.count(b"{") > MAX_BRACKETS:
        raise ApiError(413, f"the body has more than {MAX_BRACKETS} brackets", code="request_too_large")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        path = _non_finite_path(body)
        if path is not None:
            raise invalid(re.split(r"[.\[]", path)[0], f"{path}: must be a finite number") from None
        raise invalid(None, f"the body is not valid JSON: {error}", "invalid_json") from None
    if type(value) is not dict:
        raise invalid(None, "the body must be a JSON object", "invalid_json")
    return Fields(value, size=len(body))


def _too_large(max_bytes: int) -> ApiError:
    return ApiError(413, f"the body is larger than {max_bytes} bytes", code="request_too_large")


class _NonFinite(float):
    """Marks a number that JSON has no room for."""


def _non_finite_path(body: bytes) -> str | None:
    """The path of the first NaN, Infinity or overflowing number in a body that is JSON otherwise."""
    if len(body) > _SEARCH_LIMIT or not _NOT_FINITE.search(body):
        return None
    try:
        value = json.loads(body, parse_constant=_NonFinite, parse_float=_parse_float)
    except (ValueError, RecursionError):
        return None
    path = _find(value, "")
    # A name may hold half a character, which no answer can.
    return None if path is None else path.encode(errors="replace").decode()


def _parse_float(text: str) -> float:
    number = float(text)
    return number if number - number == 0 else _NonFinite(number)


def _find(root: Any, name: str) -> str | None:
    """Depth first without recursion, in the order of the text."""
    stack = [(name, root)]
    while stack:
        path, value = stack.pop()
        if isinstance(value, _NonFinite):
            return path
        if isinstance(value, dict):
            stack.extend((f"{path}.{k}" if path else k, v) for k, v in reversed(value.items()))
        elif isinstance(value, list):
            stack.extend((f"{path}[{i}]", v) for i, v in reversed(list(enumerate(value))))
    return None
