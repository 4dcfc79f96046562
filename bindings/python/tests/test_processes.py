"""Ends of interpreters and forks, in processes of their own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from subprocess import CompletedProcess

import pytest

Run = Callable[[str], CompletedProcess[str]]

BEGIN = """
import asyncio, gc, os, sys, threading, time
import kvpool
layout = kvpool.Layout(layers=2, kv_heads=2, head_dim=8, block_tokens=4, dtype="f32")
pool = kvpool.Pool(layout, 100, prefix_cache=True)
"""


def check(result: CompletedProcess[str], printed: str = "") -> None:
    assert (result.returncode, result.stdout.strip(), result.stderr) == (0, printed, "")


def test_the_interpreter_ends_with_everything_alive(run_python: Run) -> None:
    check(
        run_python(
            BEGIN
            + """
lease, sequence, batch = pool.try_allocate(5), pool.sequence(1, range(9)), pool.begin_batch()
batch.append(sequence, 9)
view = memoryview(pool.view(lease, 0, 0))
task = pool.start_defragmenter(interval=0.001)
events = pool.prefix_cache.events()
"""
        )
    )


def test_the_interpreter_ends_while_calls_wait(run_python: Run) -> None:
    check(
        run_python(
            BEGIN
            + """
lease = pool.try_allocate(100)
threading.Thread(target=lambda: pool.allocate_blocking(1), daemon=True).start()
async def main():
    waiting = asyncio.create_task(pool.allocate(1))
    await asyncio.sleep(0.02)
    threading.Timer(0.0, lease.close)
async def forgotten():
    loop = asyncio.get_running_loop()
    call = pool.allocate(1)
    call.send(None)  # waits, and is never resumed
    kept.append(call)
kept = []
asyncio.run(main())
asyncio.run(forgotten())
print("ends")
"""
        ),
        "ends",
    )


def test_results_arrive_after_the_loop_is_closed(run_python: Run) -> None:
    result = run_python(
        BEGIN
        + """
lease = pool.try_allocate(100)
async def main():
    global call
    call = pool.allocate(1)
    call.send(None)
asyncio.run(main())
lease.close()          # the waiting call gets its block now, and nobody can be told
deadline = time.monotonic() + 5
while pool.stats().waiting and time.monotonic() < deadline:
    time.sleep(0.01)
del call
# The event loop's refusal, with the result in its frames, is printed and kept as the last exception.
while not hasattr(sys, "last_value") and time.monotonic() < deadline:
    time.sleep(0.01)
for name in ("last_value", "last_traceback", "last_exc"):
    if hasattr(sys, name):
        delattr(sys, name)
gc.collect()
while pool.free_blocks < 100 and time.monotonic() < deadline:
    time.sleep(0.01)
print(pool.free_blocks)
"""
    )
    assert (result.returncode, result.stdout.strip()) == (0, "100"), result
    assert "Event loop is closed" in result.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_fork_cannot_use_what_its_parent_made(run_python: Run) -> None:
    check(
        run_python(
            BEGIN
            + """
import warnings
warnings.simplefilter("ignore")
task = pool.start_defragmenter()
lease, sequence, batch = pool.try_allocate(5), pool.sequence(1), pool.begin_batch()
events, table, node = pool.prefix_cache.events(), kvpool.BlockTable(), None
asyncio.run(asyncio.wait_for(pool.allocate(1), 5)).close()
parent = os.getpid()
child = os.fork()
if child == 0:
    for use in (pool.stats, lambda: pool.try_allocate(1), lambda: lease.blocks, lambda: len(sequence),
                lambda: batch.finish(), lambda: next(events), lambda: table.rows, pool.close, task.totals):
        try:
            use()
            os._exit(2)
        except kvpool.Forked as error:
            if (error.made_in, error.used_in) != (parent, os.getpid()) or str(parent) not in str(error):
                os._exit(3)
    del pool, lease, sequence, batch, events, table, task
    gc.collect()
    # A pool of its own works, also where calls wait.
    own = kvpool.Pool(layout, 10)
    lease = own.try_allocate(10)
    async def main():
        waiting = asyncio.create_task(own.allocate(5))
        await asyncio.sleep(0.01)
        lease.close()
        return await waiting
    if len(asyncio.run(asyncio.wait_for(main(), 5))) != 5:
        os._exit(4)
    own.defragment_blocking()
    os._exit(0)
_, status = os.waitpid(child, 0)
batch.finish()
lease.close()
sequence.close()
task.stop_blocking()
pool.audit()
print(os.waitstatus_to_exitcode(status), pool.free_blocks)
"""
        ),
        "0 100",
    )
