"""`python -m scheduler_svc.admin`: the admin process."""

from __future__ import annotations

import socket
import sys

from common.logs import configure_logs
from common.processes import raise_descriptor_limit
from scheduler_svc.admin.app import create_app
from scheduler_svc.admin.key import AdminKey
from scheduler_svc.admin.routes import STALLED_CLIENT_S
from scheduler_svc.admin.settings import AdminSettings
from scheduler_svc.http.server import Server


def main() -> int:
    settings = AdminSettings.from_command_line(prog="python -m scheduler_svc.admin")
    configure_logs("admin", settings.log_format, settings.log_level)
    raise_descriptor_limit()
    try:
        key = None if settings.key_file is None else AdminKey.read(settings.key_file)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    app = create_app(settings.core, key)
    Server(app, stalled_client_s=STALLED_CLIENT_S, exit_with_parent=True).run([socket.socket(fileno=settings.fd)])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
