"""vLLM's own block pool against kvpool's on a trace, through vLLM's KVCacheManager, in one run.

    python bindings/python/bench/vllm_trace.py --trace mooncake_conversation.jsonl [--requests 3000]
        [--blocks 32768 262144 1048576 --parts pool --latency manager]

The trace is a file of JSON lines with `timestamp` (ms), `input_length`, `output_length` and
`hash_ids` (one for each 512 tokens of the prompt), such as Mooncake's. vLLM is fetched from the
package index. Both managers get the same requests at the same steps, so that drifts of the machine
hit both. Prefix caching is on, and the pool is full after the first requests.

| column | meaning |
|---|---|
| descriptors | maximal runs of consecutive ids in the block table of a completed request, mean: what a transfer of the request needs |
| after prefill | the same at the end of the prefill |
| hit rate | share of prompt tokens found in the prefix cache |
| CPU | time in calls of KVCacheManager, per request, on the calling thread |
| compaction | the part of it that proposes and commits moves of `kvpool.vllm.compaction`, without the copies |
| moved | blocks moved per request |

A decoding step allocates one block: steps between block boundaries cost the same with both pools.

With `--latency manager`, each call of the manager is timed, and the median, the 99.9th percentile and the
maximum are printed, in us of the calling thread's CPU time; with `--latency pool`, also the calls within:
of the pool and of its queue. `--offload N`
also reads N blocks in the order of eviction in each step, from a cursor on, as vLLM's lazy offloader to
CPU memory does. The garbage collector is off, unless `--gc` is given: then it is on for all pools.
"""

from __future__ import annotations

import argparse
import collections
import functools
import gc
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TRACE_BLOCK = 512
BLOCK = 16
STEP_S = 0.5
"""Time of 16 tokens of each running request."""
PREFILL_TOKENS = 16384
"""Tokens of prompts that are computed in a step."""
CHUNK = 8192
COMPACTION_STEPS = 2
"""Steps of 16 tokens between two proposals of moves."""


def rows_of(path: str, limit: int) -> Iterator[tuple[int, float, int, int, list[int]]]:
    with open(path) as lines:
        for number, line in zip(range(limit), lines):
            row = json.loads(line)
            yield number, row["timestamp"] / 1000, row["input_length"], row["output_length"], row["hash_ids"]


