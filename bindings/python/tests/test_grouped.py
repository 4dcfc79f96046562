"""Pools of models whose layers differ: an engine reads back what it wrote, and bad input is refused."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import kvpool
import numpy as np
import pytest
from conftest import layout
from hybrid import CONFIGS, Engine, Request, model

HEADS = {"kv_heads": 1, "head_dim": 4}
ALL = kvpool.LayerCache(**HEADS)
WINDOW = kvpool.LayerCache(**HEADS, window=20)
STATE = kvpool.LayerCache(bytes=1_024, state=True)
FOLDER = Path(__file__).resolve().parents[1]


def windows() -> kvpool.LayerGroups:
    return kvpool.LayerGroups([WINDOW, ALL] * 2)


def states() -> kvpool.LayerGroups:
    """A state of two frames, and a list of blocks of 16 tokens."""
    return kvpool.LayerGroups([STATE, ALL] * 2)


@pytest.mark.parametrize(
    ("name", "blocks", "chunk"),
    [
        ("gpt-oss-120b", 250, 128),
        ("gemma-4-31b", 1_800, 256),
        ("qwen3.5-35b-a3b", 4_500, 256),
        ("deepseek-v4-flash", 500, 256),
    ],
)
def test_a_model_reads_back_what_it_wrote(name: str, blocks: int, chunk: int) -> None:
    rng, engine = random.Random(7), Engine(model(name), blocks)
    pool, running, refused, hits = engine.pool, [], 0, 0
    past = [[rng.randrange(1_000) for _ in range(500)] for _ in range(2)]
    for id in range(40):
        # A prompt that goes on where another ended or branched off.
        earlier = rng.choice(past)
        prompt = earlier[: rng.choice([400, 512, len(earlier)])]
        prompt = prompt + [rng.randrange(1_000) for _ in range(rng.randrange(1, 200))]
        try:
            request = Request(pool.try_admit_grouped(id, prompt, chunk=chunk, session=id % 3), prompt)
        except kvpool.OutOfBlocks:
            refused += 1
            if running:
                running.pop(rng.randrange(len(running))).sequence.close()
            continue
        sequence = request.sequence
        hits += len(sequence)
        assert len(sequence) % engine.groups.hit_tokens == 0 and len(sequence) <= sequence.cached_prefix < len(prompt)
        engine.check([request])
        try:
            engine.prefill(request, chunk)
        except kvpool.OutOfBlocks:
            sequence.close()
            continue
        running.append(request)
        for _ in range(rng.randrange(6)):
            with pool.begin_batch() as batch:
                try:
                    engine.step(batch, running, [[rng.randrange(1_000)] for _ in running])
                except kvpool.OutOfBlocks as lacking:
                    assert set(lacking.sequences) <= {one.sequence.id for one in running}
                    refused += 1
                    break
        engine.check(running)
        if len(running) > rng.randrange(2, 12):
            ended = running.pop(0)
            past.append(ended.tokens[:2_000])
            ended.sequence.close()
    cache = pool.prefix_cache
    assert cache is not None and hits > 2_000 and engine.read > 100_000
    assert cache.stats().evicted_blocks > 100 and refused > 0
    for one in running:
        one.sequence.close()
    pool.audit()
    assert (pool.stats().used, pool.sequence_count) == (0, 0)


def test_the_groups_say_where_each_layer_lies() -> None:
    groups = model("deepseek-v4-flash")
    assert (groups.layers, groups.lists, groups.states, groups.hit_tokens) == (43, 7, 0, 128)
    assert groups.list_tokens == [16] * 4 + [128, 4, 4]
    assert [(one.kind, one.tokens, one.ratio, one.shares_blocks_of) for one in groups.groups] == [
        ("window", 128, 1, None), ("compressed", None, 4, None), ("window", 8, 1, None), ("compressed", None, 128, 1),
        ("window", 128, 1, 0),
    ]  # fmt: skip
    # Each of the 43 layers of the first group has one place among its four lists, the next eleven
    # in each.
    first = [groups.places(layer)[0] for layer in range(43)]
    assert [(one.group, one.list, one.index) for one in first] == [(0, layer // 11, layer % 11) for layer in range(43)]
    assert [(one.group, one.list) for one in groups.places(3)] == [(0, 0), (3, 4), (4, 0)]
    picture = kvpool.Pool.layered(groups, blocks=100).map().svg
    assert all(words in picture for words in ("owned, window 128\n", "owned, 1 in 4, 1 in 128\n", "owned, window 8\n"))
    for name in ("qwen3.5-35b-a3b", "gpt-oss-120b"):
        path = CONFIGS / f"{name}.json"
        forms = (path, str(path), path.read_text(), json.loads(path.read_text()))
        alike = [kvpool.LayerGroups.from_config(config) for config in forms]
        assert all(one.groups == alike[0].groups for one in alike)
    qwen = model("qwen3.5-35b-a3b")
    state, kept = qwen.groups
    assert (state.kind, state.state, state.lists, state.block_frames) == ("state", 0, [], 393)
    assert state.layers[:4] == [0, 1, 2, 4]
    assert (kept.kind, kept.lists, kept.block_tokens, kept.waste) == ("all", [0, 1], 16, 0)
    assert [(one.state, one.list, one.index) for one in qwen.places(4)] == [(0, None, 3)]
    assert qwen.frames_held(1_600) == 393 + 2 * 100 and qwen.sequences_in(600 * qwen.frame_bytes, 1_600) == 1
    assert pickle.loads(pickle.dumps(kept)) == kept and "LayerGroup(kind=" in repr(kept)
    assert qwen.bytes_per_token == 20_480 and qwen.fixed_bytes == state.entry_bytes and qwen.dtype == "bf16"


def test_a_pool_by_its_memory() -> None:
    groups = model("gpt-oss-120b")
    with kvpool.Pool.layered(groups, memory=1 << 30) as pool:
        assert pool.total_blocks == (1 << 30) // groups.frame_bytes - 1  # the null block
        assert "window 128" in pool.map().svg
        found = pool.groups
        assert found is not None and found.groups == groups.groups and pool.layout.bytes_per_block == groups.frame_bytes
    assert kvpool.Pool(layout(), 4).groups is None


def test_layers_one_by_one() -> None:
    cache = kvpool.LayerCache
    groups = kvpool.LayerGroups(
        [
            cache(kv_heads=2, head_dim=64, window=100, sinks=4),
            [cache(latent=512, side_bytes=64), cache(bytes=4_096, state=True)],
            None,
            cache(bytes=2_048, chunk=64),
            cache(bytes=4_096, ratio=4),
            cache(follows=0),
        ],
        dtype="f16",
        step_tokens=32,
    )
    kinds = [(one.kind, one.tokens, one.sinks, one.ratio, one.entry_bytes) for one in groups.groups]
    assert kinds == [
        ("window", 100, 4, 1, 512), ("all", None, 0, 1, 1_088), ("state", None, 0, 1, 4_096), ("chunk", 64, 0, 1, 2_048),
        ("compressed", None, 0, 4, 4_096),
    ]  # fmt: skip
    assert groups.places(2) == [] and groups.places(5) == groups.places(0) and len(groups.places(1)) == 2
    engine = Engine(groups, 400)
    request = Request(engine.pool.try_admit_grouped(1, range(300), chunk=32), list(range(300)))
    engine.prefill(request, 32)
    engine.check([request])
    assert ALL == kvpool.LayerCache(kv_heads=1, head_dim=4, v_dim=4) != WINDOW and "tokens: 20" in repr(WINDOW)


def test_layers_that_are_refused() -> None:
    cache, groups = kvpool.LayerCache, kvpool.LayerGroups
    for wrong, why in (
        ({}, "a layer has `kv_heads` and `head_dim`, `latent` elements, or `bytes`"),
        ({"kv_heads": 2}, "`kv_heads` and `head_dim`, or neither"),
        ({"latent": 8, "v_dim": 8}, "no `v_dim`"),
        ({"latent": 8, "bytes": 8}, "one of kv_heads, latent, bytes, not both latent and bytes"),
        ({"bytes": 8, "window": 4, "chunk": 4}, "not both window and chunk"),
        ({"bytes": 8, "state": True, "follows": 0}, "not both state and follows"),
        ({"bytes": 8, "sinks": 4}, "first tokens beside a `window`"),
        (HEADS | {"side_bytes": 8}, "not beside `kv_heads`"),
        ({"bytes": -1}, "a count cannot be -1"),
    ):
        with pytest.raises(kvpool.InvalidArgument, match=why):
            cache(**wrong)
    for layers, why, layer in (
        ([], "no layer caches anything", None),
        ([ALL, cache(bytes=0)], "bytes of an entry of layer 1 is 0", 1),
        ([cache(bytes=1, window=0)], "window of layer 0 is 0", 0),
        ([ALL, cache(follows=9)], "layer 1 follows layer 9", 1),
    ):
        with pytest.raises(kvpool.BuildError, match=why) as refused:
            groups(layers)
        assert layer is None or refused.value.layer == layer
    with pytest.raises(TypeError, match="layer 1 is of .*int.*: it is a LayerCache, a list of them, or None"):
        groups([ALL, 7])
    with pytest.raises(kvpool.InvalidArgument, match="unknown dtype .f13"):
        groups([ALL], dtype="f13")
    with pytest.raises(kvpool.InvalidArgument, match="layer 4 is outside 4 layers"):
        windows().places(4)


def test_configurations_that_are_refused(tmp_path: Path) -> None:
    read = kvpool.LayerGroups.from_config
    with pytest.raises(kvpool.BuildError, match="nowhere.json: No such file") as refused:
        read(tmp_path / "nowhere.json")
    assert (refused.value.kind, refused.value.path) == ("Unreadable", tmp_path / "nowhere.json")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(kvpool.BuildError, match="config.json: ") as refused:
        read(tmp_path)
    config = json.loads((CONFIGS / "gpt-oss-120b.json").read_text())
    del config["num_hidden_layers"]
    with pytest.raises(kvpool.BuildError, match="it has no num_hidden_layers") as refused:
        read(config)
    assert (refused.value.kind, refused.value.field) == ("Missing", "num_hidden_layers")
    config |= {"num_hidden_layers": 2, "layer_types": ["full_attention", "psychic_attention"]}
    with pytest.raises(kvpool.BuildError, match="the kind .*psychic_attention.* of layer 1 is not known") as refused:
        read(config)
    assert refused.value.layer == 1
    with pytest.raises(kvpool.InvalidArgument, match="the configuration is not JSON: "):
        read({"num_hidden_layers": object()})
    with pytest.raises(TypeError, match="a path, a mapping or its JSON text, not of .*int"):
        read(7)


def test_pools_that_are_refused() -> None:
    layered = kvpool.Pool.layered
    for size in ({}, {"memory": 1 << 30, "blocks": 4}):
        with pytest.raises(kvpool.BuildError, match="either `memory`, in bytes, or `blocks`"):
            layered(windows(), **size)
    with pytest.raises(kvpool.BuildError, match="memory: got 100 bytes, expected two frames of 512 bytes or more"):
        layered(windows(), memory=100)
    with pytest.raises(kvpool.BuildError, match="group of layers at index 0: got states alone"):
        layered(kvpool.LayerGroups([STATE]), blocks=4)
    with pytest.raises(kvpool.BuildError, match="`events` needs a prefix cache"):
        layered(windows(), blocks=4, events=8)


def test_calls_for_other_sequences_are_refused() -> None:
    pool, other = kvpool.Pool.layered(windows(), blocks=40), kvpool.Pool.layered(windows(), blocks=40)
    for call in (lambda: pool.sequence(1), lambda: pool.try_admit(1, [1, 2]), lambda: pool.admit(1, [1, 2]).wait()):
        with pytest.raises(kvpool.KvPoolError, match="group"):
            call()
    grouped, foreign = pool.try_admit_grouped(1, range(40)), other.try_admit_grouped(1, range(40))
    batch = pool.begin_batch()
    with pytest.raises(TypeError):
        batch.append(grouped, 1)
    with pytest.raises(kvpool.ForeignHandle, match="belong to different pools"):
        batch.append_grouped([grouped, foreign], [40, 40])
    assert (len(grouped), foreign.reserved_blocks) == (0, 6)
    for call in (lambda: batch.checkpoint(foreign), lambda: batch.block_tables([foreign], [None] * 2)):
        with pytest.raises(kvpool.ForeignHandle):
            call()
    with pytest.raises(kvpool.KvPoolError):
        kvpool.Pool(layout(), 4, storage=False).begin_batch().block_tables([grouped], [None] * 2)
    with pytest.raises(TypeError, match="cannot be pickled or copied"):
        copy.copy(grouped)


def test_appends_that_are_refused() -> None:
    pool = kvpool.Pool.layered(windows(), blocks=20, prefix_cache=True)
    one, two = (pool.try_admit_grouped(id, [id] * 20) for id in (1, 2))
    with pool.begin_batch() as batch:
        for tokens, why in (
            ([1], "1 tokens for 2 sequences"),
            ([1, 0], "entry 1 of the tokens is of no tokens"),
            ([1, []], "entry 1 of the tokens is of no tokens"),
            ([1, -1], "a number of tokens cannot be -1"),
            ([True, 1], "a number of tokens cannot be True"),
            ([1, [5, -3]], "entry 1 is -3"),
            ([1, 2**62], "too many tokens|expected at most"),
        ):
            with pytest.raises(kvpool.InvalidArgument, match=why):
                batch.append_grouped([one, two], tokens)
        with pytest.raises(TypeError):
            batch.append_grouped([one, two], [1, "two"])
        with pytest.raises(kvpool.InvalidArgument, match="the sequences at indices 0 and 1 are the same"):
            batch.append_grouped([one, one], [1, 1])
        with pytest.raises(kvpool.SequenceError, match="append the others first") as refused:
            batch.append_grouped([one, two], [20, np.array([7])])
        assert (refused.value.kind, refused.value.row, refused.value.announced) == ("TokensAhead", 1, 20)
        assert (len(one), len(two)) == (0, 0)
        appended = batch.append_grouped([one, two], [np.int64(20), 20])
        seen = [(new.start, new.stop, new.new_blocks, new.copies) for new in appended]
        assert seen == [(0, 20, 4, [])] * 2
        batch.append_grouped([one], [1])
        with pytest.raises(kvpool.SequenceError, match="unknown from token 20 on") as refused:
            batch.append_grouped([two, one], [[5], (6,)])
        assert (refused.value.kind, refused.value.row, len(two)) == ("TokensUnknown", 1, 20)
        # 20 blocks: each sequence has four, and more than four free ones are asked for.
        with pytest.raises(kvpool.OutOfBlocks) as lacking:
            batch.append_grouped([one, two], [75, 75])
        assert lacking.value.sequences == [2] and (len(one), len(two)) == (21, 20)
        one.close()
        batch.append_grouped([two], [75])
    assert len(two) == 95


def test_buffers_that_are_refused() -> None:
    pool = kvpool.Pool.layered(windows(), blocks=40)
    sequence = pool.try_admit_grouped(1, range(100))
    with pool.begin_batch() as batch:
        batch.append_grouped([sequence], [100])
        first, narrow = np.full((1, 8), -7, np.int32), np.full((1, 6), -7, np.int32)
        for out, why, list_ in (
            ([first], "out has 1 buffers; the sequences have 2 lists", None),
            ([first, narrow], "dimension 1 must be at least 7", 1),
            ([first, np.zeros((1, 8), np.int16)], "out is int16", 1),
            ([first, np.zeros(8, np.int32)], "must have 2 dimensions", 1),
        ):
            with pytest.raises(kvpool.BufferRefused, match=why) as refused:
                batch.block_tables([sequence], out)
            assert (first == -7).all() and (list_ is None or refused.value.list == list_)
        table = kvpool.BlockTable()
        with pytest.raises(kvpool.Busy):
            batch.block_tables([sequence], [table, table])
        assert batch.block_tables([sequence], [table, None]) == [7, 0] and table.width == 7
        assert batch.block_tables([sequence], np.zeros((2, 3, 8), np.int64)) == [7, 7]
        assert batch.block_tables([], [first, None]) == [0, 0]
        slots, few = np.full(100, -7, np.int64), np.zeros(9, np.int32)
        with pytest.raises(kvpool.BufferRefused, match="must be at least 100") as refused:
            batch.slot_mappings([sequence], [0], [100], [slots, few])
        assert refused.value.list == 1 and (slots == -7).all()
        for starts, stops, why in (
            ([0, 1], [2], "2 starts for 1 sequences"),
            ([0], [], "0 stops for 1 sequences"),
            ([5], [2], "5..2"),
            ([0], [101], "0..101"),
        ):
            with pytest.raises(kvpool.InvalidArgument, match=why):
                batch.slot_mappings([sequence], starts, stops, [slots, slots])
        with pytest.raises(TypeError, match="out is no list"):
            batch.slot_mappings([sequence], [0], [1], 7)
        for ratio, why in ((0, "an entry is of 1 token or more"), (3, "got 3, expected a divisor of 16")):
            with pytest.raises(kvpool.InvalidArgument, match=why):
                batch.entry_mapping([sequence], [0], [100], 1, ratio, slots)
        for list_ in (2, 2**64 - 1):
            with pytest.raises(kvpool.InvalidArgument, match="outside of 2 lists"):
                batch.entry_mapping([sequence], [0], [100], list_, 1, slots)
            with pytest.raises(kvpool.InvalidArgument, match="outside of 2 lists"):
                sequence.blocks(list_)
    with pool.begin_batch() as batch:
        batch.append_grouped([sequence], [30])
        with pytest.raises(kvpool.SequenceError, match="has left the window; tokens from 64 on are kept") as behind:
            batch.slot_mappings([sequence], [60], [130], [slots, slots])
        assert (behind.value.kind, behind.value.position, behind.value.kept_from) == ("BehindWindow", 60, 64)
    with pytest.raises(kvpool.BatchEnded):
        batch.block_tables([sequence], [None, None])


def test_rows_of_a_list() -> None:
    pool = kvpool.Pool.layered(windows(), blocks=80)
    sequences = [pool.try_admit_grouped(id, range(length)) for id, length in enumerate((33, 48))]
    with pool.begin_batch() as batch:
        batch.append_grouped(sequences, [33, 48])
        indptr, indices, last = np.zeros(3, np.int32), np.zeros(9, np.int32), np.zeros(2, np.int32)
        for list_ in (0, 1):
            assert batch.csr_table_grouped(sequences, list_, indptr, indices, last) == 6
            tables = [np.zeros((2, 3), np.int32) if other == list_ else None for other in (0, 1)]
            assert batch.block_tables(sequences, tables)[list_] == 3
            assert (indices[:6].reshape(2, 3) == tables[list_]).all()
            assert (indptr.tolist(), last.tolist()) == ([0, 3, 6], [1, 16])
        with pytest.raises(kvpool.InvalidArgument, match="outside of 2 lists"):
            batch.csr_table_grouped(sequences, 2, indptr, indices, last)


def test_forks_drafts_and_truncations() -> None:
    rng, engine = random.Random(3), Engine(windows(), 60)
    prompt = [rng.randrange(99) for _ in range(40)]
    request = Request(engine.pool.try_admit_grouped(1, prompt), prompt)
    engine.prefill(request, 40)
    fork = Request(request.sequence.fork(2), prompt)
    with engine.pool.begin_batch() as batch:
        # Both write to a block that they share: the first gets a copy, in each list.
        appended = engine.step(batch, [request, fork], [[1], [2]])
        assert [list_ for list_, _, _ in appended[0].copies] == [0, 1]
    engine.check([request, fork])
    with engine.pool.begin_batch() as batch:
        drafted = batch.draft_grouped(fork.sequence, 5)
        assert (drafted.start, drafted.stop, len(fork.sequence), fork.sequence.committed) == (41, 46, 46, 41)
    fork.sequence.accept([3, 4])
    assert (len(fork.sequence), fork.sequence.committed, fork.sequence.announced) == (43, 43, 43)
    fork.sequence.truncate(41)
    engine.check([fork])
    with engine.pool.begin_batch() as batch:
        engine.step(batch, [fork], [[rng.randrange(99) for _ in range(60)]])
    with engine.pool.begin_batch() as batch:
        engine.step(batch, [fork], [[9]])
    with pytest.raises(kvpool.SequenceError, match="has left the window") as behind:
        fork.sequence.truncate(20)
    assert behind.value.kind == "BehindWindow" and len(fork.sequence) == 102
    assert fork.sequence.blocks_given_up(0) == 4 and fork.sequence.blocks_given_up(1) == 0
    fork.sequence.reserve(64)
    assert fork.sequence.release_reservation() == 8
    with fork.sequence as closing:
        closing.close()
    assert fork.sequence.closed and "closed" in repr(fork.sequence) and "41 tokens in 2 lists" in repr(request.sequence)
    with pytest.raises(kvpool.Closed):
        len(fork.sequence)


def test_states_are_kept_where_the_sequence_says() -> None:
    rng, engine = random.Random(5), Engine(states(), 60)
    pool, prompt = engine.pool, [rng.randrange(99) for _ in range(70)]
    first = Request(pool.try_admit_grouped(1, prompt), prompt)
    frames = first.sequence.states
    assert [len(one) for one in frames] == [group.block_frames for group in engine.groups.groups if group.kind == "state"]
    assert first.sequence.next_cut == 64 and first.sequence.cached_prefix == 0
    with pool.begin_batch() as batch:
        engine.step(batch, [first], [20])
        with pytest.raises(kvpool.InvalidSequenceArgument, match="before a checkpoint: got 20, expected a multiple of 16"):
            batch.checkpoint(first.sequence)
        with pytest.raises(kvpool.InvalidSequenceArgument, match="fork"):
            first.sequence.fork(9)
    with pytest.raises(kvpool.SequenceError, match="cannot be taken back to 16") as ahead:
        first.sequence.truncate(16)
    assert (ahead.value.kind, ahead.value.asked, ahead.value.tokens) == ("StateAhead", 16, 20)
    engine.prefill(first, 64)
    assert first.sequence.states == frames and first.sequence.next_cut is None
    other = Request(pool.try_admit_grouped(2, prompt[:68]), prompt[:68])
    assert len(other.sequence) == other.sequence.cached_prefix == 64
    with pool.begin_batch() as batch:
        (new,) = engine.step(batch, [other], [4])
        assert [target for _, _, target in new.copies] == list(other.sequence.states[0])
    with pytest.raises(ZeroDivisionError), pool.begin_batch() as batch:
        engine.step(batch, [other], [[1]])
        raise ZeroDivisionError
    # A state cannot be taken back: it begins again.
    assert len(other.sequence) == other.sequence.committed == 0
    with pool.begin_batch() as batch:
        (new,) = batch.append_grouped([other.sequence], [68])
        assert (new.start, new.stop, new.copies) == (0, 68, [])


def test_admissions_wait_for_all_lists() -> None:
    pool = kvpool.Pool.layered(windows(), blocks=20)

    async def main() -> None:
        first = await pool.admit_grouped(1, range(150))
        with pytest.raises(kvpool.OutOfBlocks):
            pool.try_admit_grouped(2, range(150))
        second = asyncio.create_task(pool.admit_grouped(2, range(150), headroom=3, priority="high"))
        third = asyncio.create_task(pool.admit_grouped(3, range(150)))
        with pytest.raises(kvpool.Timeout):
            await pool.admit_grouped(4, range(150), timeout=0.02)
        third.cancel()
        await asyncio.wait([third])
        assert third.cancelled() and not second.done()
        first.close()
        sequence = await second
        assert (sequence.id, sequence.priority, sequence.reserved_blocks) == (2, "high", 20)
        with pytest.raises(kvpool.SequenceError, match="sequence 2 is already open"):
            await pool.admit_grouped(2, range(10))
        sequence.close()

    asyncio.run(main())
    assert pool.admit_grouped(5, range(40)).wait().lists == 2
    pool.audit()
    assert (pool.free_blocks, pool.sequence_count) == (20, 0)


def interleaved(engine: Engine, tokens: int) -> list[Request]:
    """Two sequences whose blocks lie between each other's."""
    requests = [Request(engine.pool.try_admit_grouped(id, [id]), [id]) for id in (1, 2)]
    for request in requests:
        engine.prefill(request, 1)
    for token in range(tokens):
        with engine.pool.begin_batch() as batch:
            engine.step(batch, requests, [[token], [token + 1]])
    return requests


