"""Streamed tokens a second of the frontends, in front of the real core and a scripted executor that takes no time.

    python -m benchmarks.frontend --streams 256 [--frontends 1] [--api completions|chat] [--floor] [--json]

One process reads so many streams (`benchmarks/stream_client.py`) and asks `/health/live` every 20 ms. Counted is what
came within `--seconds`, once every stream has text: tokens by their text, which the script makes of one length, and the
events that they came in (`chunks_per_s`). Where the executor makes more than can be written at once, or a reader falls
behind, an event holds several tokens; with `--iteration-ms` the executor takes its time. CPU time is given by process,
in microseconds a token: on a machine that is shared it says more than the rate.

`--floor`: the same client, before a server that does nothing but write prepared events.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from benchmarks.stream_client import PATHS
from benchmarks.stream_floor import TEXT
from deploy.local import LocalServices
from executor_svc.fake_model import DEFAULT_MODEL

CONTEXT, MAX_TOKENS = 8192, 8000
"""Of the model, and of one answer: none ends while it is counted."""
BLOCK_SIZE = 16
TOKEN_BUDGET = 8192


def alphabet() -> list[int]:
    """Tokens of a space and letters, as long as the floor's text."""
    vocabulary = json.loads((DEFAULT_MODEL / "tokenizer.json").read_text())["model"]["vocab"]
    word = re.compile(f"Ġ[a-z]{{{len(TEXT) - 1}}}")  # Ġ: how the vocabulary writes a space
    return sorted(token for text, token in vocabulary.items() if word.fullmatch(text))


def long_model(folder: Path) -> Path:
    """The default model with a longer context, for an executor that reads no weights."""
    folder.mkdir()
    for file in DEFAULT_MODEL.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    config = json.loads((DEFAULT_MODEL / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    return folder


@contextmanager
def services(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, list[int]]]]:
    """The services as the benchmark wants them: their URL, and their process ids by name."""
    streams = options.streams
    scheduler = [
        "--frontends",
        str(options.frontends),
        "--max-num-seqs",
        str(streams),
        "--max-waiting",
        str(2 * streams),
    ]
    with LocalServices(scheduler_flags=[*scheduler, "--max-num-batched-tokens", str(TOKEN_BUDGET)]) as local:
        core = psutil.Process(local.start_scheduler().pid)
        script = local.folder / "script.json"
        script.write_text(json.dumps({"alphabet": alphabet()}))
        flags = ["--script", str(script), "--model", str(long_model(local.folder / "model")), "--no-verify"]
        flags += ["--max-num-seqs", str(streams), "--max-num-batched-tokens", str(TOKEN_BUDGET)]
        flags += [
            "--delay-ms",
            str(options.iteration_ms),
            "--block-size",
            str(BLOCK_SIZE),
            "--num-blocks",
            str(streams * CONTEXT // BLOCK_SIZE),
        ]
        executor = local.start_executor(*flags, module="executor_svc.fake")
        local.wait_ready()
        children = [child for child in core.children() if "scheduler_svc.frontend" in child.cmdline()]
        yield local.url, {"frontend": [child.pid for child in children], "core": [core.pid], "executor": [executor.pid]}


@contextmanager
def floor() -> Iterator[str]:
    """The server of prepared events: its URL."""
    command = [sys.executable, "-m", "benchmarks.stream_floor"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent.parent) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def ask(url: str, options: argparse.Namespace, pids: dict[str, list[int]]) -> dict[str, Any]:
    """Run the client. Raises CalledProcessError when it fails."""
    command = [sys.executable, "-m", "benchmarks.stream_client", "--url", url, "--streams", str(options.streams)]
    command += ["--api", options.api, "--seconds", str(options.seconds), "--max-tokens", str(MAX_TOKENS)]
    command += ["--width", str(len(TEXT)), "--pids", json.dumps(pids)]
    found: dict[str, Any] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256, help="read at a time; as many seats")
    parser.add_argument("--frontends", type=int, default=1, help="processes")
    parser.add_argument("--api", choices=tuple(PATHS), default="completions")
    parser.add_argument("--iteration-ms", type=float, default=0.0, help="that the executor takes; 0: none")
    parser.add_argument("--seconds", type=float, default=5.0, help="that are counted")
    parser.add_argument("--floor", action="store_true", help="the rate of prepared events, too")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    with services(options) as (url, pids):
        found = {"streams": options.streams, "frontends": options.frontends, **ask(url, options, pids)}
    if options.floor:
        with floor() as url:
            found["floor_tokens_per_s"] = ask(url, options, {})["tokens_per_s"]
    if options.json:
        print(json.dumps(found))
        return 0
    for name, value in found.items():
        print(f"{name:<20} {json.dumps(value)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
