"""Records and layouts are values: they can be pickled and copied. What belongs to a process cannot."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import kvpool
import pytest
from conftest import layout

LAYOUTS = [
    layout(),
    layout("int8", dynamic_scales=True, arrangement="block_first"),
    layout("bf16", joined=True),
    layout("fp8_e4m3", tensor_parallel=8, replicate_kv_heads=True),
    kvpool.Layout(layers=3, head_dim=576, latent=True, tensor_parallel=4),
    *(kvpool.Layout.named(name) for name in kvpool.Layout.names()),
]


def values(pool: kvpool.Pool) -> list[object]:
    """Records of a pool, with fields of all types."""
    events = pool.prefix_cache.events()
    with pool.sequence(1) as sequence:
        with pool.begin_batch() as batch:
            appended = batch.append_tokens(sequence, range(20))
        fork = sequence.fork(2)
        with pool.begin_batch() as batch:
            step = batch.decode([sequence, fork])
            stats = pool.stats()
        victims, states = pool.victims(), [pool.info(handle) for handle in sequence.handles]
        fork.close()
    cached = events.drain()
    assert cached and victims and stats.oldest_batch is not None
    tier = kvpool.Tier.in_process(1000, value_bytes=10, namespace="tests")
    reports = [pool.audit(), pool.fragmentation(), pool.sequence_runs(), pool.prefix_cache.stats(), tier.stats()]
    return [appended, step, stats, *victims, *states, *cached, *reports, pool.resize(90).wait(), pool.defragment().wait()]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_records_and_layouts_are_copied(pool: kvpool.Pool, copied: Callable[[object], object]) -> None:
    for value in [*values(pool), *LAYOUTS]:
        other = copied(value)
        assert type(other) is type(value) and other is not value
        assert other == value and repr(other) == repr(value)
        with pytest.raises(TypeError, match="unhashable"):
            hash(value)
    assert len({repr(layout) for layout in LAYOUTS}) > 5


def test_records_and_layouts_go_to_other_processes(pool: kvpool.Pool) -> None:
    sent = [*values(pool), *LAYOUTS]
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as other:
        assert other.submit(copy.copy, sent).result(60) == sent


def test_records_differ_by_their_fields(pool: kvpool.Pool) -> None:
    before = pool.stats()
    with pool.try_allocate(1):
        assert pool.stats() != before
    assert before != before.as_dict() and not before == pool.audit()


def test_what_belongs_to_a_process_says_so(pool: kvpool.Pool) -> None:
    with pool.try_allocate(1) as lease, pool.sequence(1) as sequence, pool.begin_batch() as batch:
        frames = kvpool.FramePool(8)
        others = [pool.prefix_cache, pool.view(lease, 0, 0), kvpool.EvictionOrder(3), frames, *lease.handles]
        for value in (pool, lease, sequence, batch, *others):
            for copied in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(TypeError, match=f"a kvpool.{type(value).__name__} cannot be pickled or copied: it belongs"):
                    copied(value)
        del others, value
