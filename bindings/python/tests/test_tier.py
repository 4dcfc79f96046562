"""Tiers of values by key: in this process, and over a node in another one."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import kvpool
import pytest
from cache_node import CacheNode

BYTES = 1000
WAIT = 30.0  # The longest time of any step: the machine may be busy.


def value(number: int) -> bytes:
    return number.to_bytes(4, "little") * (BYTES // 4)


def keys(*numbers: int) -> list[bytes]:
    return [f"key {number}".encode() for number in numbers]


def room(count: int) -> list[bytearray]:
    return [bytearray(b"\xee" * BYTES) for _ in range(count)]


def peer(node: CacheNode, namespace: str = "tests", **more: object) -> kvpool.Tier:
    """A tier that sees failures soon."""
    settings = {"patience": WAIT, "rest": 0.05} | more
    return kvpool.Tier.peer("cache", node.address, value_bytes=BYTES, namespace=namespace, **settings)


def until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


def put(tier: kvpool.Tier, *numbers: int) -> None:
    """Stores values, also while the link is not up yet."""
    until(lambda: set(tier.put(keys(*numbers), [value(n) for n in numbers], timeout=WAIT).wait()) == {"stored"})


@pytest.fixture
def node() -> Iterator[CacheNode]:
    with CacheNode(BYTES) as node:
        yield node


@pytest.fixture(params=["in_process", "peer"])
def tier(request: pytest.FixtureRequest) -> Iterator[kvpool.Tier]:
    if request.param == "in_process":
        yield kvpool.Tier.in_process(1 << 20, value_bytes=BYTES, namespace="tests")
        return
    with CacheNode(BYTES) as node:
        tier = peer(node)
        put(tier, 0)
        yield tier
        tier.close()


def test_values_are_found_by_key(tier: kvpool.Tier) -> None:
    put(tier, 1, 2, 3)
    assert tier.exists(keys(1, 2, 3, 4), timeout=WAIT).wait() == ["hit", "hit", "hit", "miss"]
    buffers = room(4)
    assert tier.get(keys(3, 9, 1, 2), buffers, timeout=WAIT).wait() == ["hit", "miss", "hit", "hit"]
    assert [bytes(buffer) for buffer in buffers] == [value(3), b"\xee" * BYTES, value(1), value(2)]
    assert tier.get([], [], timeout=WAIT).wait() == tier.exists([]).wait() == tier.put([], []).wait() == []
    # Several keys of one value, and one key twice.
    twice = room(2)
    assert tier.get(keys(1, 1), twice, timeout=WAIT).wait() == ["hit", "hit"]
    assert [bytes(buffer) for buffer in twice] == [value(1)] * 2
    stats = tier.stats()
    assert (stats.hits, stats.bad_values, stats.is_open) == (5, 0, False)


def test_calls_are_awaited(tier: kvpool.Tier) -> None:
    async def main() -> None:
        some = keys(*range(10, 26))
        stored = await tier.put(some, [memoryview(value(n)) for n in range(10, 26)], timeout=WAIT)
        assert stored == ["stored"] * 16
        buffers = room(16)
        exists, got = await asyncio.gather(tier.exists(some, timeout=WAIT), tier.get(some, buffers, timeout=WAIT))
        assert exists == got == ["hit"] * 16
        assert [bytes(buffer) for buffer in buffers] == [value(n) for n in range(10, 26)]

    asyncio.run(main())


def test_tiers_share_values_by_namespace_and_size(node: CacheNode) -> None:
    one, other, third = peer(node), peer(node), peer(node, "another model")
    put(one, 1, 2)
    put(third, 5)
    assert node.ask() == 3
    until(lambda: other.get(keys(1), room(1), timeout=WAIT).wait() == ["hit"])
    buffers = room(3)
    assert other.get(keys(1, 5, 2), buffers, timeout=WAIT).wait() == ["hit", "miss", "hit"]
    assert [bytes(buffers[0]), bytes(buffers[2])] == [value(1), value(2)]
    assert third.get(keys(1, 2), room(2), timeout=WAIT).wait() == ["miss", "miss"]
    # A node of values of another size is no peer, and its blocks are no values.
    with pytest.raises(kvpool.InvalidArgument, match="namespace of a tier is empty"):
        peer(node, "")
    wrong = kvpool.Tier.peer("cache", node.address, value_bytes=BYTES + 500, namespace="tests", rest=0.05)
    put_wrong = wrong.put(keys(1), [bytes(BYTES + 500)], timeout=WAIT).wait()
    assert put_wrong == ["failed"] and wrong.stats().last_failure


def test_a_node_that_is_killed_and_comes_back(node: CacheNode) -> None:
    here, there = peer(node, patience=0.5), peer(node, patience=0.5, window=4)
    put(here, *range(8))
    until(lambda: there.exists(keys(*range(8)), timeout=WAIT).wait() == ["hit"] * 8)
    node.kill()
    # The window has the latest values still, and they are the right ones. Nothing else is a hit.
    for tier in (here, there):
        buffers = room(1)
        (word,) = tier.get(keys(100), buffers, timeout=WAIT).wait()
        assert word != "hit" and bytes(buffers[0]) == b"\xee" * BYTES
        (word,) = tier.put(keys(100), [value(100)], timeout=WAIT).wait()
        assert word == "failed"
        assert tier.stats().last_failure
    node.start()
    put(here, 200)
    until(lambda: there.get(keys(200), room(1), timeout=WAIT).wait() == ["hit"])
    until(lambda: there.exists(keys(300), timeout=WAIT).wait() == ["miss"])


def test_the_first_call_waits_for_the_link(node: CacheNode) -> None:
    put(peer(node), 1)
    for call in ("exists", "get", "put"):
        tier = peer(node)
        arguments = {"exists": (), "get": (room(1),), "put": ([value(1)],)}[call]
        (word,) = getattr(tier, call)(keys(1), *arguments, timeout=WAIT).wait()
        assert word == ("stored" if call == "put" else "hit")
    # Also for a node that begins to listen after the tier.
    node.kill()
    tier = peer(node)
    starting = threading.Timer(0.3, node.start)
    starting.start()
    assert tier.exists(keys(1), timeout=WAIT).wait() == ["miss"] and tier.stats().failed == 0
    starting.join()


def test_the_first_call_ends_in_time_if_no_node_is_there(node: CacheNode) -> None:
    node.kill()
    for timeout, patience, word in ((0.2, WAIT, "late"), (WAIT, 0.2, "failed")):
        tier = peer(node, patience=patience)
        began = time.monotonic()
        assert tier.get(keys(1), room(1), timeout=timeout).wait() == [word]
        assert 0.15 < time.monotonic() - began < WAIT / 2
    # Only the first one waits.
    time.sleep(0.1)
    began = time.monotonic()
    assert tier.get(keys(2), room(1), timeout=WAIT).wait() == ["failed"] and time.monotonic() - began < 0.15


def test_a_missing_node_is_logged(run_python: Callable) -> None:
    result = run_python(
        """
