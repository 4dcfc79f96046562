"""What the tests share."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator

import kvpool
import pytest

TOKENS = 4  # tokens per block of the layout below


def singles(pool: kvpool.Pool, blocks: int) -> list[kvpool.Lease]:
    """Leases of one block each, allocated together."""
    rest = pool.try_allocate(blocks)
    leases = [rest.split_off(at) for at in range(blocks - 1, 0, -1)]
    return [rest, *reversed(leases)]


def layout(dtype: str = "f32", **more: object) -> kvpool.Layout:
    return kvpool.Layout(layers=2, kv_heads=2, head_dim=8, block_tokens=TOKENS, dtype=dtype, **more)


@pytest.fixture
def pool() -> Iterator[kvpool.Pool]:
    """A pool of 100 blocks with a prefix cache, which is audited at the end."""
    pool = kvpool.Pool(layout(), 100, blocks_max=200, prefix_cache=True)
    yield pool
    if not pool.closed:
        pool.audit()


@pytest.fixture
def run_python() -> Callable[[str], subprocess.CompletedProcess[str]]:
    """Runs a script in another interpreter, for half a minute at most."""

    def run(script: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-X", "faulthandler", "-c", script], capture_output=True, text=True, timeout=30)

    return run
