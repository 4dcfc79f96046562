"""vLLM's CPU offloading on a trace: its managers and eviction policies, and kvpool's, in one run.

    python bindings/python/bench/vllm_offload.py --trace mooncake_conversation.jsonl [--requests 4000]

Each request looks its prompt up, loads what is found, and stores all of it, in chunks of 64 tokens.
The trace is as for `vllm_trace.py`.

| column | meaning |
|---|---|
| runs stored, loaded | maximal runs of consecutive chunk ids of a store, or load, mean: the copies that it needs on the side of the CPU |
| hit rate | share of chunks found |
| CPU | time in calls of the manager, per request, on the calling thread |
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from vllm_trace import TRACE_BLOCK, mean, rows_of, runs

HERE = Path(__file__).resolve().parent
CHUNK = 64


class Side:
    """One manager, and what is measured of it."""

    def __init__(self, name: str, manager) -> None:
        self.name, self.manager = name, manager
        self.cpu = 0.0
        self.stored: list[int] = []
        self.chunks: list[int] = []
        self.loaded: list[int] = []
        self.query = self.hits = self.refused = 0

    def request(self, number: int, keys: list) -> None:
        from vllm.v1.kv_offload.base import LookupResult, ReqContext

        manager, context = self.manager, ReqContext(req_id=str(number))
        for index, key in enumerate(keys):
            context.set_offload_key_position(key, (index + 1) * CHUNK)
        begin = time.thread_time()
        manager.on_new_request(context)
        hits = 0
        while hits < len(keys) and manager.lookup(keys[hits], context) is LookupResult.HIT:
            hits += 1
        load = None
        if hits:
            load = manager.prepare_load(keys[:hits], context)
            manager.complete_load(keys[:hits], context)
        store = manager.prepare_store(keys, context)
        if store is not None:
            manager.complete_store(store.keys_to_store, context)
        manager.on_request_finished(context)
        self.cpu += time.thread_time() - begin
        self.query += len(keys)
        self.hits += hits
        self.refused += store is None
        if load is not None:
            self.loaded.append(runs(load.chunk_ids.tolist()))
        if store is not None and store.keys_to_store:
            self.stored.append(runs(store.store_spec.chunk_ids.tolist()))
            self.chunks.append(len(store.keys_to_store))


def run(arguments: argparse.Namespace) -> None:
    from vllm.v1.kv_offload.base import make_offload_key
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    from kvpool.vllm.offload import KvpoolOffloadingManager

    sides = [
        Side("vLLM, lru", CPUOffloadingManager(arguments.chunks)),
        Side("vLLM, arc", CPUOffloadingManager(arguments.chunks, "arc")),
        Side("kvpool, lru", KvpoolOffloadingManager(arguments.chunks)),
    ]
    per = TRACE_BLOCK // CHUNK
    for number, _, prompt, _, hash_ids in rows_of(arguments.trace, arguments.requests):
        ids = [hash_ids[chunk // per] * per + chunk % per for chunk in range(prompt // CHUNK)]
        keys = [make_offload_key(index.to_bytes(32, "big"), 0) for index in ids]
        if keys:
            for side in sides:
                side.request(number, keys)
    print(f"{arguments.requests} requests, {arguments.chunks} chunks of {CHUNK} tokens; runs of the second half")
    print("| manager | runs stored | of chunks | runs loaded | hit rate | CPU, us | refused |")
    print("|---|---|---|---|---|---|---|")
    for side in sides:
        half = len(side.stored) // 2
        print(
            f"| {side.name} | {mean(side.stored[half:]):.1f} | {mean(side.chunks[half:]):.1f} |"
            f" {mean(side.loaded[len(side.loaded) // 2 :]):.1f} | {side.hits / side.query:.2%} |"
            f" {side.cpu / arguments.requests * 1e6:.0f} | {side.refused} |"
        )
    for side in sides:
        if isinstance(side.manager, KvpoolOffloadingManager):
            print(f"audit of {side.name}: {side.manager.frames.audit()}")


def main() -> int:
    parser = argparse.ArgumentParser(description="vLLM's CPU offloading on a trace, with its parts and kvpool's")
    parser.add_argument("--trace", default=os.environ.get("KVPOOL_TRACE"), help="also KVPOOL_TRACE")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--chunks", type=int, default=65536)
    arguments = parser.parse_args()
    if not arguments.trace:
        print("SKIPPED: no trace, name one by --trace or KVPOOL_TRACE", file=sys.stderr)
        return 0
    if "KVPOOL_ENGINE_READY" in os.environ:
        run(arguments)
        return 0
    sys.path.insert(0, str(HERE.parent / "tests"))
    from engines.fetch import Unavailable, environment_of, fetch, python_of

    try:
        engine = fetch("vllm")
    except Unavailable as error:
        print(f"SKIPPED: vLLM cannot be fetched: {error}", file=sys.stderr)
        return 0
    environment = {**environment_of(engine), "KVPOOL_ENGINE_READY": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    return subprocess.run([python_of(engine), __file__, *sys.argv[1:]], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
