"""Calls that wait, on asyncio and blocking."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import kvpool
import pytest
from conftest import layout, singles


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, 20))


def test_a_call_that_need_not_wait_does_not_suspend(pool: kvpool.Pool) -> None:
    call = pool.allocate(3)
    with pytest.raises(StopIteration) as ready:
        call.send(None)  # no event loop runs here
    assert len(ready.value.value) == 3
    with pytest.raises(RuntimeError, match="already awaited"):
        call.send(None)
    with pytest.raises(kvpool.OutOfBlocks, match="101 blocks"):
        pool.allocate(101).send(None)
    unused = pool.allocate(1)
    with pytest.warns(RuntimeWarning, match="call was never awaited"):
        del unused  # nothing happens before it is awaited
    closed = pool.allocate(1)
    closed.close()
    del closed
    assert pool.stats().used == 3


def test_waiting_in_order_of_priority(pool: kvpool.Pool) -> None:
    async def main() -> None:
        everything = await pool.allocate(100)
        order: list[str] = []

        async def take(priority: str) -> None:
            async with asyncio.timeout(10):
                lease = await pool.allocate(100, priority=priority)
            order.append(priority)
            await asyncio.sleep(0)
            lease.close()

        tasks = [asyncio.create_task(take(priority)) for priority in ("normal", "high", "urgent")]
        while pool.stats().waiting < 3:
            await asyncio.sleep(0.001)
        assert pool.stats().waiting_by_priority == [1, 1, 1]
        everything.close()
        await asyncio.gather(*tasks)
        assert order == ["urgent", "high", "normal"]

    run(main())


def test_refusals_say_what_is_in_the_way(pool: kvpool.Pool) -> None:
    async def main() -> None:
        with pool.try_allocate(90), pool.sequence(1) as sequence:
            with pytest.raises(kvpool.OutOfBlocks) as exhausted:
                pool.try_allocate(20)
            fields = exhausted.value
            assert (fields.kind, fields.asked, fields.free) == ("Exhausted", 20, 10)
            assert (fields.retired, fields.evictable, fields.held, fields.in_transfer) == (0, 0, 0, 0)
            assert fields.oldest_batch is None
            waiting = asyncio.create_task(pool.allocate(20, priority="high"))
            await asyncio.sleep(0.01)
            with pytest.raises(kvpool.OutOfBlocks) as behind, pool.begin_batch() as batch:
                batch.append(sequence, 1)
            fields = behind.value
            assert (fields.kind, fields.asked, fields.priority, fields.waiting) == ("Behind", 1, "normal", "high")
            assert fields.lacking == 10
            with pytest.raises(kvpool.Timeout) as late:
                await pool.allocate(5, timeout=0.02)
            assert (late.value.head_asked, late.value.turn, pool.stats().turn) == (20, None, None)
        (await waiting).close()

    asyncio.run(main())


def test_cancelling_hands_the_turn_on(pool: kvpool.Pool) -> None:
    async def main() -> None:
        lease = await pool.allocate(95)
        first = asyncio.create_task(pool.allocate(50))  # a coroutine, for create_task
        while pool.stats().waiting < 1:
            await asyncio.sleep(0.001)
        second = asyncio.create_task(pool.admit(1, range(20)))
        while pool.stats().waiting < 2:
            await asyncio.sleep(0.001)
        # Five blocks are free, which the second would take, but it stands behind the first.
        await asyncio.sleep(0.02)
        assert not second.done()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        sequence = await second
        assert sequence.reserved_blocks == 5
        sequence.close()
        lease.close()
        assert pool.stats().waiting == 0 and pool.free_blocks == 100

    run(main())


def test_what_a_cancelled_call_got_is_free_when_its_task_sees_the_cancellation(pool: kvpool.Pool) -> None:
    async def main() -> None:
        late = []

        async def take(freeing: threading.Thread) -> None:
            try:
                await pool.allocate(100)
            except asyncio.CancelledError:
                freeing.join()
                if (pool.free_blocks, pool.stats().waiting) != (100, 0):
                    late.append(pool.stats())
                raise

        for round in range(3_000):
            lease = pool.try_allocate(100)
            freeing = threading.Thread(target=lease.close)  # the call gets the blocks in another thread
            waiting = asyncio.create_task(take(freeing))
            await asyncio.sleep(0)
            assert pool.stats().waiting == 1
            freeing.start()
            time.sleep(round % 30 * 1e-5)  # so the cancellation comes before, while or after it gets them
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert not late, f"round {round}"

    asyncio.run(main())


def test_a_call_that_is_closed_or_dropped_while_it_waits_is_withdrawn(pool: kvpool.Pool) -> None:
    async def main() -> None:
        for end in ("close", "drop", "throw"):
            call = pool.allocate(100)
            call.send(None)
            assert pool.stats().waiting == 1
            if end == "close":
                call.close()
            elif end == "throw":
                with pytest.raises(GeneratorExit):
                    call.throw(GeneratorExit)
            else:
                del call
            assert pool.stats().waiting == 0

    with pool.try_allocate(1):
        run(main())


def test_a_call_that_is_awaited_is_refused_to_others(pool: kvpool.Pool) -> None:
    async def main() -> None:
        lease, call = pool.try_allocate(100), pool.allocate(100)

        async def take() -> kvpool.Lease:
            return await call

        async def elsewhere() -> None:
            await asyncio.to_thread(asyncio.run, take())

        first = asyncio.create_task(take())
        await asyncio.sleep(0.001)
        others: list[Callable[[], Coroutine[Any, Any, Any]]] = [take, elsewhere, lambda: asyncio.wait_for(call, 10)]
        for other in others:
            with pytest.raises(RuntimeError, match="call is being awaited already"):
                await other()
        with pytest.raises(RuntimeError, match="call is being awaited already"):
            await asyncio.create_task(call)
        second = asyncio.create_task(take())
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        assert pool.stats().waiting == 1
        lease.close()
        (await asyncio.wait_for(first, 10)).close()
        with pytest.raises(RuntimeError, match="already awaited"):
            await call

    run(main())


def test_a_task_is_resumed_when_its_call_is_ended_elsewhere(pool: kvpool.Pool) -> None:
    async def main() -> None:
        ends: list[Callable[[Any], object]] = [lambda call: call.close(), lambda call: call.throw(GeneratorExit)]
        for end in ends:
            for in_thread in (False, True):
                call = pool.allocate(100)

                async def take() -> kvpool.Lease:
                    return await call  # noqa: B023

                waiting = asyncio.create_task(take())
                await asyncio.sleep(0.001)
                try:
                    await asyncio.to_thread(end, call) if in_thread else end(call)
                except GeneratorExit:
                    pass
                assert pool.stats().waiting == 0
                with pytest.raises(RuntimeError, match="already awaited"):
                    await asyncio.wait_for(waiting, 10)

    with pool.try_allocate(1):
        run(main())


def test_deadlines(pool: kvpool.Pool) -> None:
    lease = pool.try_allocate(100)

    async def main() -> None:
        with pytest.raises(TimeoutError, match="the deadline of a request for 10 blocks passed; 0 free") as late:
            await pool.allocate(10, timeout=0.02)
        assert isinstance(late.value, kvpool.Timeout) and (late.value.asked, late.value.free) == (10, 0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.admit(1, [1]), 0.02)
        assert pool.sequence_count == 0
        with pytest.raises(kvpool.Timeout):
            await pool.admit(1, [1, 2], timeout=0)

    run(main())
    with pytest.raises(kvpool.Timeout):
        pool.allocate(1, timeout=0.01).wait()
    with pytest.raises(kvpool.Timeout):
        pool.admit(1, [1], timeout=0.01).wait()
    lease.close()
    assert len(pool.allocate(1).wait()) == 1


def test_blocking_calls_release_the_gil(pool: kvpool.Pool) -> None:
    lease = pool.try_allocate(100)
    freeing = threading.Timer(0.05, lease.close)
    freeing.start()
    assert len(pool.allocate(50, timeout=10).wait()) == 50
    freeing.join()


def test_a_signal_ends_a_blocking_call(pool: kvpool.Pool) -> None:
    lease = pool.try_allocate(100)

    def interrupt(*_: object) -> None:
        raise InterruptedError("enough")

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(InterruptedError, match="enough"):
            pool.allocate(1).wait()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert pool.stats().waiting == 0
    lease.close()


def test_reserving_for_a_running_sequence(pool: kvpool.Pool) -> None:
    async def main() -> None:
        sequence = pool.sequence(1)
        lease = await pool.allocate(98)
        waiting = asyncio.create_task(pool.reserve(sequence, 40))
        while pool.stats().waiting < 1:
            await asyncio.sleep(0.001)
        with pytest.raises(kvpool.Busy, match="another call is using this sequence"):
            len(sequence)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert len(sequence) == 0  # it is back
        lease.close()
        await pool.reserve(sequence, 40)
        assert sequence.reserved_blocks == 10
        sequence.close()

    run(main())


def test_compaction_and_resizes(pool: kvpool.Pool) -> None:
    async def main() -> None:
        leases = singles(pool, 100)
        for lease in leases[::2]:
            lease.close()
        with pytest.raises(kvpool.ResizeError, match="not sealed") as blocked:
            await pool.resize(60, patience=0.01)
        assert blocked.value.kind == "Blocked" and blocked.value.blocks[0][1] == "not sealed"
        with pytest.raises(kvpool.ResizeError, match="do not fit"):
            await pool.resize(40)
        for lease in leases[1::2]:
            lease.seal()
        report, run_of = await asyncio.gather(pool.defragment(), pool.allocate(32, contiguous=True))
        assert len(run_of.runs) == 1 and report.seconds >= 0
        run_of.close()
        assert (await pool.resize(60)).after == 60
        assert (await pool.resize(150)).after == 150
        for lease in leases[1::2]:
            lease.close()
        task = pool.start_defragmenter(interval=0.005)
        await asyncio.sleep(0.02)
        assert (await task.stop()).failed == 0

    run(main())


def test_sequences_move_between_pools(pool: kvpool.Pool) -> None:
    async def main() -> None:
        other = kvpool.Pool(layout(), 50)
        sequence = pool.sequence(1)
        batch = pool.begin_batch()
        batch.append(sequence, 10)
        with pytest.raises(kvpool.Timeout, match="written by batch"):
            await pool.migrate(sequence, other, timeout=0.02)
        ticket = batch.ticket
        settled = asyncio.create_task(pool.settled(ticket))
        moving = asyncio.create_task(pool.migrate(sequence, other))
        await asyncio.sleep(0.01)
        assert not settled.done() and not moving.done()
        batch.finish()
        await settled
        there, report = await moving
        assert (len(there), report.copied_blocks, sequence.closed, pool.free_blocks) == (10, 3, True, 100)
        with pytest.raises(kvpool.ForeignHandle):
            await pool.migrate(there, other)
        assert len(there) == 10
        small = kvpool.Pool(layout(), 1)
        with pytest.raises(kvpool.OutOfBlocks):
            await other.migrate(there, small)
        with pytest.raises(kvpool.MigrateError, match="nowhere"):
            await other.migrate(there, "nowhere")
        report, swapped = await other.preempt(there, swap=pool)
        assert (report.freed_blocks, report.tokens_lost, len(swapped), other.free_blocks) == (3, 0, 10, 50)
        with pytest.raises(kvpool.OutOfBlocks):
            await other.resume(swapped, headroom=4, leave=47)
        back, moved = await other.resume(swapped, headroom=4, leave=46)
        assert (len(back), moved.copied_blocks, swapped.closed, other.free_blocks) == (10, 3, True, 46)
        report, gone = await other.preempt(back)
        assert (report.tokens_lost, gone, other.sequence_count, pool.sequence_count) == (10, None, 0, 0)

    run(main())


def test_a_cancelled_move_leaves_the_sequence(pool: kvpool.Pool) -> None:
    async def main() -> None:
        other = kvpool.Pool(layout(), 50)
        sequence, batch = pool.sequence(1), pool.begin_batch()
        batch.append(sequence, 10)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.migrate(sequence, other), 0.02)
        # It may be cancelled only after this has let it go on.
        batch.finish()
        while True:
            try:
                assert len(sequence) == 10
                break
            except kvpool.Busy:
                await asyncio.sleep(0.001)
        while other.sequence_count > 0:
            await asyncio.sleep(0.001)
        sequence.close()
        assert other.free_blocks == 50

    run(main())


def test_a_cancelled_preemption_leaves_the_sequence(pool: kvpool.Pool) -> None:
    async def main() -> None:
        other = kvpool.Pool(layout(), 50)
        sequence, batch = pool.sequence(1), pool.begin_batch()
        batch.append(sequence, 10)

        async def is_as_before() -> None:
            while True:  # a thread of the package puts it back
                try:
                    assert (len(sequence), sequence.closed) == (10, False)
                    break
                except kvpool.Busy:
                    await asyncio.sleep(0.001)
            while other.sequence_count > 0 or other.free_blocks < 50:
                await asyncio.sleep(0.001)
            assert pool.sequence_count == 1

        with pytest.raises(kvpool.Timeout, match="written by batch"):
            await pool.preempt(sequence, swap=other, timeout=0.02)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.preempt(sequence, swap=other), 0.02)
        batch.finish()
        await is_as_before()
        for round in range(20):
            swapping = asyncio.ensure_future(pool.preempt(sequence, swap=other))
            await asyncio.sleep(0)
            if round % 2:
                # This thread cancels when the copy is there, and the result is not delivered yet.
                while other.sequence_count == 0:
                    time.sleep(0.001)
                time.sleep(0.002)
            swapping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await swapping
            del swapping
            await is_as_before()
        closing = pool.preempt(sequence)
        closing.close()
        await is_as_before()
        report, there = await pool.preempt(sequence, swap=other)
        assert (report.freed_blocks, report.tokens_kept, report.tokens_lost, sequence.closed) == (3, 10, 0, True)
        assert there is not None and len(there) == 10
        with pytest.raises(kvpool.ForeignHandle):
            await pool.preempt(there)
        assert len(there) == 10
        report, gone = await other.preempt(there)
        assert (report.tokens_kept, report.tokens_lost, gone, there.closed) == (0, 10, None, True)
        pool.audit()
        other.audit()

    run(main())


def test_what_comes_back_wakes_another_waiter(pool: kvpool.Pool) -> None:
    events = pool.prefix_cache.events()

    async def main() -> None:
        for round in range(20):
            first, second = (asyncio.ensure_future(anext(events)) for _ in range(2))
            await asyncio.sleep(0.001)
            with pool.sequence(round, [round] * 4) as sequence, pool.begin_batch() as batch:
                batch.append(sequence, 4)
            # A thread of the package receives the event for the first, and this one does not deliver it.
            time.sleep(0.005)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            del first
            event = await asyncio.wait_for(second, 10)
            assert (event.kind, event.tokens) == ("stored", [round] * 4)
        # A thread that blocks is woken too.
        for round in range(20, 25):
            first = asyncio.ensure_future(anext(events))
            await asyncio.sleep(0.001)
            second = asyncio.create_task(asyncio.to_thread(next, events))
            await asyncio.sleep(0.005)
            with pool.sequence(round, [round] * 4) as sequence, pool.begin_batch() as batch:
                batch.append(sequence, 4)
            time.sleep(0.005)
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            del first
            assert (await asyncio.wait_for(second, 10)).tokens == [round] * 4

    run(main())


def test_events_as_iterators(pool: kvpool.Pool) -> None:
    events = pool.prefix_cache.events()

    def compute(id: int, prompt: list[int]) -> None:
        with pool.sequence(id, prompt) as sequence, pool.begin_batch() as batch:
            batch.append(sequence, len(prompt))

    compute(1, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    first, second = events.drain()
    assert (first.kind, first.number, first.tokens, first.parent) == ("stored", 0, [1, 2, 3, 4], None)
    assert (second.parent, second.block_tokens, events.lag) == (first.hash, 4, 0)

    threading.Timer(0.02, lambda: compute(2, [9, 9, 9, 9])).start()
    assert next(events).tokens == [9, 9, 9, 9]

    async def main() -> None:
        seen = []

        async def follow() -> None:
            async for event in events:
                seen.append(event.kind)

        following = asyncio.create_task(follow())
        await asyncio.sleep(0.01)
        compute(3, [7, 7, 7, 7])
        pool.prefix_cache.clear()
        while len(seen) < 2:
            await asyncio.sleep(0.001)
        pool.audit()
        pool.close()
        await following  # ends with the pool
        assert seen[:2] == ["stored", "cleared"]

    run(main())
    assert list(events) == []


def test_nodes_exchange_sequences(pool: kvpool.Pool) -> None:
    async def main() -> None:
        other = kvpool.Pool(layout(), 50)
        token = b"a secret of thirty-two bytes ....."
        there = await kvpool.Node.start(other, "b", listen=["127.0.0.1:0"], token=token)
        here = await kvpool.Node.start(pool, "a", peers={"b": there.addresses[0]}, token=token)
        with pytest.raises(kvpool.NodeError, match="another node has this pool"):
            await kvpool.Node.start(pool, "c")
        with pytest.raises(kvpool.InvalidArgument, match="neither host:port nor unix:/path"):
            await kvpool.Node.start(kvpool.Pool(layout(), 5), "c", listen=["nonsense"])
        while (await here.peers()) != {"b": True}:
            await asyncio.sleep(0.01)
        sequence = pool.sequence(9)
        with pool.begin_batch() as batch:
            batch.append(sequence, 10)
        moved, report = await pool.migrate(sequence, "b", timeout=10)
        assert (moved, report.tokens, sequence.closed) == (None, 10, True)
        async for arrived, peer in there:
            assert (arrived.id, len(arrived), peer) == (9, 10, "a")
            arrived.close()
            break
        assert (await here.migrations())[0].state == "committed"
        with pytest.raises(kvpool.NodeError, match="b has a link"):
            await here.declare_ended("b")
        with pytest.raises(kvpool.NodeError, match="no peer is known as c"):
            await here.declare_ended("c")
        with pytest.raises(kvpool.InvalidArgument, match="restarts="):
            await kvpool.Node.start(kvpool.Pool(layout(), 5), "c", restarts="sometimes")
        for id in (10, 11):
            # An arrival whose waiter was cancelled goes to the next one.
            first = asyncio.ensure_future(anext(there))
            await asyncio.sleep(0.001)
            with pool.begin_batch() as batch:
                batch.append(sequence := pool.sequence(id), 10)
            pool.migrate(sequence, "b", timeout=10).wait()
            time.sleep(0.005)  # it is received, and not delivered by this thread
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
            del first
            if id == 11:
                there.close()  # what has arrived is there nevertheless
            arrived, peer = await asyncio.wait_for(anext(there), 10)
            assert (arrived.id, peer) == (id, "a")
            arrived.close()
        there.close()
        async with asyncio.timeout(20):
            while await here.peers() == {"b": True}:
                await asyncio.sleep(0.01)
        assert await here.declare_ended("b") == []
        assert await here.shutdown(5)
        async for _ in there:
            raise AssertionError("the node has ended")
        with pytest.raises(kvpool.Closed):
            _ = there.name

    run(main())
