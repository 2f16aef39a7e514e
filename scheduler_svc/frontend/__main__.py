"""`python -m scheduler_svc.frontend`: one frontend process."""

from __future__ import annotations

import os
import socket
import sys

from common.logs import configure_logs
from common.processes import raise_descriptor_limit
from scheduler_svc.frontend.app import create_app
from scheduler_svc.frontend.server import run
from scheduler_svc.frontend.settings import FrontendSettings


def main() -> int:
    settings = FrontendSettings.from_command_line(prog="python -m scheduler_svc.frontend")
    # The tokenizers' own thread pool gains nothing for single texts.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    configure_logs(settings.name, settings.log_format, settings.log_level)
    raise_descriptor_limit()
    try:
        listener = _listener(settings)
    except OSError as error:
        where = f"descriptor {settings.fd}" if settings.fd is not None else f"{settings.host}:{settings.port}"
        print(f"error: cannot listen on {where}: {error.strerror or error}", file=sys.stderr)
        return 1
    run(create_app(settings), listener, exit_with_parent=settings.fd is not None)
    return 0


def _listener(settings: FrontendSettings) -> socket.socket:
    if settings.fd is not None:
        return socket.socket(fileno=settings.fd)
    family = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((settings.host, settings.port))
    listener.listen(2048)
    host, port = listener.getsockname()[:2]
    print(f"listening: http://{host}:{port}", flush=True)
    return listener


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without waiting for a tokenizer thread that may still be busy with a long text.
    os._exit(status)