import kvpool, logging, sys, time
class Handler(logging.Handler):
    def emit(self, record):
        print(record.name, record.getMessage(), flush=True)
        found.append(record)
found = []
logging.getLogger("kvpool").addHandler(Handler())
tier = kvpool.Tier.peer("cache", "127.0.0.1:1", value_bytes=100, namespace="tests")
end = time.monotonic() + 20
while not found and time.monotonic() < end:
    time.sleep(0.01)
"""
    )
    assert "no link, peer: cache, address: 127.0.0.1:1" in result.stdout, result


def test_the_longest_patience(node: CacheNode) -> None:
    put(peer(node, patience=3e18, rest=3e18), 1)


def test_a_node_that_hangs_holds_up_no_call_and_writes_nothing_late(node: CacheNode) -> None:
    writer, reader = peer(node), peer(node)
    put(writer, *range(4))
    put(reader, 50)
    node.stop()
    buffers = room(4)
    began = time.monotonic()
    words = reader.get(keys(*range(4)), buffers, timeout=0.05).wait()
    assert words == ["late"] * 4 and time.monotonic() - began < WAIT / 2
    node.resume()
    # The answer comes, and finds no one: the caller has its memory back.
    until(lambda: reader.get(keys(*range(4)), room(4), timeout=WAIT).wait() == ["hit"] * 4)
    assert all(bytes(buffer) == b"\xee" * BYTES for buffer in buffers)


def test_a_cancelled_get_lets_go_of_its_buffers(node: CacheNode) -> None:
    writer, reader = peer(node), peer(node)
    put(writer, 1)
    put(reader, 50)

    async def main() -> None:
        node.stop()
        buffers = room(1)
        getting = asyncio.create_task(reader.get(keys(1), buffers, timeout=WAIT))
        while getting.done() or not reader.stats().lookups:
            await reader.exists(keys(7), timeout=0.01)
        getting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await getting
        while True:
            try:
                buffers[0].append(0)  # Refused while anyone has its memory.
                break
            except BufferError:
                await asyncio.sleep(0.01)
        node.resume()
        while await reader.get(keys(1), room(1), timeout=WAIT) != ["hit"]:
            await asyncio.sleep(0.01)
        assert bytes(buffers[0][:BYTES]) == b"\xee" * BYTES

    asyncio.run(main())


def test_values_that_the_node_damaged_are_dropped_there(node: CacheNode) -> None:
    writer, reader = peer(node), peer(node)
    put(writer, *range(8))
    until(lambda: reader.get(keys(0), room(1), timeout=WAIT).wait() == ["hit"])
    node.ask("damage")
    buffers = room(8)
    assert reader.get(keys(*range(8)), buffers, timeout=WAIT).wait() == ["hit"] + ["miss"] * 7
    assert [bytes(buffer) for buffer in buffers] == [value(0)] + [b"\xee" * BYTES] * 7
    assert reader.exists(keys(*range(8)), timeout=WAIT).wait() == ["hit"] + ["miss"] * 7, "0 was not asked for"
    stats = reader.stats()
    # The node counts them and drops them; the reader counts them among its misses.
    assert (node.ask(), node.ask("damaged")) == (1, 7)
    assert (stats.bad_values, stats.misses, stats.failed) == (7, 7, 0)
    assert stats.last_failure == "peer found a value damaged, and dropped it"
    # A put replaces them.
    put(writer, *range(1, 8))
    assert reader.stats().bad_values == node.ask("damaged") == 7
    assert reader.get(keys(*range(8)), buffers, timeout=WAIT).wait() == ["hit"] * 8
    assert [bytes(buffer) for buffer in buffers] == [value(number) for number in range(8)]


def test_a_put_whose_time_is_over_copies_nothing(run_python: Callable) -> None:
    result = run_python(
        """