def test_the_engine_moves_blocks() -> None:
    engine = Engine(windows(), 60, cache=False)
    kept, gone = interleaved(engine, 300)
    gone.sequence.close()
    assert not engine.moved
    report = engine.pool.defragment(order=4).wait()
    assert report.moved_blocks == len(engine.moved) > 0 and report.moved_bytes == 512 * len(engine.moved)
    engine.check([kept])
    engine.pool.audit()


def test_an_admission_waits_for_moves() -> None:
    groups = kvpool.LayerGroups([kvpool.LayerCache(bytes=2_048, state=True), ALL] * 2)
    assert groups.groups[0].block_frames == 8
    engine = Engine(groups, 2 * 8 + 2 * 20, cache=False)
    first, second = interleaved(engine, 319)
    assert engine.pool.free_blocks == 0
    second.sequence.close()
    third = engine.pool.try_admit_grouped(3, [3])  # in the run of the second
    with pytest.raises(kvpool.NoRun) as refused:
        engine.pool.try_admit_grouped(4, [4])
    assert refused.value.free == 19 and not engine.moved
    fourth = Request(engine.pool.admit_grouped(4, [4], timeout=20).wait(), [4])
    assert engine.moved and len(fourth.sequence.states[0]) == 8
    engine.prefill(fourth, 1)
    engine.check([first, fourth])
    third.close()


