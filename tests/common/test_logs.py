"""Log lines of both services, as another process reads them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import structlog

from common.logs import Seldom, configure_logs

PROGRAM = """
import logging, sys, structlog
from common.logs import configure_logs

configure_logs("scheduler", sys.argv[1], sys.argv[2])
log = structlog.get_logger()
structlog.contextvars.bind_contextvars(request_id="r-7")
log.info("request done", tokens=5, text="two\\nlines", raw=b"\\xff", kind=int)
structlog.contextvars.clear_contextvars()
log.debug("a detail")
logging.getLogger("uvicorn.error").warning("from the %s library", "standard")
logging.getLogger("uvicorn.access").info("GET /health")
prompt = "a secret prompt"
for logger in (log, logging.getLogger("library")):
    try:
        {}[5]
    except KeyError:
        logger.exception("it failed")
"""


def lines(log_format: str, log_level: str = "info") -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, log_format, log_level], capture_output=True, text=True, check=True
    )
    assert not done.stdout, "logs go to stderr"
    return done.stderr.splitlines()


def test_json_lines() -> None:
    events = [json.loads(line) for line in lines("json")]
    assert [event["event"] for event in events] == ["request done", "from the standard library"] + ["it failed"] * 2
    for event in events:
        assert event["service"] == "scheduler" and event["level"] in ("info", "warning", "error")
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+Z", event["timestamp"])
    done, foreign, *failed = events
    assert done["request_id"] == "r-7" and done["tokens"] == 5 and done["text"] == "two\nlines"
    assert "request_id" not in foreign
    for event in failed:
        assert "KeyError: 5" in event["exception"] and "secret" not in event["exception"]


def test_console_lines() -> None:
    text = "\n".join(lines("console"))
    first, second = text.splitlines()[:2]
    assert re.match(r"\d{4}-\d\d-\d\dT\S+Z \[info +\] request done ", first)
    assert "request_id=r-7" in first and "service=scheduler" in first and "tokens=5" in first
    assert r"text='two\nlines'" in first
    assert "[warning  ] from the standard library" in second and "request_id" not in second
    assert text.count("KeyError: 5") == 2
    assert "secret" not in text, "a traceback must not show local variables"
    assert "\x1b" not in text, "no colours but for a terminal"


def test_the_level_filters_our_lines_and_never_lets_library_chatter_in() -> None:
    events = [json.loads(line)["event"] for line in lines("json", "debug")]
    assert "a detail" in events and "GET /health" not in events
    events = [json.loads(line)["event"] for line in lines("json", "error")]
    assert events == ["it failed", "it failed"]


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_a_log_that_nobody_reads_any_more_ends_no_service(log_format: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    program = PROGRAM + "\nprint('still here', flush=True)\nos._exit(0)"
    command = [sys.executable, "-c", "import os\n" + program, log_format, "info"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=writer, text=True)
    os.close(writer)
    assert (done.returncode, done.stdout) == (0, "still here\n")


def test_lines_follow_a_stream_that_is_replaced() -> None:
    """A stream that was closed after the set-up (as a test's captured one is) must not end who logs later."""
    program = """
import io, sys, structlog
from common.logs import configure_logs

sys.stderr = first = io.StringIO()
configure_logs("scheduler", "json")
log = structlog.get_logger()
log.info("one")
first.close()
log.info("dropped")
sys.stderr = sys.__stderr__
log.info("two")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert [json.loads(line)["event"] for line in done.stderr.splitlines()] == ["two"]


def test_what_peers_cause_at_will_is_written_seldom() -> None:
    seldom = Seldom(first=3, then=10)
    assert [i for i in range(1, 41) if seldom.happens()] == [1, 2, 3, 10, 20, 30, 40]
    assert seldom.count == 40


def test_a_logger_that_has_written_follows_a_later_set_up(capsys: pytest.CaptureFixture[str]) -> None:
    early = structlog.get_logger()
    early.info("first")
    configure_logs("another", "json")
    try:
        early.info("second")
        with structlog.testing.capture_logs() as logs:
            early.info("third")
    finally:
        configure_logs("tests")
    assert '"service": "another"' in capsys.readouterr().err.splitlines()[-1]
    assert [entry["event"] for entry in logs] == ["third"]
