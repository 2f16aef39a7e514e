"""`make audit` tells apart: nothing known, something known, not asked."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.audit import Report, ask, installed, read

PACKAGES = {"numpy": "2.0", "Some_Package": "1.0"}
CLEAN = [{"name": "numpy", "version": "2.0", "vulns": []}, {"name": "some-package", "version": "1.0", "vulns": []}]
FAULT = {"id": "PYSEC-1", "fix_versions": ["1.1"], "aliases": [], "description": "…"}


def output(*dependencies: dict[str, Any]) -> str:
    return json.dumps({"dependencies": dependencies, "fixes": []})


def test_nothing_known() -> None:
    report = read(output(*CLEAN), "", PACKAGES)
    assert report == Report(2) and report.status == 0
    assert report.text() == "2 packages without known vulnerabilities, 0 vulnerabilities, 0 not checked"


def test_something_known_is_told_with_its_cure() -> None:
    report = read(output(CLEAN[0], {**CLEAN[1], "vulns": [FAULT, {**FAULT, "fix_versions": []}]}), "", PACKAGES)
    assert report.status == 1
    assert report.vulnerable == [
        "Some_Package 1.0: PYSEC-1, mended in 1.1",
        "Some_Package 1.0: PYSEC-1, mended in no release",
    ]


@pytest.mark.parametrize(
    ("dependencies", "told"),
    [
        ([CLEAN[0]], "not checked: Some_Package"),
        ([CLEAN[0], {"name": "some-package", "skip_reason": "not found on PyPI"}], "not found on PyPI"),
    ],
)
def test_what_was_not_checked_is_no_success(dependencies: list[dict[str, Any]], told: str) -> None:
    report = read(output(*dependencies), "", PACKAGES)
    assert report.status == 2 and told in report.text()


@pytest.mark.parametrize("said", ["", "[]", "{}", "null", "no JSON"])
def test_a_database_that_cannot_be_reached_is_no_success(said: str) -> None:
    report = read(said, "WARNING: …\nERROR: could not connect to pypi.org\n", PACKAGES)
    assert report.status == 2 and report.text().endswith("could not connect to pypi.org")


def test_the_tool_is_asked_for_pinned_releases(tmp_path: Path) -> None:
    tool = tmp_path / "pip-audit"
    code = "import json, pathlib, sys\npins = pathlib.Path(sys.argv[sys.argv.index('--requirement') + 1]).read_text()\n"
    code += "answers = [{'name': p.split('==')[0], 'version': p.split('==')[1], 'vulns': []} for p in pins.split()]\n"
    tool.write_text(f"#!{sys.executable}\n{code}print(json.dumps({{'dependencies': answers}}))\n")
    tool.chmod(0o755)
    assert ask(str(tool), PACKAGES) == Report(2)
    assert ask(str(tmp_path / "none"), PACKAGES).status == 2


def test_we_ask_about_all_but_ourselves() -> None:
    packages = installed()
    assert {"numpy", "uvicorn", "torch"} <= packages.keys() and "gilir" not in packages
    assert not any("+" in version for version in packages.values())
