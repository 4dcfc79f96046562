"""kvpool under vLLM: the blocks of the KV cache are frames of a pool of kvpool.

Installed by vLLM's plugins: ``pip install kvpool``, then ``VLLM_PLUGINS=kvpool vllm serve ...``. It can
be imported only where vLLM is installed, and refuses a vLLM whose block pool has changed.

| environment variable | meaning |
|---|---|
| ``KVPOOL_VLLM`` | ``pool`` (default): the block pool. ``queue``: its queue of free blocks only. ``off`` |
| ``KVPOOL_VLLM_AHEAD`` | frames to evict ahead of a request, from which its runs are chosen; by default a 128th of the pool |
| ``KVPOOL_VLLM_SERVE`` | where the admin interface of the pool is served, with page and metrics: ``127.0.0.1:7410``, or the path of a settings file; ``off`` (default). A data-parallel rank adds its number to the port; port 0 takes a free one, which the log names. Ranks that Ray starts on one host need port 0 |
"""

from __future__ import annotations

from .._drift import EngineChanged
from . import _tested

_tested.bodies()  # refuses other versions by name, before a name is missing in them

from .plugin import check, install
from .owners import Owners, owners
from .pool import BlockPool
from .queue import FreeQueue

__all__ = ["BlockPool", "EngineChanged", "FreeQueue", "Owners", "check", "install", "owners"]
