"""What the package is made of."""

from __future__ import annotations

import os
import pydoc
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kvpool
from kvpool import _kvpool

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


def test_the_stubs_have_the_docstrings_of_the_module() -> None:
    subprocess.run([sys.executable, FOLDER / "stubs.py", "--check"], check=True)
    assert '"""Number of blocks after."""' in (FOLDER / "python" / "kvpool" / "_kvpool.pyi").read_text()


def test_help_shows_the_defaults() -> None:
    classes = [value for value in vars(_kvpool).values() if isinstance(value, type)]
    members = [member for one in classes for member in [one, *vars(one).values()]]
    signatures = [getattr(getattr(one, "__func__", one), "__text_signature__", None) for one in members]
    assert [one for one in signatures if one and "..." in one] == [] and len(classes) > 30 and len(signatures) > 300
    for call, shown in (
        (kvpool.Tier.get, "timeout=1.0"),
        (kvpool.Pool.allocate, "priority='normal'"),
        (kvpool.FramePool.allocate, "ahead=0"),
    ):
        assert shown in pydoc.render_doc(call, renderer=pydoc.plaintext)


def test_the_shown_defaults_are_those_of_the_code() -> None:
    found = 0
    for file in (FOLDER / "src").rglob("*.rs"):
        for code, shown in re.findall(r'signature = (\(.*?\)), text_signature = r?#?"(\(.*\))"#?\)\]', file.read_text()):
            for rust, python in (("Rank::default()", '"normal"'), ("Duration::", ""), ("Vec::new()", "()"), ("HashMap::new()", "{}")):
                code = code.replace(rust, python)
            code = re.sub(r"Seconds\(from_secs\((\d+)\)\)", r"\1.0", code)
            code = re.sub(r"Seconds\(from_millis\((\d+)\)\)", lambda found: str(int(found[1]) / 1000), code)
            code = re.sub(r"=[A-Z]\w*\(([\d.]+)\)", r"=\1", code).replace("=true", "=True").replace("=false", "=False")
            assert shown.replace("($self, ", "(") == code, file
            found += 1
    assert found > 25
