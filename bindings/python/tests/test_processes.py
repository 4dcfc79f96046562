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
threading.Thread(target=lambda: pool.allocate(1).wait(), daemon=True).start()
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
    check(
        run_python(
            BEGIN
            + """
lease = pool.try_allocate(100)
async def main():
    global call
    call = pool.allocate(1)
    call.send(None)
asyncio.run(main())
lease.close()          # the waiting call gets its block now, and keeps it until it is dropped
deadline = time.monotonic() + 5
while pool.stats().waiting and time.monotonic() < deadline:
    time.sleep(0.01)
print(pool.free_blocks, end=" ")
del call
print(pool.free_blocks)
"""
        ),
        "99 100",
    )


@pytest.mark.skipif(sys.platform == "win32", reason="there is no fork")
def test_a_fork_leaves_what_its_parent_made_alone(run_python: Run) -> None:
    """Every class: a use raises Forked, and a drop frees nothing."""
    check(
        run_python(
            BEGIN
            + """
import warnings
warnings.simplefilter("ignore")
def vm_size():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmSize")).split()[1])
frames = kvpool.FramePool(1_000_000)
size = vm_size()
frames.register(frames.allocate(4), [bytes([i]) * 32 for i in range(4)])
frames.free([1, 2, 3, 4])
moves, step = frames.propose_moves(4), frames.begin_batch()
node = None
async def start():
    global node
    node = await kvpool.Node.start(pool, "a")
asyncio.run(start())
sequence = pool.sequence(1, range(9))
lease = pool.try_allocate(2)
tensor, plane = pool.view(lease, 0, 0), pool.plane(0)
table, cache, events = kvpool.BlockTable(), pool.prefix_cache, pool.prefix_cache.events()
batch = pool.begin_batch()
batch.append(sequence, 9)
task = pool.start_defragmenter()
async def begin(call):
    call.send(None)
    return call
full = kvpool.Pool(layout, 1)
held, waiting = full.try_allocate(1), asyncio.run(begin(full.allocate(1)))
calls = [pool.allocate(1), waiting, pool.preempt(sequence, swap=kvpool.Pool(layout, 10)), anext(node), anext(events), task.stop(), node.peers()]
closed = kvpool.Pool(layout, 1_000)
last = closed.allocate(1)  # the last reference on its pool
closed.close()
child = os.fork()
if child == 0:
    uses = [lambda call=call: call.send(None) for call in calls + [last]]
    uses += [lambda call=call: call.close() for call in calls]
    uses += [lambda: frames.allocate(1), lambda: frames.frames, lambda: repr(frames), moves.pairs, moves.commit, moves.cancel,
             lambda: len(moves), step.end, lambda: step.__exit__(None, None, None), lambda: anext(node), lambda: node.name,
             node.close, lambda: memoryview(tensor), lambda: memoryview(plane), plane.__dlpack__, lambda: memoryview(table),
             lambda: pool.view(lease, 0, 0), cache.stats, events.drain, lambda: next(events), lambda: anext(events),
             batch.finish, lambda: batch.__exit__(None, None, None), lambda: sequence.commit(1), lease.seal, calls[0].wait]
    for number, use in enumerate(uses):
        try:
            use()
        except kvpool.Forked:
            continue
        except BaseException as error:
            print(number, repr(error), flush=True)
        os._exit(2)
    del uses, use, frames, moves, step, node, tensor, plane, table, cache, events, batch, sequence, lease, task, calls, closed, last
    del pool
    gc.collect()
    os._exit(0 if vm_size() >= size else 3)
_, status = os.waitpid(child, 0)
for call in calls:
    call.close()
del tensor, calls, call
gc.collect()
print(os.waitstatus_to_exitcode(status), len(moves), moves.cancel(), step.end(), batch.finish(), lease.close(), sequence.close())
frames.audit()
task.stop().wait()
node.close()
"""
        ),
        "0 0 None None None None None",
    )


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
    own.defragment().wait()
    os._exit(0)
_, status = os.waitpid(child, 0)
batch.finish()
lease.close()
sequence.close()
task.stop().wait()
pool.audit()
print(os.waitstatus_to_exitcode(status), pool.free_blocks)
"""
        ),
        "0 100",
    )
