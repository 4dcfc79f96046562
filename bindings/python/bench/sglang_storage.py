"""SGLang's file backend against kvpool's node: the same pages in one run.

    python bindings/python/bench/sglang_storage.py --python PYTHON [--batches 4]

Pages of 1 MiB go in batches of 128 from a host pool to the storage, and come back to other places of
it as another engine would read them, through the functions of SGLang's cache controller. The files are in a folder for temporary
files, which the page cache of the system holds; the node is another process on this machine,
reached through the loopback. PYTHON is as for `sglang_host.py`.

| column | meaning |
|---|---|
| set, get | wall-clock time of a page, median of the batches |
| CPU | time of all threads of this process for a page; that of the node is not in it |
| exists | wall-clock time for a page, in a call for 128 pages that are there. kvpool asks the node, and moves none |
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace

from sglang_host import start

HERE = Path(__file__).resolve().parent
PAGE = 64
BATCH = 128


class Side:
    """One backend, and what is measured of it."""

    def __init__(self, name: str, make: Callable, pool, kind: str) -> None:
        from sglang.srt.managers.cache_controller import HiCacheController

        self.name, self.pool = name, pool
        self.writer, self.reader = (
            SimpleNamespace(storage_backend=make(), storage_host_pool=pool, page_size=PAGE) for _ in range(2)
        )
        for end in (self.writer, self.reader):
            end.storage_backend.register_mem_pool_host(pool)
        self.set, self.get = (getattr(HiCacheController, kind.format(call)) for call in ("set", "get"))
        self.wall: dict[str, list[float]] = {"set": [], "get": [], "exists": []}
        self.cpu: dict[str, list[float]] = {"set": [], "get": [], "exists": []}

    def timed(self, what: str, call, *arguments):
        cpu, wall = time.process_time(), time.perf_counter()
        answer = call(*arguments)
        self.wall[what].append(time.perf_counter() - wall)
        self.cpu[what].append(time.process_time() - cpu)
        return answer

    def batch(self, number: int, sources, targets) -> None:
        import torch

        keys = [f"{number * BATCH + page:064x}" for page in range(BATCH)]
        operation = SimpleNamespace(request_id=str(number), is_terminated=lambda: False)
        self.pool.kv_buffer[:, targets] = 0
        assert self.timed("set", self.set, self.writer, keys, sources)
        assert self.timed("exists", self.reader.storage_backend.batch_exists, keys) == BATCH
        assert self.timed("get", self.get, self.reader, operation, keys, targets) == BATCH
        assert torch.equal(self.pool.kv_buffer[:, sources], self.pool.kv_buffer[:, targets])


def run(arguments: argparse.Namespace) -> None:
    import torch
    from sglang.srt.mem_cache.hicache_storage import HiCacheFile, HiCacheStorageConfig
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
    from sglang.srt.mem_cache.storage import StorageBackendFactory

    sys.path.insert(0, str(HERE.parent / "tests"))
    from cache_node import CacheNode

    torch.set_num_threads(1)
    device = MHATokenToKVPool(PAGE, PAGE, torch.float16, 8, 128, 4, "cpu", False)
    pool = MHATokenToKVPoolHost(
        device.get_device_pool_infos()[0].buffer_info,
        2 * BATCH,
        0,
        PAGE,
        "page_first",
        pin_memory=False,
        device_capacity_tokens=PAGE,
        start_layer=0,
        end_layer=4,
    )
    page_bytes = PAGE * pool.size_per_token
    slots = pool.alloc(2 * BATCH * PAGE)
    with tempfile.TemporaryDirectory() as folder, CacheNode(page_bytes, values=BATCH * arguments.batches + 64) as node:
        settings = {"peer": "cache", "address": node.address, "timeout": 60.0, "patience": 60.0}
        extra = {"backend_name": "kvpool", "module_path": "kvpool.sglang", "class_name": "KvpoolStorage"}
        config = HiCacheStorageConfig(
            0, 1, 0, 1, 0, 1, False, False, True, "model", extra_config={**extra, "kvpool": settings}
        )
        sides = [
            Side("file", lambda: HiCacheFile(config, folder), pool, "_generic_page_{}"),
            Side(
                "kvpool",
                lambda: StorageBackendFactory.create_backend("dynamic", config, pool),
                pool,
                "_page_{}_zero_copy",
            ),
        ]
        for end in (sides[1].writer, sides[1].reader):
            # Until it has reached the node.
            while not end.storage_backend.set("first", pool.get_data_page(0)):
                time.sleep(0.01)
        for number in range(arguments.batches):
            # K and V of each slot differ from those of others.
            pool.kv_buffer[:, slots[: BATCH * PAGE]] = torch.rand(2, BATCH * PAGE, 4, 8, 128).to(torch.float16)
            for side in sides:
                side.batch(number, slots[: BATCH * PAGE], slots[BATCH * PAGE :])
    print(f"torch {torch.__version__}, {arguments.batches} batches of {BATCH} pages of {page_bytes >> 10} KiB")
    print("| backend | set, us | CPU, us | exists, us | CPU, us | get, us | CPU, us |")
    print("|---|---|---|---|---|---|---|")
    for side in sides:
        micros = [
            median(times[what]) / BATCH * 1e6 for what in ("set", "exists", "get") for times in (side.wall, side.cpu)
        ]
        print(f"| {side.name} | {' | '.join(f'{value:.0f}' for value in micros)} |")


def main() -> int:
    parser = argparse.ArgumentParser(description="SGLang's file backend against kvpool's node")
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--python", help="an interpreter with torch; default: the engines' own, if it has torch")
    return start(parser.parse_args(), run, __file__)


if __name__ == "__main__":
    sys.exit(main())
