"""`make audit`: asks PyPI's advisory database about every installed package, through pip-audit.

Exit status 0: no vulnerability is known. 1: some are. 2: not all could be asked about, which is no good news either.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

OWN = "gilir"


@dataclass
class Report:
    """What the database said. `problem`: why it said nothing."""

    num_clean: int = 0
    vulnerable: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    problem: str = ""

    @property
    def status(self) -> int:
        if self.vulnerable:
            return 1
        return 2 if self.unknown or self.problem else 0

    def text(self) -> str:
        lines = [*self.vulnerable, *(f"not checked: {name}" for name in self.unknown)]
        if self.problem:
            lines.append(f"error: the advisories could not be asked for: {self.problem}")
        else:
            counts = f"{len(self.vulnerable)} vulnerabilities, {len(self.unknown)} not checked"
            lines.append(f"{self.num_clean} packages without known vulnerabilities, {counts}")
        return "\n".join(lines)


def installed() -> dict[str, str]:
    """Version of each package, but for ourselves; without a build's own suffix, as in 2.0+cpu."""
    found = {str(package.metadata["Name"]): package.version.split("+")[0] for package in distributions()}
    return {name: version for name, version in sorted(found.items()) if name.lower() != OWN}


def ask(tool: str, packages: dict[str, str]) -> Report:
    """Run pip-audit over these packages."""
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder) / "requirements.txt"
        pins.write_text("".join(f"{name}=={version}\n" for name, version in packages.items()))
        options = ["--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json"]
        try:
            done = subprocess.run([tool, "--requirement", str(pins), *options], capture_output=True, text=True)
        except OSError as error:
            return Report(problem=f"{tool}: {error.strerror}")
    return read(done.stdout, done.stderr, packages)


def read(output: str, errors: str, packages: dict[str, str]) -> Report:
    """The report of pip-audit's JSON. A package of which it says nothing was not checked."""
    try:
        answers: list[dict[str, Any]] = json.loads(output)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return Report(problem=(errors.strip().splitlines() or ["pip-audit said nothing"])[-1])
    report, silent = Report(), {_canonical(name): name for name in packages}
    for answer in answers:
        name = silent.pop(_canonical(answer["name"]), str(answer["name"]))
        if "skip_reason" in answer:
            report.unknown.append(f"{name} ({answer['skip_reason']})")
        elif not answer["vulns"]:
            report.num_clean += 1
        for fault in answer.get("vulns", []):
            mended = ", ".join(fault["fix_versions"]) or "no release"
            report.vulnerable.append(f"{name} {answer['version']}: {fault['id']}, mended in {mended}")
    report.unknown += silent.values()
    return report


def _canonical(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def main() -> int:
    parser = argparse.ArgumentParser(prog="audit", description="Ask for known vulnerabilities of what is installed.")
    parser.add_argument("tool", nargs="?", default="pip-audit", help="the pip-audit to run")
    report = ask(parser.parse_args().tool, installed())
    print(report.text())
    return report.status


if __name__ == "__main__":
    sys.exit(main())
