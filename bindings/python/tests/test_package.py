"""What the package is made of."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent


def test_the_wheel_has_the_licences_of_the_repository() -> None:
    with (FOLDER / "pyproject.toml").open("rb") as file:
        named = tomllib.load(file)["project"]["license-files"]
    licences = sorted((FOLDER.parent.parent).glob("LICENSE-*"))
    assert sorted(named) == [licence.name for licence in licences] and len(named) == 2
    for licence in licences:
        assert (FOLDER / licence.name).read_text() == licence.read_text()


@pytest.mark.parametrize(
    ("variables", "error"),
    [
        ({}, None),
        ({"VLLM_PLUGINS": "other"}, None),
        ({"VLLM_PLUGINS": "kvpool", "KVPOOL_VLLM": "off"}, None),
        ({"VLLM_PLUGINS": "kvpool"}, "kvpool cannot be used: No module named 'vllm'"),
        ({"KVPOOL_VLLM": "queue"}, "kvpool cannot be used: No module named 'vllm'"),
    ],
)
def test_the_entry_point_of_vllm_fails_only_if_kvpool_is_asked_for(variables: dict[str, str], error: str | None) -> None:
    """Without vLLM: its loader calls an entry point only if that can be imported."""
    with (FOLDER / "pyproject.toml").open("rb") as file:
        place = tomllib.load(file)["project"]["entry-points"]["vllm.general_plugins"]["kvpool"]
    module, _, function = place.partition(":")
    code = f"import sys, {module}; {module}.{function}(); print('kvpool' in sys.modules)"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "KVPOOL_"))}
    ran = subprocess.run([sys.executable, "-c", code], env={**kept, **variables}, capture_output=True, text=True)
    if error is None:
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, "False\n", "")
    else:
        assert ran.returncode == 1 and error in ran.stderr.splitlines()[-1]
