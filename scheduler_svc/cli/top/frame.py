"""One frame of `gilir top`: lines of a given width, as many as fit."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from scheduler_svc.cli.terminal import bar, clock, on_one_line, seconds
from scheduler_svc.cli.top.picture import Picture

REASONS = {
    "seats": "a seat",
    "token_budget": "token budget",
    "kv_blocks": "KV blocks",
    "policy": "policy",
    "no_executor": "an executor",
    "paused": "a paused executor",
}
LATENCIES = {"ttft": "TTFT", "itl": "ITL", "queue": "queue", "e2e": "E2E"}
MIN_WIDTH, MIN_HEIGHT = 40, 14
"""What is smaller shows a part of a frame of this size."""
WAITING_LINES = 2
"""At least so many for who waits, where there is one: lanes beyond are counted."""


def frame(picture: Picture, url: str, width: int, height: int, *, state: str = "") -> list[Text]:
    """At most `height` lines, none wider than `width`. state: of the view, in the corner."""
    width, height = max(width, MIN_WIDTH), max(height, MIN_HEIGHT)
    status = picture.status
    head = _spread(f"gilir top {url}", f"{state or picture.trouble or 'live'}  {clock()}", width, style="bold")
    if not status:
        return [head, Text(picture.trouble or "waiting for the scheduler …")]
    lines = [head, *_summary(picture), _latencies(picture), Text()]
    waiting = status["waiting"]
    room = height - len(lines) - 1
    reserved = min(len(waiting), WAITING_LINES) + 2 if waiting else 0
    lines += _lanes(picture, width, room - reserved)
    if waiting:
        lines += [Text(), *_waiting(picture, height - len(lines) - 3)]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines[: height - 1]


def _spread(left: str, right: str, width: int, style: str) -> Text:
    right = on_one_line(right)
    left = on_one_line(left)[: max(0, width - len(right) - 2)]
    return Text(left + right.rjust(width - len(left)), style=style)


def _summary(picture: Picture) -> list[Text]:
    status = picture.status
    lanes = [lane for lane in status["lanes"] if lane["state"] not in ("lost", "gone")]
    running, seats = sum(lane["running"] for lane in lanes), sum(lane["seats"] for lane in lanes)
    by_reason = {reason: count for reason, count in status["num_waiting"].items() if count}
    reasons = ", ".join(f"{count} for {REASONS.get(reason, reason)}" for reason, count in by_reason.items())
    total = sum(by_reason.values())
    counters = status.get("counters", {})
    return [
        Text(f"running {running} of {seats} seats    waiting {total}" + (f": {on_one_line(reasons)}" if total else "")),
        Text(
            f"{picture.rate('tokens'):,.0f} tokens/s    {picture.rate('iterations'):,.1f} iterations/s    "
            f"preemptions {counters.get('preemptions', 0):,.0f}    executors lost {counters.get('lost', 0):,.0f}"
        ),
    ]


def _latencies(picture: Picture) -> Text:
    parts = []
    for kind, name in LATENCIES.items():
        quantiles = [picture.latency(kind, share) for share in (0.5, 0.99)]
        shown = "/".join("-" if value is None else seconds(value).replace(" ", "") for value in quantiles)
        parts.append(f"{name} {shown}")
    return Text("p50/p99  " + "  ".join(parts), style="dim")


def _lanes(picture: Picture, width: int, room: int) -> list[Text]:
    """A line for each executor, below a heading."""
    bars = max(4, min(16, (width - 64) // 2))
    name_width = 14
    heading = f"{'executor':<{name_width}}{'state':<10}{'seats':<{bars + 9}}{'KV':<{bars + 12}}{'iteration':>9}  tokens"
    lines = [Text(heading, style="reverse")]
    lanes = sorted(picture.status["lanes"], key=lambda lane: lane["state"] in ("lost", "gone"))
    shown = max(1, room - 1 if len(lanes) <= room - 1 else room - 2)
    for lane in lanes[:shown]:
        lines.append(_lane(picture, lane, name_width, bars))
    if len(lanes) > shown:
        lines.append(Text(f"and {len(lanes) - shown} more", style="dim"))
    if not lanes:
        lines.append(Text("no executor is attached", style="yellow"))
    return lines


def _lane(picture: Picture, lane: dict[str, Any], name_width: int, bars: int) -> Text:
    text = Text(f"{on_one_line(lane['name'])[: name_width - 1]:<{name_width}}")
    gone = lane["state"] in ("lost", "gone")
    colour = "red" if gone else "green" if lane["state"] == "attached" else "yellow"
    text.append(f"{lane['state'][:9]:<10}", style=colour)
    if gone:
        return text.append(on_one_line(lane["reason"]), style="dim")
    text.append(bar(lane["running"] / max(lane["seats"], 1), bars), style="cyan")
    seats = f" {lane['running']}/{lane['seats']}"
    text.append(f"{seats:<9}")
    blocks = max(lane["blocks"], 1)
    held, cached = lane["blocks_referenced"] / blocks, lane["blocks_cached"] / blocks
    text.append(bar(held, bars), style="magenta")
    share = f" {held:.0%}" + (f" +{cached:.0%}" if cached >= 0.005 else "")
    text.append(f"{share:<12}")
    recent = picture.iteration(lane["epoch"])
    took, tokens = ("-", "") if recent is None else (seconds(recent[0]), f"{recent[1]:,.1f}")
    return text.append(f"{took:>9}  {tokens}")


def _waiting(picture: Picture, room: int) -> list[Text]:
    """The first in line, below a heading."""
    waiting = picture.status["waiting"]
    total = sum(picture.status["num_waiting"].values())
    lines = [Text(f"{'waits':<28}{'for':<20}{'since':>8}  {'preempted':>9}  {'generated':>9}", style="reverse")]
    shown = max(1, room if total <= room else room - 1)
    for one in waiting[:shown]:
        name = on_one_line(one.get("id", "another tenant's")) + (f"/{one['index']}" if one.get("index") else "")
        why, since = REASONS.get(one["reason"], on_one_line(one["reason"])), seconds(one["waited"])
        preempted = f"{one['preemptions']}×" if one["preemptions"] else ""
        line = f"{name[:27]:<28}{why[:19]:<20}{since:>8}  {preempted:>9}  {one.get('generated', ''):>9}"
        lines.append(Text(line))
    if total > shown:
        lines.append(Text(f"and {total - shown} more", style="dim"))
    return lines
