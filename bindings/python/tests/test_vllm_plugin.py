"""kvpool as a plugin of real versions of vLLM: what fails stops the process if kvpool is asked for, and is silent otherwise.

Each case is a process that loads vLLM's plugins, as its front end, its engines and its workers do.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
from engines.fetch import HERE, PACKAGE, VLLM_VERSIONS, Engine, environment_of, python_of
from engines.upstream import fetched, install

TIMEOUT_S = 300
REFUSED = "vllm-0.25"
LOADS = "from vllm.plugins import load_general_plugins as load; load(); print('stock runs')"
ACTIVE = """
from vllm.v1.core import kv_cache_coordinator
print(kv_cache_coordinator.BlockPool.__module__)
"""


def load(engine: Engine, folder: Path, code: str = LOADS, first: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs code where kvpool is installed. ``first`` is a folder that hides the package."""
    if not folder.joinpath("kvpool-0.dist-info").exists():
        install(folder)
    environment = environment_of(engine)
    environment["PYTHONPATH"] = os.pathsep.join(
        ([str(first)] if first else []) + [environment["PYTHONPATH"], str(folder)]
    )
    return subprocess.run(
        [python_of(engine), "-c", code],
        env={**environment, **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )


def assert_stopped(ran: subprocess.CompletedProcess[str], why: str) -> None:
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "stock runs" not in ran.stdout
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: kvpool cannot be used: ") and why in last, ran.stderr
    assert last.endswith("KVPOOL_VLLM=off runs vLLM without it"), ran.stderr


def assert_silent(ran: subprocess.CompletedProcess[str]) -> None:
    assert ran.returncode == 0 and "stock runs" in ran.stdout, ran.stdout + ran.stderr
    assert "kvpool" not in ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def old() -> Engine:
    return fetched(REFUSED)


def test_the_loader_skips_a_plugin_that_cannot_be_imported(old: Engine, tmp_path: Path) -> None:
    """What these tests are about: else the module of the entry point could be any."""
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    place = project["entry-points"]["vllm.general_plugins"]["kvpool"]
    install(tmp_path)
    entries = tmp_path / "kvpool-0.dist-info" / "entry_points.txt"
    entries.write_text(entries.read_text().replace(place, "kvpool.vllm:install"))
    ran = load(old, tmp_path, VLLM_PLUGINS="kvpool")
    assert ran.returncode == 0 and "stock runs" in ran.stdout


@pytest.mark.parametrize("variables", [{"VLLM_PLUGINS": "kvpool"}, {"KVPOOL_VLLM": "queue"}, {"VLLM_PLUGINS": "x,kvpool"}])
def test_an_engine_without_the_classes_stops(old: Engine, tmp_path: Path, variables: dict[str, str]) -> None:
    assert_stopped(load(old, tmp_path, **variables), "is not one of the versions that kvpool was tested with")


def test_an_engine_that_tries_again_stops_again(old: Engine, tmp_path: Path) -> None:
    code = """
from vllm.plugins import load_general_plugins as load
try:
    load()
except RuntimeError:
    load()
print('stock runs')
"""
    assert_stopped(load(old, tmp_path, code, VLLM_PLUGINS="kvpool"), "is not one of the versions that kvpool was tested with")


@pytest.mark.parametrize("variables", [{}, {"VLLM_PLUGINS": "other"}, {"VLLM_PLUGINS": "kvpool", "KVPOOL_VLLM": "off"}])
def test_a_plugin_that_is_not_asked_for_is_silent(old: Engine, tmp_path: Path, variables: dict[str, str]) -> None:
    ran = load(old, tmp_path, **variables)
    if "KVPOOL_VLLM" in variables:
        assert ran.returncode == 0 and "stock runs" in ran.stdout
    else:
        assert_silent(ran)


def test_a_package_that_cannot_be_imported_stops_the_engine(tmp_path: Path) -> None:
    engine = fetched("vllm")
    broken = tmp_path / "broken"
    (broken / "kvpool").mkdir(parents=True)
    (broken / "kvpool" / "__init__.py").write_text("raise ImportError('libcuda.so.1: cannot open shared object file')")
    shutil.copytree(PACKAGE / "kvpool_plugin", broken / "kvpool_plugin")
    ran = load(engine, tmp_path / "installed", first=broken, VLLM_PLUGINS="kvpool")
    assert_stopped(ran, "libcuda.so.1: cannot open shared object file")
    assert_silent(load(engine, tmp_path / "installed", first=broken))


@pytest.mark.parametrize("name", VLLM_VERSIONS)
def test_tested_versions_are_accepted(name: str, tmp_path: Path) -> None:
    ran = load(fetched(name), tmp_path, LOADS + ACTIVE, VLLM_PLUGINS="kvpool")
    assert ran.returncode == 0 and "kvpool.vllm.pool" in ran.stdout, ran.stdout + ran.stderr


def test_other_versions_are_refused_unless_allowed(tmp_path: Path) -> None:
    engine = fetched("vllm")
    code = f"import vllm; vllm.__version__ = '0.33.7'; {LOADS}{ACTIVE}"
    ran = load(engine, tmp_path, code, VLLM_PLUGINS="kvpool")
    assert_stopped(ran, "vLLM 0.33.7 is not one of the versions that kvpool was tested with (0.31.0, 0.32.0, 0.33.0)")
    allowed = load(engine, tmp_path, code, VLLM_PLUGINS="kvpool", KVPOOL_VLLM_UNTESTED="1")
    assert allowed.returncode == 0 and "kvpool.vllm.pool" in allowed.stdout, allowed.stdout + allowed.stderr
    assert "vLLM 0.33.7 is not one of the versions" in allowed.stdout + allowed.stderr
    local = load(engine, tmp_path, code.replace("0.33.7", "0.33.0+cu130"), VLLM_PLUGINS="kvpool")
    assert local.returncode == 0, local.stderr


def test_bodies_are_those_of_the_sources() -> None:
    for name in VLLM_VERSIONS:
        python = python_of(fetched(name))
    ran = subprocess.run([python, HERE / "vllm_bodies.py"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
