"""Text for terminals."""

from __future__ import annotations

import re
import time

from rich.console import Console

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plain_console(width: int | None = None, *, stderr: bool = False) -> Console:
    """One that reads no markup in what it is given: names and texts are those of others."""
    return Console(highlight=False, markup=False, emoji=False, width=width, stderr=stderr)


def printable(text: str) -> str:
    """Text of a model or of another user without control characters: those could move the cursor, or worse.

    Line feeds and tabs stay.
    """
    return _CONTROLS.sub("", text)


def on_one_line(text: str) -> str:
    return " ".join(printable(text).split())


def seconds(value: float) -> str:
    """A time, short."""
    if value >= 100:
        return f"{value:,.0f} s"
    if value >= 1:
        return f"{value:.1f} s"
    return f"{1000 * value:.0f} ms" if value >= 0.01 else f"{1000 * value:.1f} ms"


def bar(share: float, width: int) -> str:
    """A bar of blocks, in eighths of a character."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    full, rest = divmod(eighths, 8)
    return ("█" * full + ("▏▎▍▌▋▊▉"[rest - 1] if rest else "")).ljust(width)


def clock() -> str:
    """The time of the day."""
    return time.strftime("%H:%M:%S")