def test_threads_share_a_pool_that_moves_blocks() -> None:
    engine, ends = Engine(windows(), 400), time.monotonic() + 2
    engine.is_still = False

    def run(thread: int) -> int:
        rng, rounds = random.Random(thread), 0
        while time.monotonic() < ends:
            id, prompt = thread * 100_000 + rounds, [*range(rng.randrange(160)), rng.randrange(9)]
            request = Request(engine.pool.admit_grouped(id, prompt, chunk=64, timeout=20).wait(), prompt)
            try:
                engine.prefill(request, 64)
                for _ in range(rng.randrange(30)):
                    with engine.pool.begin_batch() as batch:
                        engine.step(batch, [request], [[rng.randrange(4)]])
                engine.check([request])
            except kvpool.OutOfBlocks:
                pass
            request.sequence.close()
            rounds += 1
        return rounds

    defragmenter = engine.pool.start_defragmenter(threshold=0.01)
    with ThreadPoolExecutor(4) as threads:
        rounds = list(threads.map(run, range(4)))
    defragmenter.stop().wait()
    cache = engine.pool.prefix_cache
    assert all(rounds) and engine.moved and cache is not None and cache.stats().hit_blocks > 0
    engine.pool.audit()
    assert engine.pool.sequence_count == 0


def test_a_copy_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda failure: shown.append(str(failure.exc_value)))
    engine = Engine(windows(), 60, cache=False)
    kept, gone = interleaved(engine, 300)
    gone.sequence.close()
    engine.breaks = True
    with pytest.raises(kvpool.DefragmentError, match="a copy by the engine failed: OSError: the device is busy"):
        engine.pool.defragment(order=4).wait()
    engine.check([kept])
    assert shown == ["the device is busy"] and not engine.moved
    engine.breaks = False
    assert engine.pool.defragment(order=4).wait().moved_blocks > 0
    engine.check([kept])
    engine.pool.audit()
    with pytest.raises(TypeError, match="copier is of .*int.*: it is a function"):
        kvpool.Pool.layered(windows(), blocks=4, copier=7)


