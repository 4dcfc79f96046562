"""kvpool under SGLang's hierarchical cache: places in host memory, and a storage backend.

**Host pool.** :func:`install` makes SGLang's host pools deal pages from a :class:`kvpool.FramePool`:
an allocation gets few runs of consecutive pages, also after many frees in another order, so that a
transfer between host and device has few pieces. Installed as a plugin, if ``SGLANG_PLUGINS`` names
``kvpool`` or ``KVPOOL_SGLANG=host`` is set.

**Storage backend.** :class:`KvpoolStorage` keeps pages in a kvpool node, which several engines
share::

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
        "backend_name": "kvpool", "module_path": "kvpool.sglang", "class_name": "KvpoolStorage",
        "interface_v1": 1,
        "kvpool": {"peer": "cache", "address": "10.0.0.2:7411", "namespace": "revision 1"}}'

It can be imported only where SGLang is installed, and refuses one whose classes have changed.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .._drift import EngineChanged
    from .host import HostPages, check, install
    from .storage import KvpoolStorage, check_storage

__all__ = ["EngineChanged", "HostPages", "KvpoolStorage", "check", "check_storage", "install", "register"]

_MODULES = {
    "EngineChanged": "kvpool._drift",
    "HostPages": "kvpool.sglang.host",
    "check": "kvpool.sglang.host",
    "install": "kvpool.sglang.host",
    "KvpoolStorage": "kvpool.sglang.storage",
    "check_storage": "kvpool.sglang.storage",
}


def __getattr__(name: str) -> Any:
    # SGLang imports this module in all of its processes, before it has decided what they do: what is not
    # asked for is not imported.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_MODULES[name]), name)


def register() -> None:
    """The entry point of the group ``sglang.srt.plugins``.

    SGLang loads all installed plugins if ``SGLANG_PLUGINS`` is not set; kvpool's changes nothing
    unless it is named there, or ``KVPOOL_SGLANG`` is set.
    """
    is_named = "kvpool" in (name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(","))
    part = os.environ.get("KVPOOL_SGLANG", "host" if is_named else "off")
    if part != "off":
        from .host import install

        install(part)
        logging.getLogger("sglang.kvpool").info("kvpool: SGLang's host pools are kvpool's")
