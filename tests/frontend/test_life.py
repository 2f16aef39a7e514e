"""Health, the link to the core, and how a frontend ends (C03, C27, C28 in its part)."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_core import Answer, FakeCore
from frontend_service import BYTE_LEVEL, Service, error_of, events, run_service, wait_until
from tokenizers_for_tests import CHATML, byte_level, card


class OpenStream:
    """A streamed request in a thread."""

    def __init__(self, service: Service, **body: Any) -> None:
        self.response: httpx.Response | None = None
        self._begun = threading.Event()
        self._body = {"model": BYTE_LEVEL, "prompt": "Hello", "max_tokens": 400, "stream": True, **body}
        self._url = service.url + "/v1/completions"
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=60) as response:
            self._begun.set()
            response.read()
            self.response = response

    def wait_begun(self) -> None:
        assert self._begun.wait(60)

    def answer(self) -> httpx.Response:
        self._thread.join(60)
        assert self.response is not None
        return self.response

    def events(self) -> list[Any]:
        return events(self.answer())


def statuses(service: Service) -> tuple[int, int, int]:
    return tuple(service.get(path).status_code for path in ("/health/live", "/health/ready", "/health"))  # type: ignore[return-value]


@pytest.fixture(scope="module")
def impatient_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One that soon finds its core silent, and soon gives it up."""
    with run_service(tmp_path_factory.mktemp("ipc"), "--core-timeout-s", "0.5", "--core-lost-s", "2") as service:
        yield service


@pytest.fixture
def quick(impatient_service: Service) -> Service:
    impatient_service.core.reset()
    wait_until(lambda: statuses(impatient_service) == (200, 200, 200))
    return impatient_service


def test_health_follows_the_cores_beat(quick: Service) -> None:
    service = quick
    assert statuses(service) == (200, 200, 200)
    service.core.ready = False
    wait_until(lambda: statuses(service) == (200, 503, 503))
    service.core.ready = True
    wait_until(lambda: statuses(service) == (200, 200, 200))
    service.core.silent = True
    wait_until(lambda: statuses(service) == (503, 503, 503))
    error = error_of(service.complete(), 503)
    assert error["code"] == "no_scheduler"
    assert error_of(service.get("/v1/requests/abc"), 503)["code"] == "no_scheduler"
    assert not service.core.inquiries
    service.core.silent = False
    wait_until(lambda: statuses(service) == (200, 200, 200))
    assert service.complete().status_code == 200


def test_a_stall_of_the_core_harms_nobody_but_its_loss_ends_open_requests(quick: Service) -> None:
    service = quick
    gate = threading.Semaphore(1)
    words = service.ids(" one two")
    service.core.answer(Answer([*words, service.eos()], gate=gate))
    stream = OpenStream(service)
    stream.wait_begun()
    service.core.silent = True
    wait_until(lambda: statuses(service)[0] == 503)
    service.core.silent = False
    for _ in range(len(words) + 1):
        gate.release()
    assert stream.events()[-1]["choices"][0]["finish_reason"] == "stop"

    service.core.answer(Answer(words, gate=threading.Semaphore(1)))
    stream = OpenStream(service)
    stream.wait_begun()
    service.core.silent = True
    assert stream.events()[-1]["error"]["type"] == "service_unavailable"
    service.core.silent = False
    wait_until(lambda: statuses(service) == (200, 200, 200))


def test_a_new_core_is_greeted(quick: Service) -> None:
    first = quick.core
    first.close()
    wait_until(lambda: statuses(quick)[0] == 503)
    with closing(FakeCore(first.address, first.models)) as quick.core:
        quick.core.answer(Answer([*quick.ids(" one"), quick.eos()]))
        wait_until(lambda: statuses(quick) == (200, 200, 200))
        assert quick.complete().json()["choices"][0]["text"] == " one"


def test_junk_from_the_core_is_dropped(service: Service) -> None:
    service.core.junk += [b"", b"\x45", b"\x91", b"\xc1" * 100, b"\x93\x1e\x01\x02", b"\x92\x63\x01", b"\x91\x14"]
    wait_until(lambda: not service.core.junk)
    service.core.answer(Answer([*service.ids(" one"), service.eos()]))
    assert service.complete().json()["choices"][0]["text"] == " one"


