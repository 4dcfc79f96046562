"""A pytest plugin for vLLM's own tests: kvpool's classes in the place of vLLM's.

`KVPOOL_VLLM` chooses them, as for the plugin of vLLM. Tests that import a class by its own module
get kvpool's too.
"""

import os
from types import SimpleNamespace

import numpy
import torch
from vllm.v1.core import block_pool, kv_cache_utils

from kvpool import vllm as kvpool_vllm

part = os.environ["KVPOOL_VLLM"]
if getattr(torch.zeros, "_stands_in", False):
    # Tests of tiering make memory by torch, and use it as a view of numpy.
    torch.zeros = lambda shape, dtype: SimpleNamespace(numpy=lambda: numpy.zeros(shape, numpy.int8))
if part == "offload":
    from vllm.v1.kv_offload.cpu import manager

    from kvpool.vllm.offload import KvpoolOffloadingManager

    manager.CPUOffloadingManager = KvpoolOffloadingManager
    part = "off"
kvpool_vllm.install(part)
if part == "pool":
    block_pool.BlockPool = kvpool_vllm.BlockPool
elif part == "queue":
    kv_cache_utils.FreeKVCacheBlockQueue = kvpool_vllm.FreeQueue
