"""`gilir executors`: how executors stand, and steering them, over the admin API."""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rich import box
from rich.live import Live
from rich.table import Table

from common.command_parser import command_parser
from scheduler_svc.cli.connection import Connection, understanding
from scheduler_svc.cli.errors import CommandError
from scheduler_svc.cli.terminal import on_one_line, plain_console, seconds

DEFAULT_URL = "http://127.0.0.1:8001"
URL_VARIABLE, KEY_VARIABLE = "GILIR_ADMIN_URL", "GILIR_ADMIN_KEY"
WATCH_S, WAIT_S = 1.0, 0.2
DESCRIPTION = """Lists the executors of a scheduler, and steers them. It asks the admin API, which the scheduler has
with --admin-port. One that drains takes nothing new; what runs moves to others or ends; then it is paused until it is
resumed. To pause is the same. With --model all executors of a model are meant. A released one goes when it is empty."""
EXAMPLES = """
  gilir executors
  gilir executors --watch
  gilir executors drain gpu-0 --wait
  gilir executors resume gpu-0
  gilir executors pause --model Qwen3-0.6B
  gilir executors release gpu-0
"""
VERBS = {"drain": "drain", "pause": "drain", "resume": "resume", "release": "drain"}
"""Action -> the admin API's word for it."""


def parser(prog: str) -> argparse.ArgumentParser:
    made = command_parser(prog, DESCRIPTION, EXAMPLES)
    made.add_argument("action", nargs="?", choices=["list", *VERBS], default="list", help="list, if none is given")
    made.add_argument("name", nargs="?", help="which executor")
    made.add_argument("--model", help="all executors of this model (pause, resume)")
    made.add_argument("--watch", action="store_true", help="list again each second, until Ctrl-C")
    made.add_argument(
        "--wait", action="store_true", help="drain, pause: until it is paused; release: until it has gone"
    )
    made.add_argument("--timeout-s", type=float, metavar="S", help="drain: what has no other room by then waits again")
    url = os.environ.get(URL_VARIABLE) or DEFAULT_URL
    made.add_argument(
        "--admin-url", default=url, metavar="URL", help=f"the admin API (${URL_VARIABLE}, else {DEFAULT_URL})"
    )
    made.add_argument("--admin-key-file", type=Path, metavar="FILE", help=f"holds the admin key; or in ${KEY_VARIABLE}")
    return made


def main(arguments: list[str], prog: str) -> int:
    """Exit status 0; 1 with one plain line for what cannot be done, 2 for a usage that makes no sense."""
    made = parser(prog)
    options = made.parse_args(arguments)
    _check(made, options)
    key = _key(options.admin_key_file)
    hint = "start the scheduler with --admin-port 8001, or give --admin-url"
    key_hint = f"{KEY_VARIABLE} or --admin-key-file"
    with (
        Connection(options.admin_url, key, hint=hint, key_hint=key_hint) as connection,
        understanding(connection.url),
    ):
        if options.action != "list":
            _steer(connection, options)
        elif options.watch:
            _watch(connection)
        else:
            plain_console().print(table(connection.get("/admin/executors")))
    return 0


def _check(made: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if options.action == "list":
        if options.name or options.model:
            made.error("list takes no name and no --model")
        return
    if options.watch:
        made.error("--watch goes with list")
    if options.model and options.action not in ("pause", "resume"):
        made.error("--model goes with pause and resume")
    if bool(options.name) == bool(options.model):
        made.error(f"{options.action} needs the name of an executor, or --model alone (pause, resume)")
    if options.timeout_s is not None and options.action != "drain":
        made.error("--timeout-s goes with drain")
    if options.wait and options.action == "resume":
        made.error("--wait goes with drain, pause and release")


def _key(path: Path | None) -> str:
    if path is None:
        return os.environ.get(KEY_VARIABLE) or ""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{path}: {getattr(error, 'strerror', None) or 'holds no key'}") from None


# --- steering ---


def _steer(connection: Connection, options: argparse.Namespace) -> None:
    if options.model:
        verb = "resume" if options.action == "resume" else "pause"
        answer = connection.send("POST", f"/admin/models/{quote(options.model, safe='')}/{verb}")
    elif options.action == "release":
        answer = connection.send("DELETE", f"/admin/executors/{quote(options.name, safe='')}")
    else:
        body = {} if options.timeout_s is None else {"timeout_s": options.timeout_s}
        path = f"/admin/executors/{quote(options.name, safe='')}/{VERBS[options.action]}"
        answer = connection.send("POST", path, body or None)
    for executor in answer["data"]:
        print(f"{executor['name']}: {executor['state']}, {executor['running']} running")
    if options.wait:
        for executor in answer["data"]:
            _wait(connection, executor["name"], to_go=options.action == "release")


def _wait(connection: Connection, name: str, *, to_go: bool) -> None:
    """Until an executor is paused; or until it has gone."""
    while True:
        attached = {one["name"]: one for one in connection.get("/admin/executors")["data"]}
        if name not in attached:
            print(f"{name}: gone")
            return
        if not to_go and attached[name]["state"] == "paused":
            print(f"{name}: paused")
            return
        if not to_go and attached[name]["state"] not in ("draining", "paused"):
            raise CommandError(f"{name} is {attached[name]['state']}: somebody else has resumed or released it")
        time.sleep(WAIT_S)


# --- the list ---


def _watch(connection: Connection) -> None:
    with Live(console=plain_console(), screen=True, auto_refresh=False) as live:
        while True:
            live.update(table(connection.get("/admin/executors")), refresh=True)
            time.sleep(WATCH_S)


def table(content: dict[str, Any]) -> Table:
    """Those attached, then those that are paused or lost and not attached."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("executor", "state", "model"):
        made.add_column(title, overflow="fold")
    for title in ("seats", "KV", "iteration", "last beat"):
        made.add_column(title, justify="right", no_wrap=True)
    for one in content["data"]:
        kv = one["kv_blocks_used"] / max(one["kv_blocks"], 1)
        made.add_row(
            on_one_line(one["name"]),
            one["state"],
            on_one_line(one["model"]),
            f"{one['running']}/{one['seats']}",
            f"{kv:.0%}",
            seconds(one["iteration_s"]["mean"]) if one["iterations"] else "-",
            f"{seconds(one['silent_s'])} ago",
        )
    for name in content["paused"]:
        made.add_row(on_one_line(name), "paused, not attached")
    for one in content["lost"]:
        reason = f"lost {seconds(one['ago_s'])} ago: {on_one_line(one['reason'])}"
        made.add_row(on_one_line(one["name"]), reason)
    if not made.row_count:
        made.add_row("none is attached")
    return made
