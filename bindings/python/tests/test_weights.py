"""Versions of weights: no request finds blocks of others."""

from __future__ import annotations

import pickle

import kvpool
import pytest
from conftest import layout

PROMPT = list(range(41))


def compute(pool: kvpool.Pool, number: int, *, adapter: bytes | None = None) -> tuple[kvpool.Sequence, int]:
    """Opens the prompt and computes the rest; returns the sequence and the cached tokens."""
    sequence = pool.sequence(number, PROMPT, adapter=adapter)
    cached = len(sequence)
    with pool.begin_batch() as batch:
        batch.append(sequence, len(PROMPT) - cached)
    return sequence, cached


def test_a_version_finds_its_own_blocks_only() -> None:
    pool = kvpool.Pool(layout(), 60, prefix_cache=True)
    cache = pool.prefix_cache
    assert cache is not None
    _, first = compute(pool, 1)
    running, whole = compute(pool, 2)
    assert (first, cache.weights()) == (0, (0, 0))
    assert (cache.begin_version(2**64 - 1), cache.weights()) == (0, (2**64 - 1, 0))
    assert compute(pool, 3)[1] == 0
    with pool.begin_batch() as batch:
        batch.append(running, 1)
    ranges = [kvpool.VersionRange, kvpool.VersionRange]
    assert [type(part) for part in running.versions] == ranges
    assert [(part.start, part.model, part.adapter) for part in running.versions] == [(0, 0, 0), (41, 2**64 - 1, 0)]
    assert pickle.loads(pickle.dumps(running.versions)) == running.versions
    cache.begin_version(0)
    assert compute(pool, 4)[1] == whole > 0


def test_an_adapter_has_versions_of_its_own() -> None:
    pool = kvpool.Pool(layout(), 60, prefix_cache=True)
    cache = pool.prefix_cache
    assert cache is not None
    found = []
    for version in [0, 0, 1, 0]:
        cache.begin_version(version, adapter=b"one")
        assert cache.weights(b"one") == (0, version)
        found.append(compute(pool, 1, adapter=b"one")[1] > 0)
    assert found == [False, True, False, True]
    with pytest.raises(kvpool.CacheError, match="adapter"):
        cache.begin_version(1, adapter=b"")


def test_groups_keep_the_versions_of_their_tokens() -> None:
    groups = kvpool.LayerGroups([kvpool.LayerCache(bytes=64), kvpool.LayerCache(bytes=64, window=20)])
    pool = kvpool.Pool.layered(groups, blocks=60, prefix_cache=True)
    cache = pool.prefix_cache
    assert cache is not None
    sequence = pool.try_admit_grouped(1, PROMPT)
    for version, count in [(0, 20), (3, 21)]:
        cache.begin_version(version)
        with pool.begin_batch() as batch:
            batch.append_grouped([sequence], [count])
    assert [(part.start, part.model) for part in sequence.versions] == [(0, 0), (20, 3)]
    sequence.close()
    assert len(pool.try_admit_grouped(2, PROMPT)) == 0