def test_the_end_of_the_interpreter_waits_for_a_copy(run_python: Callable[[str], subprocess.CompletedProcess[str]]) -> None:
    ran = run_python(f"""
import sys, time
sys.path.insert(0, {str(FOLDER / "tests")!r})
from test_grouped import Engine, interleaved, windows
class Slow(Engine):
    def move(self, pairs):
        print("begins", flush=True)
        time.sleep(3)  # longer than the end of the runtime waits for its threads
        super().move(pairs)
        print("copied", flush=True)
engine = Slow(windows(), 60, cache=False)
kept, gone = interleaved(engine, 300)
gone.sequence.close()
moving = engine.pool.start_defragmenter(threshold=0.01)
time.sleep(0.5)
print("ends", flush=True)
""")
    assert (ran.returncode, ran.stderr, ran.stdout.split()) == (0, "", ["begins", "ends", "copied"])


def test_prompts_with_other_keys_share_nothing() -> None:
    engine = Engine(windows(), 60)
    prompt = list(range(40))
    request = Request(engine.pool.try_admit_grouped(1, prompt, salt=b"one"), prompt)
    engine.prefill(request, 40)
    admit = engine.pool.try_admit_grouped
    assert [len(admit(id, prompt, salt=salt)) for id, salt in ((2, b"one"), (3, b"two"), (4, None))] == [32, 0, 0]
    image = admit(5, prompt[:1])
    image.extra_key(1, 3, b"image")
    image.announce(prompt[1:])
    assert image.announced == 40
    with pytest.raises(kvpool.CacheError):
        admit(6, prompt, salt=b"")


@pytest.mark.parametrize("arguments", [[], ["gpt-oss-120b"], ["deepseek-v4-flash"]])
def test_the_example(arguments: list[str]) -> None:
    configs = [str(CONFIGS / f"{name}.json") for name in arguments]
    command = [sys.executable, FOLDER / "examples" / "hybrid_engine.py", *configs]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "") and "nothing lost" in ran.stdout
    assert max(map(len, ran.stdout.splitlines())) <= 80
