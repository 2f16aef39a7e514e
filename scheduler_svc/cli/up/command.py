"""`gilir up`: runs what one TOML file says, on this machine."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path

from common.command_parser import command_parser
from scheduler_svc.cli.parsing import positive
from scheduler_svc.cli.up.child import Child
from scheduler_svc.cli.up.config import SCHEDULER, Mistakes, Overrides, UpConfig, load
from scheduler_svc.cli.up.console import Console
from scheduler_svc.cli.up.fleet import Failed, Fleet
from scheduler_svc.cli.up.hints import hint
from scheduler_svc.supervisor import PortTaken, listen

DESCRIPTION = """Runs a scheduler and executors as processes of this machine, and starts again what dies. Ctrl-C or
SIGTERM ends them in order; a second one does not wait for what still runs. The file has the tables [scheduler],
[frontend], [executor], [admin] of the services, and [up]: executors = N, logs = "FOLDER", and for executors that
differ a table [[up.executor]] each, with settings of its own. Flags here go before the file."""
EXAMPLES = """
  gilir up                                                   the embedded model, on port 8000
  gilir up --model /models/Qwen3-0.6B --port 9000
  gilir up --config gilir.toml --logs /var/log/gilir
  gilir up --executors 2 --set executor.threads=1 --set scheduler.discipline=fair --admin-port 8001
"""
HINTS = """try:   {gilir} chat --url {url}
       curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' \\
         -d '{{"messages": [{{"role": "user", "content": "Tell me a story."}}], "max_tokens": 100}}'
watch: {url}/dashboard"""


def parser(prog: str) -> argparse.ArgumentParser:
    made = command_parser(prog, DESCRIPTION, EXAMPLES)
    made.add_argument("--config", type=Path, metavar="FILE", help="the TOML file (default: $GILIR_CONFIG, if set)")
    made.add_argument("--model", help="model folder, GGUF file or hub id, for all executors; else the embedded model")
    made.add_argument("--host", help="address of the API (127.0.0.1)")
    made.add_argument("--port", type=int, help="port of the API (8000); 0 takes a free one")
    made.add_argument("--admin-port", type=int, metavar="PORT", help="of the admin API, for `gilir executors`")
    made.add_argument(
        "--executors",
        type=int,
        metavar="N",
        help="how many (1, or what the file says); where there are GPUs, one on each",
    )
    made.add_argument("--frontends", type=positive, metavar="N", help="processes that answer HTTP (1)")
    made.add_argument("--logs", type=Path, metavar="FOLDER", help="logs go there, a file a process, not to the console")
    made.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="TABLE.SETTING=VALUE",
        help="any setting of the scheduler or of all executors (repeat for more)",
    )
    return made


def hints(url: str, asks_for_key: bool) -> str:
    """What to do with a service that is ready, as it can be pasted into a shell in this folder."""
    beside = Path(sys.executable).with_name("gilir")
    near = os.path.relpath(beside)
    gilir = "gilir" if shutil.which("gilir") else str(beside) if near.startswith("..") else near
    key = ' -H "Authorization: Bearer $GILIR_API_KEY"' if asks_for_key else ""
    return HINTS.format(url=url, gilir=gilir, key=key)


def main(arguments: list[str], prog: str) -> int:
    """Exit status 0 after a signal, 1 where a service fails, 2 for a configuration with mistakes."""
    made = parser(prog)
    options, others = made.parse_known_args(arguments)
    if others:
        made.error(hint(others))
    folder = Path(tempfile.mkdtemp(prefix="gilir-"))
    try:
        given = vars(options)
        return run(load(Overrides(sets=tuple(given.pop("set")), **given), folder), folder)
    except Mistakes as mistakes:
        for line in mistakes.args:
            print(f"error: {line}", file=sys.stderr)
        return 2
    except (PortTaken, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run(config: UpConfig, folder: Path) -> int:
    """Until a signal. `folder`: for the scheduler's temporary files. Raises `PortTaken`, OSError."""
    host, port = config.settings.host, config.settings.port
    # Bound here for a moment: a taken port is told at once, and a free one stays the same when the scheduler is
    # started again.
    with listen(host, port) as listener:
        port = listener.getsockname()[1]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url = f"http://{shown}:{port}"
    console = Console([SCHEDULER, *config.executors], config.logs)
    flags = [*config.scheduler_flags, "--port", str(port)]
    scheduler = Child(SCHEDULER, ["-m", "scheduler_svc", *flags], console.write, folder)
    executors = [Child(name, ["-m", "executor_svc", *own], console.write) for name, own in config.executors.items()]
    fleet = Fleet(scheduler, executors, console, url, config.settings.grace_s)
    try:
        fleet.start()
        if fleet.wait_ready():
            asks_for_key = config.settings.api_key is not None or config.settings.api_keys is not None
            console.tell(f"ready: {url}\n{hints(url, asks_for_key)}")
            if config.logs is not None:
                console.tell(f"logs:  {config.logs}")
            fleet.watch()
    except Failed as failure:
        for line in failure.args:
            console.error(line)
        return failure.status
    finally:
        fleet.stop()
    return 0
