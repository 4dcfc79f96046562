"""Runs an engine's own tests with the engine's classes and with kvpool's, and compares."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
import xml.etree.ElementTree
from pathlib import Path
from typing import NoReturn

import pytest

from engines.fetch import HERE, PACKAGE, Engine, Unavailable, environment_of, fetch, python_of

TIMEOUT_S = 300
PYTEST = ["-m", "pytest", "--noconftest", "-c", "/dev/null", "-p", "no:cacheprovider", "-q", "-W", "ignore"]


def unavailable(name: str, error: Unavailable) -> NoReturn:
    """Skips the test, with the reason in the summary; fails it in `.ci/full`, which runs all engines."""
    message = f"{name} CANNOT BE FETCHED, its tests do not run: {error}"
    if os.environ.get("KVPOOL_CI_FULL"):
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


def fetched(name: str) -> Engine:
    """Returns the engine, or ends the test as `unavailable` does."""
    try:
        return fetch(name)
    except Unavailable as error:
        unavailable(name, error)


def install(folder: Path) -> None:
    """Writes metadata of an installation in place into a folder, with the project's entry points."""
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    metadata = folder / f"{project['name']}-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(groups))


def run(engine: Engine, arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs the engine's Python in its source."""
    paths = environment_of(engine)
    paths["PYTHONPATH"] += f":{HERE}"
    return subprocess.run(
        [python_of(engine), *arguments],
        cwd=engine.folder / "source",
        env={**paths, **environment},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def verdicts(engine: Engine, files: list[str], environment: dict[str, str], plugin: str = "") -> dict[str, str]:
    """Returns "passed", "failed" or "skipped" for each of the engine's tests in these files."""
    report = engine.folder / f"report-{plugin or 'stock'}-{environment.get('KVPOOL_VLLM', '')}.xml"
    report.unlink(missing_ok=True)
    plugins = ["-p", plugin] if plugin else []
    ran = run(engine, [*PYTEST, "--tb=line", *plugins, f"--junitxml={report}", *files], environment)
    if not report.exists():
        raise AssertionError(f"the tests of {engine.name} did not run: {ran.stdout[-2000:]}{ran.stderr[-2000:]}")
    return _read(report)


def _read(report: Path) -> dict[str, str]:
    found = {}
    for case in xml.etree.ElementTree.parse(report).iter("testcase"):
        kinds = {child.tag for child in case}
        verdict = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
        found[f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"] = verdict
    return found