def test_without_a_core_requests_get_503_and_an_idle_frontend_ends_at_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scheduler_svc.frontend", "--core", f"ipc://{tmp_path}/none", "--port", "0"]
    process = subprocess.Popen([*command, "--core-timeout-s", "0.5"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().removeprefix("listening: ").strip()
        assert httpx.get(url + "/health/live").status_code == 503
        assert httpx.get(url + "/metrics").status_code == 200
        error_of(httpx.post(url + "/v1/completions", json={"prompt": "x"}), 503)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def test_a_request_before_the_core_has_spoken_waits_for_it(tmp_path: Path) -> None:
    """A frontend that was started anew must not refuse what it will know how to serve in a moment."""
    address = f"ipc://{tmp_path}/core"
    command = [sys.executable, "-m", "scheduler_svc.frontend", "--core", address, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    core: FakeCore | None = None
    try:
        assert process.stdout is not None
        url = process.stdout.readline().removeprefix("listening: ").strip()
        statuses: list[int] = []
        body = {"prompt": "Hello", "max_tokens": 3}
        asker = threading.Thread(
            target=lambda: statuses.append(httpx.post(url + "/v1/completions", json=body, timeout=60).status_code)
        )
        asker.start()
        asker.join(1.0)
        assert not statuses
        core = FakeCore(address, [card(BYTE_LEVEL, byte_level(), CHATML)])
        asker.join(60)
        assert statuses == [200]
    finally:
        process.kill()
        process.wait()
        if core is not None:
            core.close()


# --- the end ---


def test_open_streams_may_end_while_new_requests_get_503(tmp_path: Path) -> None:
    with run_service(tmp_path, "--grace-s", "20") as service:
        gate = threading.Semaphore(1)
        words = service.ids(" one two")
        service.core.answer(Answer([*words, service.eos()], gate=gate))
        stream = OpenStream(service)
        stream.wait_begun()
        service.process.send_signal(signal.SIGTERM)
        wait_until(lambda: httpx.get(service.url + "/health/ready").status_code == 503)
        assert httpx.get(service.url + "/health/live").status_code == 200
        body = {"model": BYTE_LEVEL, "prompt": "x"}
        assert error_of(httpx.post(service.url + "/v1/completions", json=body), 503)["code"] == "shutting_down"
        for _ in range(len(words) + 1):
            gate.release()
        chunks = stream.events()
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == " one two"
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert service.process.wait(60) == 0


@pytest.mark.parametrize(("grace", "signals"), [("0.5", 1), ("60", 2)])
def test_streams_open_at_the_end_get_an_error_event(tmp_path: Path, grace: str, signals: int) -> None:
    with run_service(tmp_path, "--grace-s", grace) as service:
        service.core.answer(Answer(service.ids("xy"), gate=threading.Semaphore(1)))
        begun = OpenStream(service)
        begun.wait_begun()
        waiting, whole = OpenStream(service), OpenStream(service, stream=False)
        assert service.core.wait_for(lambda: len(service.core.requests) == 3)
        for _ in range(signals):
            service.process.send_signal(signal.SIGTERM)
            time.sleep(0.2)  # two equal signals at one moment are one
        last = begun.events()[-1]
        assert last["error"]["code"] == "shutting_down" and "choices" not in last
        for request in (waiting, whole):
            assert error_of(request.answer(), 503)["code"] == "shutting_down"
        assert service.process.wait(60) == 0
        assert service.core.wait_for(lambda: service.core.live == 0)


def test_new_requests_get_503_while_the_core_is_stopping(service: Service) -> None:
    service.core.stopping = True
    wait_until(lambda: service.get("/health/ready").status_code == 503)
    assert error_of(service.complete(), 503)["code"] == "shutting_down"
    assert service.get("/health/live").status_code == 200


PARENT = """
import socket, subprocess, sys
listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen()
listener.set_inheritable(True)
command = [sys.executable, "-m", "scheduler_svc.frontend", "--core", sys.argv[1], "--fd", str(listener.fileno())]
child = subprocess.Popen(command, pass_fds=[listener.fileno()])
print(child.pid, listener.getsockname()[1], flush=True)
child.wait()
"""


def test_a_frontend_on_an_inherited_socket_ends_with_its_parent(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/core"
    core = FakeCore(address, [card(BYTE_LEVEL, byte_level(), CHATML)])
    parent = subprocess.Popen([sys.executable, "-c", PARENT, address], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child, port = map(int, parent.stdout.readline().split())
    try:
        wait_until(lambda: _answers(port))
        assert httpx.get(f"http://127.0.0.1:{port}/health").status_code in (200, 503)
        parent.kill()
        parent.wait()
        wait_until(lambda: not _answers(port))
        wait_until(lambda: not Path(f"/proc/{child}").exists() or "Z" in _state(child))
    finally:
        parent.kill()
        if Path(f"/proc/{child}").exists() and "Z" not in _state(child):
            os.kill(child, signal.SIGKILL)
        core.close()


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def _answers(port: int) -> bool:
    try:
        httpx.get(f"http://127.0.0.1:{port}/health/live", timeout=1)
    except httpx.HTTPError:
        return False
    return True


def test_a_taken_port_is_told_plainly(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "scheduler_svc.frontend", "--core", f"ipc://{tmp_path}/core", "--port", port]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert f"error: cannot listen on 127.0.0.1:{port}" in ended.stderr and "Traceback" not in ended.stderr


def test_prompts_are_not_logged(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/core"
    core = FakeCore(address, [card(BYTE_LEVEL, byte_level(), CHATML)])
    command = [sys.executable, "-m", "scheduler_svc.frontend", "--core", address, "--port", "0"]
    process = subprocess.Popen(
        [*command, "--log-level", "debug", "--log-format", "json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().removeprefix("listening: ").strip()
        wait_until(lambda: bool(httpx.get(url + "/v1/models").json()["data"]))
        body = {"model": BYTE_LEVEL, "prompt": "a secret", "strange": 1}
        assert httpx.post(url + "/v1/completions", json=body, headers={"x-request-id": "r-1"}).status_code == 200
        bad = {"model": BYTE_LEVEL, "messages": [{"role": "assistant", "content": "a secret"}]}
        assert httpx.post(url + "/v1/chat/completions", json=bad).status_code == 400
        process.send_signal(signal.SIGTERM)
        _, logged = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
        core.close()
    lines = [json.loads(line) for line in logged.splitlines()]
    assert "secret" not in logged and "Traceback" not in logged
    mine = [line for line in lines if line.get("request_id") == "r-1"]
    assert [line["event"] for line in mine] == ["unknown fields ignored", "request"]
    assert mine[1]["status"] == 200 and mine[1]["route"] == "/v1/completions" and mine[1]["prompt_tokens"] > 0
    assert [line["status"] for line in lines if line.get("route") == "/v1/chat/completions"] == [400]


def test_a_request_whose_prompt_is_still_tokenized_is_refused_at_the_end(tmp_path: Path) -> None:
    """The busy thread is not waited for."""
    model = card(BYTE_LEVEL, byte_level(), CHATML, max_model_len=1 << 22)
    with run_service(tmp_path, "--grace-s", "60", models=[model], kv_capacity=1 << 22) as service:
        idle = _cpu_ticks(service.process.pid)
        request = OpenStream(service, prompt="The quick brown fox " * 400_000, max_tokens=1)
        wait_until(lambda: _cpu_ticks(service.process.pid) > idle + os.sysconf("SC_CLK_TCK"))
        service.process.send_signal(signal.SIGTERM)
        assert error_of(request.answer(), 503)["code"] == "shutting_down"
        assert service.process.wait(60) == 0
        assert not service.core.requests


def _cpu_ticks(pid: int) -> int:
    """Processor time used so far; the long prompt takes several seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


def test_a_request_whose_body_still_comes_is_refused_at_the_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with run_service(tmp_path, "--grace-s", "0.5", log=log) as service:
        address = httpx.URL(service.url)
        with closing(socket.create_connection((address.host, address.port), timeout=60)) as connection:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
            connection.sendall(head + b'{"prompt')
            assert service.get("/health").status_code == 200
            service.process.send_signal(signal.SIGTERM)
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 503 ") and b'"code":"shutting_down"' in answer
        assert service.process.wait(60) == 0
    assert "Traceback" not in log.read_text()
