"""The file of API keys: what may stand in it, the command that writes it, and how a frontend keeps up with it."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from scheduler_svc.frontend.key_ring import CHECK_S, KeyRing
from scheduler_svc.http.errors import ApiError
from scheduler_svc.keys import ANYBODY, ApiKey, KeyFileError, add_key, fingerprint_of, new_secret, read_keys, remove_key
from scheduler_svc.keys.command import main

HASH = "0" * 64


def key(secret: str, name: str = "k", **fields: Any) -> ApiKey:
    return ApiKey(id=name, tenant="t", sha256=fingerprint_of(secret).hex(), **fields)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments], "gilir keys")
    return status, *capsys.readouterr()


# --- the file ---


def test_a_key_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    wanted = [
        key("a", "a"),
        key(
            "b", "b", created="2026-01-02", max_concurrent=3, tokens_per_minute=9, best_priority=-4, models=("m", "世")
        ),
    ]
    for one in wanted:
        add_key(path, one)
    assert read_keys(path) == wanted and path.stat().st_mode & 0o777 == 0o600
    assert wanted[1].allows("m") and not wanted[1].allows("n") and wanted[0].allows("n")


def test_comments_and_blank_lines_stay_where_they_are(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# whose\n\n" + json.dumps(key("a", "a").model_dump()) + "\n  # an indented one")
    path.chmod(0o644)
    add_key(path, key("b", "b"))
    remove_key(path, "a")
    lines = path.read_text().splitlines()
    assert lines[:3] == ["# whose", "", "  # an indented one"] and [one.id for one in read_keys(path)] == ["b"]
    assert path.stat().st_mode & 0o777 == 0o644 and list(tmp_path.iterdir()) == [path]
    remove_key(path, "b")
    assert read_keys(path) == []


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("gk-secret", "is no JSON object"),
        ('["gk-secret"]', ""),
        ('{"id": "a", "tenant": "t"}', "sha256: Field required"),
        (f'{{"id": "a", "tenant": "t", "sha256": "{HASH}", "key": "gk-secret"}}', "key: Extra inputs"),
        (f'{{"id": "a b", "tenant": "t", "sha256": "{HASH}"}}', "id: "),
        (f'{{"id": "a", "tenant": "", "sha256": "{HASH}"}}', "tenant: "),
        ('{"id": "a", "tenant": "t", "sha256": "gk-secret"}', "sha256: "),
        (f'{{"id": "a", "tenant": "t", "sha256": "{HASH}", "max_concurrent": -1}}', "max_concurrent: "),
        (f'{{"id": "a", "tenant": "t", "sha256": "{HASH}", "tokens_per_minute": "9"}}', "tokens_per_minute: "),
        (f'{{"id": "a", "tenant": "t", "sha256": "{HASH}", "models": "m"}}', "models: "),
    ],
)
def test_a_wrong_line_is_told_by_its_number_and_not_shown(line: str, told: str, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# a comment\n{line}\n")
    with pytest.raises(KeyFileError, match=f"{path}, line 2: .*{told}") as caught:
        read_keys(path)
    assert "gk-secret" not in str(caught.value) and "\n" not in str(caught.value)


def test_neither_an_id_nor_a_key_stands_there_twice(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    for second, what in ((key("b", "a"), "id"), (key("a", "b"), "key")):
        path.write_text("".join(json.dumps(one.model_dump()) + "\n" for one in (key("a", "a"), second)))
        with pytest.raises(KeyFileError, match=f"line 2: the {what} of line 1 again"):
            read_keys(path)


def test_writers_wait_for_each_other(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    threads = [threading.Thread(target=add_key, args=(path, key(str(i), str(i)))) for i in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(int(one.id) for one in read_keys(path)) == list(range(12))


# --- the command ---


def test_the_command_shows_a_key_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys"
    limits = [
        "--max-concurrent",
        "2",
        "--tokens-per-minute",
        "90",
        "--best-priority",
        "-1",
        "--model",
        "m",
        "--model",
        "n",
    ]
    status, out, err = run(capsys, "create", "--file", path, "--tenant", "acme", "--id", "one", *limits)
    secret = out.strip()
    assert status == 0 and secret.startswith("gk-") and len(secret) == 46 and secret not in err
    (made,) = read_keys(path)
    assert made.sha256 == fingerprint_of(secret).hex() and secret not in path.read_text()
    assert (made.id, made.tenant, made.max_concurrent, made.tokens_per_minute) == ("one", "acme", 2, 90)
    assert (made.best_priority, made.models) == (-1, ("m", "n"))
    status, out, _ = run(capsys, "list", "--file", path)
    assert status == 0 and "acme" in out and "m,n" in out and made.sha256 not in out and secret not in out
    assert run(capsys, "create", "--file", path, "--tenant", "acme")[1] != secret
    status, out, _ = run(capsys, "revoke", "--file", path, "one")
    assert status == 0 and out == "revoked: one\n" and [one.id for one in read_keys(path)] != ["one"]


def test_the_command_tells_mistakes_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GILIR_API_KEYS", str(tmp_path / "keys"))
    for arguments in (
        ["list"],
        ["revoke", "none"],
        ["create", "--tenant", "two words"],
        ["create", "--tenant", "t", "--max-concurrent", "-1"],
        ["create", "--tenant", "t", "--file", str(tmp_path / "no" / "folder")],
    ):
        status, out, err = run(capsys, *arguments)
        assert status == 1 and not out and err.startswith("error: ") and err.count("\n") == 1
    assert run(capsys, "create", "--tenant", "t", "--id", "x")[0] == 0
    assert "already" in run(capsys, "create", "--tenant", "t", "--id", "x")[2]


# --- the ring ---


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_file_is_looked_at_once_a_second(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys", Clock()
    add_key(path, key("a", "a"))
    ring = KeyRing(path, None, clock)
    assert ring.asked_for and (found := ring.find("a")) is not None and found.id == "a" and ring.find("b") is None
    add_key(path, key("b", "b"))
    remove_key(path, "a")
    clock.now += CHECK_S / 2
    assert ring.find("a") is not None and ring.find("b") is None
    clock.now += CHECK_S
    assert ring.find("a") is None and ring.find("b") is not None


def test_a_file_that_breaks_leaves_the_keys(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys", Clock()
    add_key(path, key("a", "a"))
    ring, good = KeyRing(path, None, clock), path.read_text()
    for breaks in (lambda: path.write_text("{"), path.unlink, path.mkdir):
        breaks()
        clock.now += 2 * CHECK_S
        assert ring.find("a") is not None and ring.find("b") is None
    path.rmdir()
    path.write_text(good.replace('"a"', '"mended"'))
    clock.now += 2 * CHECK_S
    assert (found := ring.find("a")) is not None and found.id == "mended"


def test_a_read_that_failed_is_tried_again_though_the_file_looks_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Descriptors run out for a while, just as the file is replaced."""
    path, clock = tmp_path / "keys", Clock()
    add_key(path, key("a", "a"))
    ring = KeyRing(path, None, clock)
    add_key(path, key("b", "b"))
    remove_key(path, "a")
    real_open, reasons = Path.open, iter([errno.EMFILE, errno.EMFILE, errno.EACCES])

    def failing_open(self: Path, *arguments: Any, **named: Any) -> Any:
        reason = next(reasons, 0)
        if self == path and reason:
            raise OSError(reason, os.strerror(reason))
        return real_open(self, *arguments, **named)

    monkeypatch.setattr(Path, "open", failing_open)
    with capture_logs() as logs:
        for _ in range(3):
            clock.now += 2 * CHECK_S
            assert ring.find("a") is not None and ring.find("b") is None
        clock.now += 2 * CHECK_S
        assert ring.find("a") is None and ring.find("b") is not None, "the revoked key is refused, the new one taken"
    errors = [entry["error"] for entry in logs if entry["log_level"] == "error"]
    assert len(errors) == 2 and "Too many open files" in errors[0] and "Permission denied" in errors[1]


def test_a_ring_that_never_read_its_file_lets_nobody_in_until_it_can(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys", Clock()
    ring = KeyRing(path, "operators", clock)
    assert ring.asked_for and ring.find("operators") is not None
    with pytest.raises(ApiError) as caught:
        ring.find("a")
    assert caught.value.status == 503
    add_key(path, key("a", "a"))
    clock.now += 2 * CHECK_S
    assert ring.find("a") is not None and ring.find("b") is None and ring.find("operators") is not None


def test_without_keys_none_is_asked_for() -> None:
    assert not KeyRing(None, None).asked_for
    assert len({new_secret() for _ in range(100)}) == 100


def test_what_goes_on_in_a_keys_name_finds_it_until_it_is_revoked(tmp_path: Path) -> None:
    now, path = 0.0, tmp_path / "keys"
    add_key(path, key("a", "a"))
    ring = KeyRing(path, None, lambda: now)
    assert ring.named("a") == key("a", "a") and ring.named("") is ANYBODY and ring.named("b") is None
    remove_key(path, "a")
    now += CHECK_S
    assert ring.named("a") is None and ring.named("") is ANYBODY
    assert KeyRing(None, None).named("a") is ANYBODY, "no keys are asked for any more"
