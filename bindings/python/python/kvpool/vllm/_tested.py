"""The versions of vLLM that kvpool was tested with, and a check that the installed one is among them.

``tested.json`` has the hashes of the bodies of all methods of vLLM that kvpool overrides or relies on, as
``{method: {hash: versions}}``. ``tests/engines/vllm_bodies.py`` writes it, from vLLM's sources.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import vllm
from vllm.logger import init_logger

from .._drift import EngineChanged, check_methods
from .._versions import allows_untested, check_version

__all__ = ["ENGINE", "check"]

ENGINE = f"vLLM {vllm.__version__}"

logger = init_logger("vllm.kvpool")


@cache
def bodies() -> dict[str, list[str]]:
    """The tested bodies of the installed version; without one, those of the newest tested version."""
    table = json.loads(Path(__file__).with_name("tested.json").read_text())
    versions = {version for bodies in table.values() for text in bodies.values() for version in text.split()}
    versions = sorted(versions, key=lambda version: [int(part) for part in version.split(".")])
    version = vllm.__version__.partition("+")[0]
    if version not in versions:
        check_version("vLLM", vllm.__version__, *versions)
        version = versions[-1]
    return {
        name: [body for body, text in bodies.items() if version in text.split()] for name, bodies in table.items()
    }


def check(
    stock: object, ours: type, attributes: Iterable[str] = (), functions: Iterable[tuple] = (), own: Iterable[str] = ()
) -> None:
    """``check_methods`` with vLLM, whose version and bodies of methods must be tested ones."""
    what = (ENGINE, stock, ours, attributes, functions, own)
    try:
        check_methods(*what, bodies())
    except EngineChanged as error:
        if not allows_untested("vLLM"):
            raise
        check_methods(*what)  # Other signatures are refused all the same.
        logger.warning("%s", error)
