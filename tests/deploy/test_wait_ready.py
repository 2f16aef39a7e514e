"""What is shown on the console while the services start."""

from __future__ import annotations

import http.server
import threading
from pathlib import Path
from typing import ClassVar

import pytest

from common.logs import COMPILING
from deploy.local import LocalServices, Process


class _Ready(http.server.BaseHTTPRequestHandler):
    """503 at first, then 200."""

    answers: ClassVar = [503, 503, 200]

    def do_GET(self) -> None:
        self.send_response(self.answers.pop(0))
        self.end_headers()

    def log_message(self, *_arguments: object) -> None:
        pass


def test_a_compilation_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = f"2026 [info     ] {COMPILING} isa=avx2 service=executor"
    with http.server.HTTPServer(("127.0.0.1", 0), _Ready) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with LocalServices() as services:
            monkeypatch.setattr(services, "_port", server.server_port)
            process = Process("executor", ["-c", f"print({line!r})"], tmp_path)
            assert process.popen.wait(60) == 0
            services.processes.append(process)
            monkeypatch.setattr(services, "raise_if_ended", lambda: None)
            told: list[str] = []
            services.wait_ready(20, tell=told.append)
        server.shutdown()
    assert told == [f"{COMPILING} …"]
