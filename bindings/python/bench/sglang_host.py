"""SGLang's free list of host slots against kvpool's pages on a trace: the same requests in one run.

    python bindings/python/bench/sglang_host.py --trace mooncake_conversation.jsonl --python PYTHON

Each request loads the pages of its longest stored prefix, and stores the others, for which the least
recently used pages are freed. The trace is as for `vllm_trace.py`. PYTHON is an interpreter with
torch and the packages that `tests/engines/fetch.py` names for SGLang: its free lists are tensors, so
that a stand-in for torch would not measure them.

| column | meaning |
|---|---|
| runs loaded, stored | maximal runs of consecutive pages of a load or store, mean of the second half: the copies of the `direct` backend for each layer and tensor |
| CPU | time in `alloc` and `free`, on the calling thread |
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

from vllm_trace import TRACE_BLOCK, mean, rows_of, runs

HERE = Path(__file__).resolve().parent
PAGE = 64


class Side:
    """One host pool, and what is measured of it."""

    def __init__(self, name: str, pool) -> None:
        self.name, self.pool = name, pool
        self.cpu = {"alloc": 0.0, "free": 0.0}
        self.calls = {"alloc": 0, "free": 0}
        self.pages: OrderedDict[int, int] = OrderedDict()
        self.is_used = [False] * pool.page_num
        self.loaded: list[int] = []
        self.stored: list[int] = []
        self.stored_pages: list[int] = []
        self.query = self.hits = 0

    def call(self, name: str, argument):
        begin = time.thread_time()
        answer = getattr(self.pool, name)(argument)
        self.cpu[name] += time.thread_time() - begin
        self.calls[name] += 1
        return answer

    def request(self, keys: list[int]) -> None:
        import torch

        pages = self.pages
        hits = 0
        while hits < len(keys) and keys[hits] in pages:
            hits += 1
        if hits:
            self.loaded.append(runs([pages[key] for key in keys[:hits]]))
        self.query += len(keys)
        self.hits += hits
        # The head of a prefix outlives its tail.
        for key in reversed(keys[:hits]):
            pages.move_to_end(key)
        new = list(dict.fromkeys(key for key in keys[hits:] if key not in pages))
        short = len(new) - self.pool.available_size() // PAGE
        if short > 0:
            gone = [pages.popitem(last=False)[1] for _ in range(short)]
            for place in gone:
                self.is_used[place] = False
            slots = torch.tensor(gone, dtype=torch.int64)[:, None] * PAGE + torch.arange(PAGE)
            self.call("free", slots.reshape(-1))
        if new:
            places = (self.call("alloc", len(new) * PAGE)[::PAGE] // PAGE).tolist()
            for place in places:
                assert not self.is_used[place]
                self.is_used[place] = True
            pages.update(reversed(list(zip(new, places))))
            self.stored.append(runs(places))
            self.stored_pages.append(len(new))


def pool_of(part: str, pages: int):
    """The slots of one of SGLang's host pools, without memory for them."""
    import threading

    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    from kvpool import sglang

    sglang.install(part)
    pool = MHATokenToKVPoolHost.__new__(MHATokenToKVPoolHost)
    pool.__dict__.update(size=pages * PAGE, page_num=pages, page_size=PAGE, device="cpu", lock=threading.RLock())
    pool.clear()
    return pool


def run(arguments: argparse.Namespace) -> None:
    import torch

    torch.set_num_threads(1)
    sides = [Side("SGLang", pool_of("off", arguments.pages)), Side("kvpool", pool_of("host", arguments.pages))]
    per = TRACE_BLOCK // PAGE
    requests = 0
    for _, _, prompt, _, hash_ids in rows_of(arguments.trace, arguments.requests):
        keys = [hash_ids[page // per] * per + page % per for page in range(prompt // PAGE)]
        if 0 < len(keys) <= arguments.pages:
            requests += 1
            for side in sides:
                side.request(keys)
    assert sides[0].hits == sides[1].hits
    print(f"torch {torch.__version__}, {requests} requests, {arguments.pages} pages of {PAGE} slots")
    print("| host pool | runs loaded | runs stored | of pages | hit rate | alloc, us | free, us |")
    print("|---|---|---|---|---|---|---|")
    for side in sides:
        late = SimpleNamespace(
            **{
                name: getattr(side, name)[len(getattr(side, name)) // 2 :]
                for name in ("loaded", "stored", "stored_pages")
            }
        )
        micros = [side.cpu[name] / max(side.calls[name], 1) * 1e6 for name in ("alloc", "free")]
        print(
            f"| {side.name} | {mean(late.loaded):.1f} | {mean(late.stored):.1f} | {mean(late.stored_pages):.1f} |"
            f" {side.hits / side.query:.2%} | {micros[0]:.1f} | {micros[1]:.1f} |"
        )
    print(f"audit: {sides[1].pool.frames.audit()}")


def start(arguments: argparse.Namespace, run: Callable[[argparse.Namespace], None], script: str) -> int:
    """Runs a benchmark in SGLang's environment, with real tensors, or says why not."""
    if "KVPOOL_ENGINE_READY" in os.environ:
        run(arguments)
        return 0
    sys.path.insert(0, str(HERE.parent / "tests"))
    from engines.fetch import Unavailable, environment_of, fetch, python_of

    try:
        engine = fetch("sglang")
    except Unavailable as error:
        print(f"SKIPPED: SGLang cannot be fetched: {error}", file=sys.stderr)
        return 0
    python = arguments.python or python_of(engine)
    if subprocess.run([python, "-c", "import torch"], capture_output=True).returncode:
        print(f"SKIPPED: {python} has no torch; name one that has by --python", file=sys.stderr)
        return 0
    environment = {**environment_of(engine), "KVPOOL_ENGINE_READY": "1"}
    return subprocess.run([python, script, *sys.argv[1:]], env=environment).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description="SGLang's host slots against kvpool's pages on a trace")
    parser.add_argument("--trace", default=os.environ.get("KVPOOL_TRACE"), help="also KVPOOL_TRACE")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--pages", type=int, default=65536)
    parser.add_argument("--python", help="an interpreter with torch; default: the engines' own, if it has torch")
    arguments = parser.parse_args()
    if not arguments.trace:
        print("SKIPPED: no trace, name one by --trace or KVPOOL_TRACE", file=sys.stderr)
        return 0
    return start(arguments, run, __file__)


if __name__ == "__main__":
    sys.exit(main())
