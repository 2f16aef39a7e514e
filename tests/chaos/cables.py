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
    """One namespace, with a cable to it. `host` is this end's address, as the executor sees it."""

    def __init__(self) -> None:
        self.number = _free_number()
        self.namespace = f"{PREFIX}-{self.number}-{os.getpid()}"
        self.host = f"10.213.{self.number}.1"
        self._near, far = f"gilirn{self.number}", f"gilirf{self.number}"
        _run("ip", "netns", "add", self.namespace)
        try:
            _run("ip", "link", "add", self._near, "type", "veth", "peer", "name", far, "netns", self.namespace)
            _run("ip", "addr", "add", f"{self.host}/30", "dev", self._near)
            _run("ip", "link", "set", self._near, "up")
            inside = ("ip", "-n", self.namespace)
            _run(*inside, "addr", "add", f"10.213.{self.number}.2/30", "dev", far)
            _run(*inside, "link", "set", far, "up")
            _run(*inside, "link", "set", "lo", "up")
        except subprocess.CalledProcessError:
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
