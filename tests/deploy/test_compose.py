"""The compose file and the images: what they promise, and that it parses."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from common.addresses import is_loopback
from deploy.local import ROOT
from executor_svc.settings import ExecutorSettings
from scheduler_svc.settings import SchedulerSettings


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    return found


def interpolated(value: str) -> str:
    """A value as compose makes it of the defaults and `.env`."""
    known = dict(line.split("=", 1) for line in (ROOT / ".env").read_text().splitlines() if not line.startswith("#"))
    return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda found: known.get(found[1]) or found[2], value)


def test_each_service_is_confined(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert service["user"] != "root" and service["read_only"] and service["cap_drop"] == ["ALL"], name
        assert "healthcheck" in service, name


def test_compose_alone_starts_a_scheduler_and_a_cpu_executor(services: dict[str, Any]) -> None:
    assert (ROOT / ".env").read_text().splitlines()[-1] == "COMPOSE_PROFILES=cpu"
    started = {name for name, service in services.items() if service.get("profiles", ["cpu"]) == ["cpu"]}
    assert started == {"scheduler", "executor"}


def test_nothing_is_published_beyond_this_machine(services: dict[str, Any]) -> None:
    for name, service in services.items():
        for port in service.get("ports", []):
            assert interpolated(port).startswith("127.0.0.1:"), name


def test_images_of_others_are_pinned_and_start_only_with_the_profile_metrics(services: dict[str, Any]) -> None:
    others = {name: service for name, service in services.items() if "build" not in service}
    assert set(others) == {"prometheus", "grafana"}
    for service in others.values():
        assert service["profiles"] == ["metrics"] and re.fullmatch(r"[a-z/]+:v?\d+\.\d+\.\d+", service["image"])
        for volume in service["volumes"]:
            source = volume.partition(":")[0]
            assert not source.startswith(".") or ((ROOT / source).is_dir() and volume.endswith(":ro"))


def test_the_admin_api_is_reached_from_within_the_container_alone(
    services: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other containers share a network with this one: beyond its loopback the admin API would be open to them."""
    scheduler = services["scheduler"]
    for variable, value in scheduler["environment"].items():
        monkeypatch.setenv(variable, interpolated(value))
    settings = SchedulerSettings.from_command_line([])
    assert settings.admin_port == 8001 and is_loopback(settings.admin_host)
    assert [interpolated(port).rsplit(":", 1)[1] for port in scheduler["ports"]] == ["8000"]


def test_each_gpu_has_a_service_of_its_own(services: dict[str, Any]) -> None:
    for number in (0, 1):
        (device,) = services[f"executor-gpu-{number}"]["deploy"]["resources"]["reservations"]["devices"]
        assert device["device_ids"] == [str(number)] and device["capabilities"] == ["gpu"]


def test_the_environment_is_accepted_by_the_settings(services: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, service in services.items():
        if not service["image"].startswith("gilir-"):
            continue
        for variable, value in service["environment"].items():
            monkeypatch.setenv(variable, interpolated(value))
        kind = SchedulerSettings if name == "scheduler" else ExecutorSettings
        settings = kind.from_command_line([])
        ours = [variable for variable in service["environment"] if variable.startswith("GILIR_")]
        fields = {variable.removeprefix("GILIR_").lower() for variable in ours}
        assert fields <= settings.model_fields_set | {"model", "api_keys", "api_key", "open_metrics"}, name
        for variable in service["environment"]:
            monkeypatch.delenv(variable)


def test_without_the_word_that_allows_it_the_api_is_not_served_without_keys(
    services: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable, value in services["scheduler"]["environment"].items():
        monkeypatch.setenv(variable, interpolated(value))
    monkeypatch.delenv("GILIR_ALLOW_NO_API_KEYS")
    with pytest.raises(SystemExit):
        SchedulerSettings.from_command_line([])
    assert "GILIR_ALLOW_NO_API_KEYS" in capsys.readouterr().err
    monkeypatch.setenv("GILIR_API_KEY", "gk-for-all")
    assert SchedulerSettings.from_command_line([]).isolate_tenants


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason="docker-compose is not installed")
@pytest.mark.parametrize("profile", ["cpu", "gpu", "gpu,gpu2", "cpu,metrics"])
def test_docker_compose_reads_the_file(profile: str) -> None:
    environment = {**os.environ, "COMPOSE_PROFILES": profile}
    done = subprocess.run(
        ["docker-compose", "config", "--quiet"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_dockerfiles_copy_what_the_services_import() -> None:
    scheduler = (ROOT / "deploy" / "scheduler.Dockerfile").read_text()
    executor = (ROOT / "deploy" / "executor.Dockerfile").read_text()
    assert {"common", "scheduler_svc"} <= set(scheduler.split()) and "executor_svc" not in scheduler
    assert {"common", "kernels", "executor_svc"} <= set(executor.split()) and "scheduler_svc" not in executor
