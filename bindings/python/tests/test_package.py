"""What the package is made of."""

from __future__ import annotations

import tomllib
from pathlib import Path

FOLDER = Path(__file__).parent.parent


def test_the_wheel_has_the_licences_of_the_repository() -> None:
    with (FOLDER / "pyproject.toml").open("rb") as file:
        named = tomllib.load(file)["project"]["license-files"]
    licences = sorted((FOLDER.parent.parent).glob("LICENSE-*"))
    assert sorted(named) == [licence.name for licence in licences] and len(named) == 2
    for licence in licences:
        assert (FOLDER / licence.name).read_text() == licence.read_text()
