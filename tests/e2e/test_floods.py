"""More messages than a socket's queue holds, from a peer that vanishes: the process that they were sent to goes on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

import common
import executor_svc
import scheduler_svc

FLOOD = """
import sys, zmq
dealer = zmq.Context().socket(zmq.DEALER)
dealer.set_hwm(0)
dealer.connect(sys.argv[1])
for _ in range(400_000):
    dealer.send(b"")
dealer.close(linger=2000)
dealer.context.term()
"""


def test_a_flood_from_a_stranger_that_vanishes_harms_nobody(start: Callable[..., Any]) -> None:
    stack = start("--heartbeat-ms", "50")
    stack.fake()
    stack.ready()
    undisturbed = stack.text([5, 6, 7], 40)
    subprocess.run([sys.executable, "-c", FLOOD, stack.services.executor_address], timeout=60, check=True)
    assert stack.text([5, 6, 7], 40) == undisturbed
    assert stack.scheduler.popen.poll() is None
    stack.until_idle()


def test_nothing_sets_zeromq_heartbeats() -> None:
    """They end the process: see docs/decisions/0014."""
    assert hasattr(zmq, "HEARTBEAT_IVL")
    for package in (common, executor_svc, scheduler_svc):
        for path in Path(str(package.__file__)).parent.rglob("*.py"):
            assert "zmq.HEARTBEAT" not in path.read_text(), path
