"""The versions of engines that kvpool was tested with."""

from __future__ import annotations

import logging
import os

from ._drift import EngineChanged

__all__ = ["check_version"]

logger = logging.getLogger("kvpool")


def check_version(engine: str, version: str, *tested: str) -> None:
    """Refuses a version of an engine that was not tested, unless ``KVPOOL_<ENGINE>_UNTESTED`` is 1."""
    if version.partition("+")[0] in tested:
        return
    name, variable = f"{engine} {version}", f"KVPOOL_{engine.upper()}_UNTESTED"
    message = f"{name} is not one of the versions that kvpool was tested with ({', '.join(tested)})"
    if os.environ.get(variable) != "1":
        raise EngineChanged(f"{message}; {variable}=1 tries it", engine=name, differences=[])
    logger.warning("kvpool: %s", message)
