"""Who may ask a service that asks for no key: programs on this machine, not the web pages that its browsers show."""

from __future__ import annotations

from collections.abc import Iterable

from common.addresses import is_loopback
from scheduler_svc.http.errors import ApiError


def check_local(headers: Iterable[tuple[bytes, bytes]], text: str, *, own_pages: bool) -> None:
    """Raise `ApiError` 403 `forbidden` with this text for what a browser may have been made to send.

    A page from elsewhere reaches this machine's ports through a browser in two ways. It sends there what needs no leave
    (forms, POSTs as text/plain): a browser adds its `Origin` to those (Fetch standard, section 3.2), `null` where it
    hides it. Or its own name is made to lead here (DNS rebinding): then it may read the answers as well, but `Host` is
    its name.

    `headers`: of the request, names in lower case, as in an ASGI scope. `own_pages`: pages that come from the very host
    and port that `Host` names may ask.
    """
    found: dict[bytes, list[str]] = {b"host": [], b"origin": []}
    for name, value in headers:
        if name in found:
            found[name].append(value.decode("latin-1").lower())
    hosts, origins = found[b"host"], found[b"origin"]
    if len(hosts) == 1 and is_loopback(_without_port(hosts[0])):
        own = [f"http://{hosts[0]}", f"https://{hosts[0]}"] if own_pages else []
        if all(origin in own for origin in origins):
            return
    raise ApiError(403, text, code="forbidden")


def _without_port(host: str) -> str:
    if host.startswith("["):
        address, closed, _ = host[1:].partition("]")
        return address if closed else ""
    return host.partition(":")[0]
