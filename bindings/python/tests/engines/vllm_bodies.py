"""Writes or verifies ``kvpool/vllm/tested.json``: the bodies of vLLM's methods that kvpool was tested with.

    python bindings/python/tests/engines/vllm_bodies.py [--write]

Each version of vLLM is fetched (``fetch.py``), and its hashes are taken in a process of its own. Without ``--write``,
the exit status is 1 if the table has other hashes. A version belongs into the table when its tests pass (`test_vllm.py`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

DOORS = ["kvpool.vllm", "kvpool.vllm.compaction", "kvpool.vllm.offload", "kvpool.vllm.tier"]


def record() -> dict[str, str]:
    """Returns the hashes of all functions of the vLLM of this process that kvpool compares."""
    import importlib

    from kvpool import _drift
    from kvpool.vllm import _tested

    found = {}

    def note(function: object, bodies: object) -> bool:
        if bodies is not None:
            found[_drift.name_of(function)] = _drift.body_of(function)
        return True

    _drift._has_body, _tested._bodies = note, dict
    for name in DOORS:
        importlib.import_module(name)
    importlib.import_module("kvpool.vllm").check()
    return found


def table_of(hashes: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    """Joins the hashes of versions to ``{function: {hash: versions}}``."""
    table: dict[str, dict[str, str]] = {}
    for version in sorted(hashes, key=lambda version: [int(part) for part in version.split(".")]):
        for name, body in hashes[version].items():
            bodies = table.setdefault(name, {})
            bodies[body] = f"{bodies.get(body, '')} {version}".strip()
    return dict(sorted(table.items()))


def fetched_table() -> dict[str, dict[str, str]]:
    from engines.fetch import VLLM_VERSIONS, environment_of, fetch, python_of

    hashes = {}
    for name in VLLM_VERSIONS:
        engine = fetch(name)
        command = [python_of(engine), str(Path(__file__).resolve()), "--record"]
        ran = subprocess.run(command, cwd=engine.folder / "source", env=environment_of(engine), capture_output=True, text=True)
        if ran.returncode:
            raise SystemExit(f"{name}: {ran.stdout}{ran.stderr}")
        hashes[engine.version] = json.loads(ran.stdout.splitlines()[-1])
    return table_of(hashes)


def main(arguments: list[str]) -> int:
    if arguments == ["--record"]:
        print(json.dumps(record()))
        return 0
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from engines.fetch import PACKAGE

    path = PACKAGE / "kvpool" / "vllm" / "tested.json"
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(bodies)}" for name, bodies in fetched_table().items())
    text = f"{{\n{lines}\n}}\n"
    if arguments == ["--write"]:
        path.write_text(text)
    elif path.read_text() != text:
        print(f"{path} has other bodies than the sources of vLLM; --write writes it", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
