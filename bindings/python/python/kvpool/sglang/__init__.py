"""kvpool under SGLang's hierarchical cache: places in host memory, and a storage backend.

**Host pool.** :func:`install` makes SGLang's host pools deal pages from a :class:`kvpool.FramePool`:
an allocation gets few runs of consecutive pages, also after many frees in another order, so that a
transfer between host and device has few pieces. Installed as a plugin, if ``SGLANG_PLUGINS`` names
``kvpool`` or ``KVPOOL_SGLANG=host`` is set: ``kvpool_plugin.sglang`` is the entry point.
``KVPOOL_SGLANG_SERVE=127.0.0.1:7410``, or the path of a settings file, serves an admin interface of
each pool, with page and metrics. A rank adds its number to the port, and a further pool of a
process the number of ranks; port 0 takes a free one, which the log names. Replicas (``--dp-size``) on
one host need port 0.

**Storage backend.** :class:`KvpoolStorage` keeps pages in a kvpool node, which several engines
share::

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{
        "backend_name": "kvpool", "module_path": "kvpool.sglang", "class_name": "KvpoolStorage",
        "interface_v1": 1,
        "kvpool": {"peer": "cache", "address": "10.0.0.2:7411", "namespace": "revision 1"}}'

It can be imported only where SGLang is installed, and refuses one whose classes have changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .._drift import EngineChanged
    from .host import HostPages, check, install
    from .storage import KvpoolStorage, check_storage

__all__ = ["EngineChanged", "HostPages", "KvpoolStorage", "check", "check_storage", "install"]

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
