"""Network namespaces as hosts: each executor on a machine of its own, joined to this one by a veth cable.

Needs root and iproute2. Where they are missing (`available`), the relay alone stands between the services.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

PREFIX = "gilir"
_NAME = re.compile(rf"{PREFIX}-(\d+)-(\d+)")
NUMBERS = range(1, 250)


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


def available() -> bool:
    """Whether namespaces and cables can be made here."""
    if os.geteuid() or shutil.which("ip") is None:
        return False
    try:
        Cable().remove()
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


class Cable:
    """One namespace, with a cable to it, and by way of this machine to the other namespaces.

    `host` is this end's address, as the executor sees it; `far_host` the executor's own, as the others see it.
    """

    def __init__(self) -> None:
        self.number = _free_number()
        self.namespace = f"{PREFIX}-{self.number}-{os.getpid()}"
        self.host, self.far_host = f"10.213.{self.number}.1", f"10.213.{self.number}.2"
        self._near, far = f"gilirn{self.number}", f"gilirf{self.number}"
        _run("ip", "netns", "add", self.namespace)
        try:
            _run("ip", "link", "add", self._near, "type", "veth", "peer", "name", far, "netns", self.namespace)
            _run("ip", "addr", "add", f"{self.host}/30", "dev", self._near)
            _run("ip", "link", "set", self._near, "up")
            inside = ("ip", "-n", self.namespace)
            _run(*inside, "addr", "add", f"{self.far_host}/30", "dev", far)
            _run(*inside, "link", "set", far, "up")
            _run(*inside, "link", "set", "lo", "up")
            _run(*inside, "route", "add", "10.213.0.0/16", "via", self.host)
            self.join()
        except (OSError, subprocess.CalledProcessError):
            self.remove()
            raise

    @property
    def command(self) -> list[str]:
        """Before a command, to run it at the far end."""
        return ["ip", "netns", "exec", self.namespace]

    def pull(self) -> None:
        """Nothing gets through, and nobody is told."""
        _run("ip", "link", "set", self._near, "down")

    def plug(self) -> None:
        _run("ip", "link", "set", self._near, "up")

    def part(self) -> None:
        """Nothing that the executor sends gets to other executors; nobody is told."""
        self._forward("0")

    def join(self) -> None:
        self._forward("1")

    def _forward(self, value: str) -> None:
        """Whether this machine passes on what comes out of this cable, and of no other interface."""
        Path(f"/proc/sys/net/ipv4/conf/{self._near}/forwarding").write_text(value)

    def remove(self) -> None:
        subprocess.run(["ip", "link", "del", self._near], capture_output=True)
        subprocess.run(["ip", "netns", "del", self.namespace], capture_output=True)


def _free_number() -> int:
    """The lowest that is not taken; what a killed run left behind is removed first."""
    taken = set()
    for name in subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout.split():
        found = _NAME.fullmatch(name)
        if found is None:
            continue
        if Path(f"/proc/{found[2]}").exists():
            taken.add(int(found[1]))
        else:
            subprocess.run(["ip", "link", "del", f"gilirn{found[1]}"], capture_output=True)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return next(number for number in NUMBERS if number not in taken)