import kvpool, resource
count, size = 64, 16 << 20
tier = kvpool.Tier.in_process(1 << 30, value_bytes=size, namespace="tests")
kilobytes = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
buffer, before = bytes(size), kilobytes()
words = tier.put([b"%d" % number for number in range(count)], [buffer] * count, timeout=0).wait()
print(set(words), kilobytes() - before < count * size >> 12, tier.exists([b"0"], timeout=60).wait())
"""
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "{'late'} True ['miss']\n", "")


def test_values_of_sizes_that_take_the_same_room_are_apart(node: CacheNode) -> None:
    put(peer(node), 1)
    longer = kvpool.Tier.peer("cache", node.address, value_bytes=BYTES + 1, namespace="tests", patience=WAIT, rest=0.05)
    until(lambda: longer.put(keys(2), [bytes(BYTES + 1)], timeout=WAIT).wait() == ["stored"])
    assert longer.exists(keys(1), timeout=WAIT).wait() == ["miss"]


def test_a_long_lookup_is_no_failure(node: CacheNode) -> None:
    # In calls of a few keys each: patience is for a call of the node.
    tier = peer(node, window=8)
    put(tier, *range(40))
    assert tier.exists(keys(*range(40)), timeout=WAIT).wait() == ["hit"] * 40
    assert tier.exists(keys(0, 99, 1), timeout=WAIT).wait()[:2] == ["hit", "miss"]


def test_the_example_holds_values() -> None:
    example = Path(__file__).resolve().parents[1] / "examples" / "value_node.py"
    command = [sys.executable, str(example), "--value-bytes", str(BYTES), "--values", "8", "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            _, address = process.stdout.readline().split(" at ")
            tier = kvpool.Tier.peer("cache", address.strip(), value_bytes=BYTES, namespace="tests", rest=0.05)
            put(tier, 1)
            assert tier.get(keys(1), room(1), timeout=WAIT).wait() == ["hit"]
        finally:
            process.terminate()
        assert process.wait(WAIT) == 0


def test_tokens_are_checked() -> None:
    with CacheNode(BYTES, token="a secret of sixteen bytes") as node:
        put(peer(node, token=b"a secret of sixteen bytes"), 1)
        stranger = peer(node, token=b"a guess of sixteen bytes!", patience=0.5)
        assert stranger.get(keys(1), room(1), timeout=WAIT).wait() == ["failed"]
        with pytest.raises(kvpool.NodeError, match="16"):
            peer(node, token=b"short")


def test_bad_arguments_are_refused_by_name(tier: kvpool.Tier) -> None:
    for bad, why in (
        ([bytearray(BYTES - 1)], "entry 0 of the buffers has 999 bytes; values have 1000"),
        ([value(1)], "entry 0 of the buffers is read-only"),
        ([memoryview(bytearray(2 * BYTES))[::2]], "entry 0 of the buffers is not C-contiguous"),
        ([bytearray(BYTES)] * 2, "1 keys, and 2 buffers"),
        ([], "1 keys, and 0 buffers"),
        (["text"], "entry 0 of the buffers"),
    ):
        with pytest.raises(kvpool.BufferRefused, match=why):
            tier.get(keys(1), bad).wait()
    memory = bytearray(2 * BYTES)
    views = [memoryview(memory)[at : at + BYTES] for at in (BYTES, 900)]
    with pytest.raises(kvpool.BufferRefused, match="entries 1 and 0 of the buffers overlap"):
        tier.get(keys(1, 2), views).wait()
    for bad in (["text"], [1], [bytearray(b"key")]):
        with pytest.raises(kvpool.InvalidArgument, match="entry 0: a key is an object of type bytes"):
            tier.exists(bad).wait()
    with pytest.raises(kvpool.InvalidArgument, match="a time cannot be"):
        tier.exists(keys(1), timeout=-1).wait()
    with pytest.raises(kvpool.InvalidArgument, match="neither host:port nor unix:/path"):
        kvpool.Tier.peer("cache", "nonsense", value_bytes=BYTES, namespace="tests")
    with pytest.raises(kvpool.InvalidArgument, match="number of calls of a tier is 0; it is from 1 to 1024"):
        kvpool.Tier.peer("cache", "127.0.0.1:1", value_bytes=BYTES, namespace="tests", threads=0)
    assert tier.value_bytes == BYTES and f"values of {BYTES} bytes" in repr(tier)
    tier.close()
    tier.close()
    with pytest.raises(kvpool.Closed):
        tier.exists(keys(1)).wait()


def test_the_process_ends_with_calls_under_way(run_python: Callable, node: CacheNode) -> None:
    node.stop()
    result = run_python(
        f"""
import asyncio, kvpool, threading
tier = kvpool.Tier.peer("cache", {node.address!r}, value_bytes={BYTES}, namespace="tests")
threading.Thread(target=lambda: tier.get([b"a"], [bytearray({BYTES})], timeout=1000).wait(), daemon=True).start()
async def main():
    call = asyncio.create_task(tier.get([b"b"], [bytearray({BYTES})], timeout=1000))
    await asyncio.sleep(0.05)
    kept.append(call)
kept = []
asyncio.run(main())
"""
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_a_fork_does_not_use_its_parents_tier(tier: kvpool.Tier) -> None:
    child = os.fork()
    if child == 0:
        try:
            tier.exists(keys(1)).wait()
        except kvpool.Forked:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
