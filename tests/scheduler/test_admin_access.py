"""Who may ask the admin API, and where it may be opened."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError
from structlog.testing import capture_logs

from common.addresses import is_loopback
from scheduler_svc.admin.key import AdminKey
from scheduler_svc.settings import SchedulerSettings
from tests.scheduler.test_admin import AdminRig, error

KEY = "a-key-for-tests-0123456789"


@pytest.fixture
def rig() -> AdminRig:
    return AdminRig()


@pytest.mark.parametrize("authorization", ["", "Bearer", "Bearer wrong", KEY, f"Basic {KEY}", f"Bearer {KEY}x"])
def test_with_a_key_every_request_needs_it(authorization: str) -> None:
    rig = AdminRig(KEY)
    rig.attach()
    for method, path in (("GET", "executors"), ("POST", "executors/one/drain"), ("DELETE", "executors/one")):
        refused = rig.ask(method, path, headers={"authorization": authorization})
        assert error(refused, 401)["code"] == "invalid_api_key" and refused.headers["www-authenticate"] == "Bearer"
    # From anywhere: the key is what counts.
    headers = {"authorization": f"Bearer {KEY}", "origin": "http://elsewhere"}
    told = rig.ask("GET", "executors/one", host="admin.example", headers=headers)
    assert told.json()["state"] == "attached"


def test_without_a_key_browsers_cannot_be_made_to_ask(rig: AdminRig) -> None:
    rig.attach()
    assert error(rig.ask("POST", "executors/one/drain", headers={"origin": "http://evil.example"}), 403)
    assert error(rig.ask("GET", "executors", host="evil.example:8001"), 403)["code"] == "forbidden"
    assert rig.state() == "attached"
    for host in ("localhost", "[::1]:8001", "127.0.0.1"):
        assert rig.ask("GET", "executors", host=host).status_code == 200


def test_a_key_file_holds_one_key_alone(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    assert AdminKey.read(file).opens(f"bearer {KEY}") and not AdminKey.read(file).opens(f"Bearer {KEY[:-1]}")
    for content in (b"", b"short", f"{KEY} {KEY}".encode(), b"\xff" * 40, "é".encode() * 20):
        file.write_bytes(content)
        with pytest.raises(ValueError, match="must hold one key"):
            AdminKey.read(file)


def test_a_key_file_that_others_can_read_is_told(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(KEY)
    for mode, times in ((0o600, 0), (0o644, 1)):
        file.chmod(mode)
        with capture_logs() as logs:
            AdminKey.read(file)
        assert [entry["file"] for entry in logs if entry["log_level"] == "warning"] == [str(file)] * times


def test_an_admin_api_beyond_loopback_needs_a_key(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "::", "10.0.0.5", "gpu-host"):
        assert not is_loopback(host)
        with pytest.raises(ValidationError, match="give admin-key-file"):
            SchedulerSettings(admin_host=host, admin_port=8001)
        SchedulerSettings(admin_host=host, admin_port=8001, admin_key_file=tmp_path / "key")
    for host in ("127.0.0.1", "::1", "localhost", "127.8.9.10"):
        assert SchedulerSettings(admin_host=host, admin_port=0).admin_key_file is None
