"""A process that tries whether grammars compile: it forks for each, so that a hostile one harms itself alone.

It holds one model's vocabulary. Its standard input is a socket, over which it gets first that vocabulary, then for each
grammar a descriptor of a socket of its own: the child reads the grammar from it and writes the verdict to it, which is
empty where all is well, behind one octet that says that it lives. A child that takes more than its share is killed by
the kernel, and says nothing more.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import struct
import sys
from pathlib import Path

import msgpack

from common.grammar import GrammarCompiler, GrammarError
from common.grammar.compiler import plain_message

MAX_MEMORY = 512 << 20
"""Bytes of address space that a child may take beyond what it is born with."""
STACK = 4 << 20
"""Bytes; an executor compiles with more."""
MAX_WALL_S = 60
BEGUN = b"\1"
"""The first octet of a child: what ends behind it was killed for what it took."""
LENGTH = struct.Struct("!I")


def receive(connection: socket.socket) -> bytes | None:
    """One message of its sender; None at the end of the stream."""
    header = _exactly(connection, LENGTH.size)
    return None if header is None else _exactly(connection, LENGTH.unpack(header)[0])


def send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(LENGTH.pack(len(data)) + data)


def _exactly(connection: socket.socket, count: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(count - len(parts), 1 << 20))
        if not part:
            return None
        parts += part
    return bytes(parts)


def main() -> int:
    control = socket.socket(fileno=0)
    vocabulary = receive(control)
    if vocabulary is None:
        return 0
    tokenizer_json, vocab_size, eos_ids = msgpack.unpackb(vocabulary, max_bin_len=len(vocabulary))
    compiler = GrammarCompiler(tokenizer_json, vocab_size, tuple(eos_ids))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are not waited for
    os.nice(10)
    gc.freeze()
    control.sendall(b"\0")
    while True:
        _, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not descriptors:
            return 0
        connection = socket.socket(fileno=descriptors[0])
        if os.fork() == 0:
            control.close()
            os._exit(_try(compiler, connection))
        connection.close()


def _try(compiler: GrammarCompiler, connection: socket.socket) -> int:
    """In the child."""
    connection.sendall(BEGUN)
    request = receive(connection)
    if request is None:
        return 0
    language, source, lenient, cpu_s = msgpack.unpackb(request)
    _bound(cpu_s)
    said = os.memfd_create("stderr")
    os.dup2(said, 2)
    try:
        allowed = compiler.compile(language, source).matcher().allowed()
        verdict = "" if allowed.any() else "no text can satisfy it"
    except GrammarError as error:
        verdict = str(error)
    except MemoryError:
        return 1
    if not verdict and not lenient:
        verdict = _warning(said)
    send(connection, verdict.encode())
    return 0


def _bound(cpu_s: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if sys.platform == "linux" else 0
    limits = (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, pages * resource.getpagesize() + MAX_MEMORY),
        (resource.RLIMIT_STACK, STACK),
        (resource.RLIMIT_CORE, 0),
    )
    for limit, value in limits:
        resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))
    signal.alarm(MAX_WALL_S)


def _warning(said: int) -> str:
    """The first warning of xgrammar: it tells what it has passed over or only approximates."""
    lines = os.pread(said, 1 << 16, 0).decode(errors="replace").splitlines()
    return next((plain_message(line) for line in lines if "Warning:" in line), "")


if __name__ == "__main__":
    sys.exit(main())
