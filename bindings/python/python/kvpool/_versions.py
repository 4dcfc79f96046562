"""The versions of engines that kvpool was tested with."""

from __future__ import annotations

import logging
import os

from ._drift import EngineChanged

__all__ = ["allows_untested", "check_version"]

logger = logging.getLogger("kvpool")


def allows_untested(engine: str) -> bool:
    """Whether ``KVPOOL_<ENGINE>_UNTESTED`` is 1."""
    return os.environ.get(f"KVPOOL_{engine.upper()}_UNTESTED") == "1"


def check_version(engine: str, version: str, *tested: str) -> None:
    """Refuses a version of an engine that was not tested, unless ``KVPOOL_<ENGINE>_UNTESTED`` is 1."""
    if version.partition("+")[0] in tested:
        return
    name, variable = f"{engine} {version}", f"KVPOOL_{engine.upper()}_UNTESTED"
    message = f"{name} is not one of the versions that kvpool was tested with ({', '.join(tested)})"
    if not allows_untested(engine):
        raise EngineChanged(f"{message}; {variable}=1 tries it", engine=name, differences=[])
    logger.warning("kvpool: %s", message)
