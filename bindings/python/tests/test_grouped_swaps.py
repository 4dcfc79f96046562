"""Sequences of several groups that leave the pool, and drafts beside their states."""

from __future__ import annotations

import asyncio
import random

import kvpool
import pytest
from hybrid import Engine, Request
from test_grouped import states, windows


@pytest.mark.parametrize("groups", [windows(), states()], ids=["windows", "states"])
def test_a_sequence_of_groups_is_swapped_and_moved(groups: kvpool.LayerGroups) -> None:
    rng, near, far = random.Random(3), Engine(groups, 80, storage=True), Engine(groups, 80, storage=True)
    prompt = [rng.randrange(99) for _ in range(70)]
    request = Request(near.pool.try_admit_grouped(1, prompt), prompt)
    with near.pool.begin_batch() as batch:
        near.step(batch, [request], [40])
        with pytest.raises(kvpool.Timeout, match="in flight"):
            near.pool.preempt(request.sequence, swap=far.pool, timeout=0.01).wait()
    near.prefill(request, 64)
    held = request.sequence.held_blocks
    report, away = near.pool.preempt(request.sequence, swap=far.pool).wait()
    assert away is not None and request.sequence.closed
    assert (report.tokens_kept, report.tokens_lost, len(away), away.held_blocks) == (70, 0, 70, held)
    far.check([there := Request(away, prompt)])
    back, moved = near.pool.resume(away, headroom=20).wait()
    assert (moved.tokens, back.id, away.closed, far.pool.sequence_count) == (70, 1, True, 0)
    request = Request(back, prompt)
    near.check([request])
    with near.pool.begin_batch() as batch:
        near.step(batch, [request], [[rng.randrange(99) for _ in range(5)]])
    near.check([request])
    over, _ = near.pool.migrate(back, far.pool).wait()
    assert over is not None
    there = Request(over, request.tokens)
    with far.pool.begin_batch() as batch:
        far.step(batch, [there], [[rng.randrange(99) for _ in range(40)]])
    far.check([there])
    with pytest.raises(kvpool.MigrateError, match="a node"):
        far.pool.migrate(over, "a node").wait()
    assert not over.closed
    report, nothing = far.pool.preempt(over).wait()
    assert nothing is None and report.tokens_kept + report.tokens_lost == 115
    for engine in (near, far):
        engine.pool.audit()
        assert (engine.pool.stats().used, engine.pool.sequence_count) == (0, 0)


@pytest.mark.parametrize("groups", [windows(), states()], ids=["windows", "states"])
def test_a_sequence_of_groups_goes_to_a_node(groups: kvpool.LayerGroups) -> None:
    async def main() -> None:
        rng, near, far = random.Random(5), Engine(groups, 80, storage=True), Engine(groups, 80, storage=True)
        there = await kvpool.Node.start(far.pool, "b", listen=["127.0.0.1:0"])
        here = await kvpool.Node.start(near.pool, "a", peers={"b": there.addresses[0]})
        while (await here.peers()) != {"b": True}:
            await asyncio.sleep(0.01)
        prompt = [rng.randrange(99) for _ in range(70)]
        request = Request(near.pool.try_admit_grouped(1, prompt), prompt)
        near.prefill(request, 64)
        with pytest.raises(kvpool.MigrateError, match="no peer|never reached"):
            await near.pool.migrate(request.sequence, "c", timeout=10)
        near.check([request])
        moved, report = await near.pool.migrate(request.sequence, "b", timeout=10)
        assert (moved, report.tokens, request.sequence.closed) == (None, 70, True)
        arrived, peer = await asyncio.wait_for(anext(there), 10)
        assert (type(arrived), len(arrived), peer) == (kvpool.GroupedSequence, 70, "a")
        far.check([came := Request(arrived, prompt)])
        with far.pool.begin_batch() as batch:
            far.step(batch, [came], [[rng.randrange(99) for _ in range(40)]])
        far.check([came])
        arrived.close()
        assert await here.shutdown() and await there.shutdown()
        for engine in (near, far):
            engine.pool.audit()
            assert (engine.pool.stats().used, engine.pool.sequence_count) == (0, 0)

    asyncio.run(main())


def test_swaps_need_storage_and_equal_groups() -> None:
    plain, other = Engine(states(), 60), Engine(windows(), 60, storage=True)
    stored = Engine(states(), 60, storage=True)
    lacks = "without storage"
    for source, target, why in ((plain, stored, lacks), (stored, plain, lacks), (stored, other, "as in the target")):
        request = Request(source.pool.try_admit_grouped(1, [1, 2, 3]), [1, 2, 3])
        source.prefill(request, 64)
        with pytest.raises(kvpool.KvPoolError, match=why):
            source.pool.preempt(request.sequence, swap=target.pool).wait()
        assert len(request.sequence) == 3
        source.check([request])
        request.sequence.close()
    with pytest.raises(kvpool.BuildError, match="copier"):
        kvpool.Pool.layered(states(), blocks=9, copier=print, storage=True)
    with pytest.raises(TypeError, match="GroupedSequence"):
        stored.pool.preempt(7)  # type: ignore[type-var]


@pytest.mark.parametrize("storage", [False, True])
def test_states_are_stepped_over_accepted_drafts(storage: bool) -> None:
    rng, engine = random.Random(11), Engine(states(), 80, storage=storage)
    prompt = [rng.randrange(99) for _ in range(30)]
    request = Request(engine.pool.try_admit_grouped(1, prompt), prompt)
    engine.prefill(request, 64)
    for right in (4, 0, 2, 1, 4, 0):
        length, drafts = len(request.sequence), [rng.randrange(99) for _ in range(4)]
        with engine.pool.begin_batch() as batch:
            (new,) = engine.step(batch, [request], [[rng.randrange(99)]])
            drafted = engine.draft(batch, request, drafts)
        assert new.stepped[1] == length + 1 and drafted.stepped == (length + 1, length + 1)
        engine.check([request])
        request.accept(drafts[:right])
        assert (len(request.sequence), request.sequence.state_tokens) == (length + 1 + right, length + 1)
        engine.check([request])
    request.sequence.close()
    engine.pool.audit()