def hasher_of(number: int, prompt: int, hash_ids: list[int]) -> Callable:
    """Hashes of blocks: the trace's for prompts, and of their own for outputs."""
    per = TRACE_BLOCK // BLOCK

    def hasher(request) -> list[bytes]:
        hashes = []
        for block in range(len(request.block_hashes), request.num_tokens // BLOCK):
            if (block + 1) * BLOCK <= prompt:
                hashes.append((hash_ids[block // per] * per + block % per).to_bytes(32, "big"))
            else:
                hashes.append(b"out" + number.to_bytes(13, "big") + block.to_bytes(16, "big"))
        return hashes

    return hasher


def runs(ids: list[int]) -> int:
    return sum(after != before + 1 for before, after in zip(ids, ids[1:])) + bool(ids)


class Replay:
    """A scheduler in small over one manager: arrivals, chunked prefill, decoding, preemption."""

    def __init__(self, name: str, manager) -> None:
        self.name, self.manager = name, manager
        self.waiting: collections.deque = collections.deque()
        self.prefilling: collections.deque = collections.deque()
        self.running: dict = {}
        self.cpu: collections.Counter = collections.Counter()
        self.descriptors: list[int] = []
        self.after_prefill: list[int] = []
        self.blocks: list[int] = []
        self.query = self.hits = self.preempted = self.steps = 0
        self.compactor: Any = None
        self.latencies: dict[str, list[int]] = collections.defaultdict(list)
        self.offload, self.cursor = 0, None

    def call(self, part: str, function: Callable, *arguments, **named):
        begin = time.thread_time()
        outcome = self.timed(function, *arguments, **named)
        self.cpu[part] += time.thread_time() - begin
        return outcome

    def timed(self, function: Callable, *arguments, **named):
        begin = time.thread_time_ns()
        outcome = function(*arguments, **named)
        self.latencies[function.__name__].append(time.thread_time_ns() - begin)
        return outcome

    def time_pool(self) -> None:
        """Times calls of the pool and its queue too."""
        pool = self.manager.block_pool
        queue = ("popleft_n", "append_n", "prepend_n")
        for owner, names in ((pool, ("get_new_blocks", "touch", "free_blocks")), (pool.free_block_queue, queue)):
            for name in names:
                setattr(owner, name, functools.partial(self.timed, getattr(owner, name)))

    def read_order(self) -> None:
        """Visits blocks that are evicted soon, as `SimpleCPUOffloadManager._prepare_lazy_store_specs`."""
        if self.cursor is not None and self.cursor.ref_cnt > 0:
            self.cursor = None
        blocks = self.manager.block_pool.free_block_queue.iter_blocks_after(self.cursor)
        for block in itertools.islice(blocks, self.offload):
            self.cursor = block

    def add(self, number: int, prompt: int, output: int, hash_ids: list[int]) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        hasher = hasher_of(number, prompt, hash_ids)
        params = SamplingParams(max_tokens=1 << 20)
        self.waiting.append((Request(str(number), [0] * prompt, params, None, block_hasher=hasher), output))

    def is_idle(self) -> bool:
        return not (self.waiting or self.prefilling or self.running)

    def step(self) -> None:
        if self.offload:
            self.timed(self.read_order)
        if self.compactor is not None:
            # As `kvpool.vllm.compaction` does; the copies of a step are made when it has ended.
            self.call("compaction", self.compactor.commit)
            self.steps += 1
            if self.steps % COMPACTION_STEPS == 0:
                self.call("compaction", self.compactor.propose)
        for name in list(self.running):
            if name in self.running:
                self.decode(name)
        budget = PREFILL_TOKENS
        while budget > 0 and (tokens := self.prefill(budget)):
            budget -= tokens

    def decode(self, name: str) -> None:
        manager = self.manager
        request, output = self.running[name]
        tokens = min(BLOCK, output - request.num_output_tokens)
        request.append_output_token_ids([0] * tokens)
        while self.call("decode", manager.allocate_slots, request, tokens) is None:
            last = next(reversed(self.running))
            self.preempt(last)
            if last == name:
                return
        request.num_computed_tokens += tokens
        if request.num_output_tokens >= output:
            (ids,) = manager.get_block_ids(name)
            self.descriptors.append(runs(ids))
            self.blocks.append(len(ids))
            self.call("free", manager.free, request)
            del self.running[name]

    def preempt(self, name: str) -> None:
        from vllm.v1.request import RequestStatus

        request, output = self.running.pop(name)
        self.call("free", self.manager.free, request)
        request.num_computed_tokens, request.status = 0, RequestStatus.PREEMPTED
        self.waiting.appendleft((request, output))
        self.preempted += 1

    def prefill(self, budget: int) -> int:
        """Computes a chunk of the first prompt. Returns its tokens, 0 if there is none or no room."""
        from vllm.v1.request import RequestStatus

        manager = self.manager
        if self.prefilling:
            request, _ = self.prefilling[0]
            tokens = min(CHUNK, budget, request.num_tokens - request.num_computed_tokens)
            if self.call("prefill", manager.allocate_slots, request, tokens) is None:
                return 0
        elif self.waiting:
            request, _ = self.waiting[0]
            found, hits, _ = self.call("lookup", manager.get_computed_blocks, request)
            tokens = min(CHUNK, budget, request.num_tokens - hits)
            fits = self.call(
                "prefill", manager.allocate_slots, request, tokens, hits, found, full_sequence_must_fit=True
            )
            if fits is None:
                return 0
            self.prefilling.append(self.waiting.popleft())
            request.num_computed_tokens, request.status = hits, RequestStatus.RUNNING
            self.query += request.num_tokens
            self.hits += hits
        else:
            return 0
        request.num_computed_tokens += tokens
        if request.num_computed_tokens >= request.num_tokens:
            self.running[request.request_id] = self.prefilling.popleft()
            (ids,) = manager.get_block_ids(request.request_id)
            self.after_prefill.append(runs(ids))
        return tokens


def manager_of(part: str, blocks: int):
    import torch
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

    from kvpool import vllm

    vllm.install(part)
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config = KVCacheConfig(
        num_blocks=blocks + 1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    return KVCacheManager(config, max_model_len=1 << 18, scheduler_block_size=BLOCK, hash_block_size=BLOCK)


def drive(replays: list[Replay], path: str, limit: int, collects: bool) -> None:
    rows = collections.deque(rows_of(path, limit))
    now = 0.0
    # As vLLM does: the blocks are many objects.
    gc.collect()
    gc.freeze()
    if not collects:
        gc.disable()
    while rows or not all(replay.is_idle() for replay in replays):
        while rows and rows[0][1] <= now:
            number, _, prompt, output, hash_ids = rows.popleft()
            for replay in replays:
                replay.add(number, prompt, output, hash_ids)
        for replay in replays:
            replay.step()
        now += STEP_S


def mean(numbers: list[int]) -> float:
    return sum(numbers) / max(len(numbers), 1)


def report(replays: list[Replay], skip: int, blocks: int) -> None:
    print(f"{len(replays[0].descriptors)} requests, {blocks} blocks of {BLOCK} tokens; runs from request {skip} on")
    print("| pool | descriptors | after prefill | blocks | hit rate | CPU, us | lookup | prefill | decode | free | compaction | moved | preempted |")
    print("|---|---|---|---|---|---|---|---|---|---|---|---|---|")
    for replay in replays:
        done = len(replay.descriptors)
        micros = {part: seconds / done * 1e6 for part, seconds in replay.cpu.items()}
        parts = " | ".join(f"{micros.get(part, 0):.0f}" for part in ("lookup", "prefill", "decode", "free", "compaction"))
        moved = f"{replay.compactor.moved / done:.1f}" if replay.compactor else "-"
        print(
            f"| {replay.name} | {mean(replay.descriptors[skip:]):.1f} | {mean(replay.after_prefill[skip:]):.1f} |"
            f" {mean(replay.blocks[skip:]):.1f} | {replay.hits / replay.query:.2%} | {sum(micros.values()):.0f} |"
            f" {parts} | {moved} | {replay.preempted} |"
        )
    stock, ours = replays[0], replays[-1]
    ratio = mean(stock.descriptors[skip:]) / mean(ours.descriptors[skip:])
    print(f"{ratio:.1f}x fewer descriptors, {sum(ours.cpu.values()) / sum(stock.cpu.values()):.2f}x the CPU time")


def report_latencies(replays: list[Replay]) -> None:
    print("| call | " + " | ".join(f"{replay.name}: calls | p50 | p99.9 | max" for replay in replays) + " |")
    print("|---|" + "---|---|---|---|" * len(replays))
    for name in dict.fromkeys(name for replay in replays for name in replay.latencies):
        cells = []
        for replay in replays:
            taken = sorted(replay.latencies[name]) or [0]
            points = (taken[len(taken) // 2], taken[int(len(taken) * 0.999)], taken[-1])
            cells += [str(len(replay.latencies[name])), *(f"{nanos / 1e3:.1f}" for nanos in points)]
        print(f"| `{name}` | {' | '.join(cells)} |")


def show_errors(replay: Replay) -> None:
    """A double free and a leak in the manager of the run: both are named."""
    from kvpool import vllm
    from kvpool.errors import FrameRefused

    pool = replay.manager.block_pool
    pool.audit()
    blocks = pool.get_new_blocks(2)
    pool.free_blocks(blocks)
    try:
        pool.free_blocks(blocks[1:])
    except FrameRefused as error:
        print(f"double free: {error}")
    leaked = pool.get_new_blocks(1)
    print(f"owners: {vllm.owners(replay.manager)}")
    pool.free_blocks(leaked)


def run(arguments: argparse.Namespace, blocks: int) -> None:
    replays = [Replay("vLLM", manager_of("off", blocks))]
    for part in arguments.parts:
        replay = Replay(f"kvpool, {part}", manager_of("queue" if part == "queue" else "pool", blocks))
        if part == "compaction":
            from kvpool.vllm.compaction import Compactor

            replay.compactor = Compactor(replay.manager.block_pool)
        replays.append(replay)
    for replay in replays:
        replay.offload = arguments.offload
        if arguments.latency == "pool":
            replay.time_pool()
    drive(replays, arguments.trace, arguments.requests, arguments.gc)
    report(replays, min(arguments.requests // 3, 1000), blocks)
    if arguments.latency:
        report_latencies(replays)
    if arguments.parts[-1] != "queue":
        show_errors(replays[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description="vLLM's block pool against kvpool's on a trace")
    parser.add_argument("--trace", default=os.environ.get("KVPOOL_TRACE"), help="also KVPOOL_TRACE")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--blocks", type=int, nargs="+", default=[65536])
    parser.add_argument("--latency", choices=["manager", "pool"], help="the time of each call")
    parser.add_argument("--offload", type=int, default=0, help="blocks to read in the order of eviction per step")
    parser.add_argument("--gc", action="store_true", help="leave the garbage collector on")
    parser.add_argument("--parts", nargs="+", default=["queue", "pool"], choices=["queue", "pool", "compaction"])
    arguments = parser.parse_args()
    if not arguments.trace:
        print("SKIPPED: no trace, name one by --trace or KVPOOL_TRACE", file=sys.stderr)
        return 0
    if "KVPOOL_ENGINE_READY" in os.environ:
        for blocks in arguments.blocks:
            run(arguments, blocks)
            gc.unfreeze()
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
