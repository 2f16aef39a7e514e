"""Requests to a server, whose failures become plain lines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import httpx

from scheduler_svc.cli.errors import CommandError

CONNECT_S, READ_S = 5.0, 600.0
"""The first token of a long prompt may take minutes."""


class Connection:
    """One server. Every method raises `CommandError` where it does not answer as it should."""

    def __init__(
        self, url: str, key: str = "", *, hint: str = "start one with `gilir up`", key_hint: str = "GILIR_API_KEY"
    ) -> None:
        """`hint`: what to do where nobody answers. `key_hint`: where a key is given."""
        self.url = base_url(url)
        self._hint, self._key_hint, self._has_key = hint, key_hint, bool(key)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        try:
            timeout = httpx.Timeout(READ_S, connect=CONNECT_S)
            # Reading all certificates takes longer than the rest; without TLS (no redirect is followed) none is needed.
            verify = not self.url.startswith("http://")
            self._client = httpx.Client(base_url=self.url, headers=headers, timeout=timeout, verify=verify)
        except (httpx.InvalidURL, UnicodeEncodeError):
            raise CommandError(f"the URL or the key cannot be sent: {url}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def get(self, path: str) -> Any:
        return self._json("GET", path)

    def send(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return self._json(method, path, body)

    def _json(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        with self._plain_failures():
            answer = self._client.request(method, path, json=body)
            self._check(answer)
            try:
                return answer.json()
            except ValueError:
                raise CommandError(f"{self.url}{path} does not answer in JSON: is it such a server?") from None

    @contextmanager
    def events(self, path: str, body: dict[str, Any] | None = None) -> Iterator[Iterator[tuple[str, Any]]]:
        """A stream of server-sent events, as (event's name, its JSON): a POST with a body, else a GET.

        That of a POST ends with `[DONE]`; without it the answer has been cut off, which is a `CommandError`. Leaving
        the block closes the connection, and with it the request.
        """
        with self._plain_failures(), self._client.stream("POST" if body else "GET", path, json=body) as answer:
            if answer.status_code != 200:
                answer.read()
            self._check(answer)
            yield self._events(answer, ends=body is not None)

    def _events(self, answer: httpx.Response, *, ends: bool) -> Iterator[tuple[str, Any]]:
        name, is_done = "", False
        for line in answer.iter_lines():
            if line.startswith("event:"):
                name = line[len("event:") :].strip()
            elif line.startswith("data:"):
                data = line[len("data:") :].strip()
                if data == "[DONE]":
                    is_done = True
                    continue
                content = json.loads(data)
                if isinstance(content, dict) and content.get("error"):
                    raise CommandError(message_of(content) or "the answer ended with an error")
                yield name, content
        if ends and not is_done:
            raise CommandError(f"the answer of {self.url} broke off")

    @contextmanager
    def _plain_failures(self) -> Iterator[None]:
        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout):
            raise CommandError(f"no server answers at {self.url}: {self._hint}") from None
        except (httpx.InvalidURL, httpx.UnsupportedProtocol):
            raise CommandError(f"{self.url} is no URL of a server") from None
        except httpx.TimeoutException:
            raise CommandError(f"{self.url} did not answer in time") from None
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            raise CommandError(f"the connection to {self.url} broke: {error}") from None

    def _check(self, answer: httpx.Response) -> None:
        if answer.status_code < 400:
            return
        if answer.status_code == 401:
            what = "does not take this API key" if self._has_key else f"asks for an API key: set {self._key_hint}"
            raise CommandError(f"{self.url} {what}")
        try:
            text = message_of(answer.json())
        except ValueError:
            text = ""
        raise CommandError(text or f"{answer.request.url} answers with status {answer.status_code}")


@contextmanager
def understanding(url: str) -> Iterator[None]:
    """What a server says is read in here: where it has another shape than was asked for, that is told in one line."""
    try:
        yield
    except (TypeError, AttributeError, LookupError, ValueError) as error:
        shown = " ".join(f"{type(error).__name__}: {error}".split())[:100]
        raise CommandError(
            f"{url} answers in a shape that is not known here ({shown}): is it such a server?"
        ) from error


def base_url(url: str) -> str:
    """With a scheme, and without the `/v1` and the slash that users of other clients put behind it."""
    url = url.strip().rstrip("/").removesuffix("/v1")
    return url if "://" in url else f"http://{url}"


def message_of(content: Any) -> str:
    """The text of an error in OpenAI's shape, on one line; empty where it has another shape."""
    error = content.get("error") if isinstance(content, dict) else None
    text = error.get("message") if isinstance(error, dict) else error
    return " ".join(text.split()) if isinstance(text, str) else ""


def models_of(connection: Connection) -> list[str]:
    """The names of those that are served now. Raises `CommandError`."""
    content = connection.get("/v1/models")
    try:
        return [str(model["id"]) for model in content["data"]]
    except (KeyError, TypeError):
        raise CommandError(f"{connection.url} does not tell its models: is it such a server?") from None


def chosen_model(connection: Connection, wanted: str | None) -> str:
    """The model to ask: the one wanted, else the first that is served. Raises `CommandError` where it is not served."""
    served = models_of(connection)
    if not served:
        raise CommandError(f"{connection.url} serves no model now: is an executor attached?")
    if wanted is not None and wanted not in served:
        raise CommandError(f"there is no model {wanted!r} at {connection.url}; there is {', '.join(served)}")
    return wanted or served[0]
