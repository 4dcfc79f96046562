"""Orders of eviction, against a model that is an ordered list."""

from __future__ import annotations

import random
import threading

import kvpool
import pytest


def key(number: int) -> bytes:
    return b"%08d" % number


def filled(count: int, policy: str = "lru") -> kvpool.EvictionOrder:
    order = kvpool.EvictionOrder(count, policy)
    for number in range(count):
        order.insert(key(number), evictable=True)
    return order


def test_blocks_are_evicted_in_the_order_of_use() -> None:
    order = filled(8)
    assert len(order) == order.evictable == 8 and key(3) in order and key(9) not in order
    order.touch([key(1), key(0), b"unknown"])  # The first is the latest of all.
    assert order.evict(2, [key(2)]) == [key(3), key(4)]
    assert order.evict(4) == [key(2), key(5), key(6), key(7)]
    assert order.evict(2) == [key(0), key(1)] and order.evict(1) is None and order.evict(0) == []


def test_an_eviction_takes_all_or_nothing() -> None:
    order = filled(6)
    order.hold(key(0))
    for count, protected in ((6, []), (5, [key(1)]), (4, [key(1), key(5), key(0), b"unknown"])):
        assert order.evict(count, protected) is None
        assert (len(order), order.evictable) == (6, 5)
    assert order.evict(3, [key(1), key(5)]) == [key(2), key(3), key(4)]
    order.release(key(0))
    order.release(key(0))
    assert order.evict(3) == [key(0), key(1), key(5)]


def test_requests_that_have_not_ended_are_evicted_last_and_from_their_end() -> None:
    order = kvpool.EvictionOrder(10, "lru")
    first, second = order.begin(), order.begin()
    for request, numbers in ((second, (5, 6)), (first, (1, 2, 3))):
        for position, number in enumerate(numbers):
            order.insert(key(number), request, position, evictable=True)
    # The older request does not take a block from the newer one.
    order.use([(key(5), 0)], first)
    order.finish([key(6)], set(), second)
    assert order.evict(2) == [key(6), key(3)]
    third = order.begin()
    order.use([(key(1), 0), (key(2), 1)], third)
    order.finish([key(1), key(2), key(7)], set(), third)
    # The first request still uses them, and is older than the second, which has the block 5.
    assert order.evict(1) == [key(2)]
    order.finish([key(5), key(1)], set(), first)
    assert order.evict(2) == [key(1), key(5)]


def test_a_hold_does_not_change_the_order() -> None:
    order = filled(4)
    order.hold(key(0))
    order.finish([key(2), key(3)], set())
    order.hold(key(3))
    order.touch([key(1)])
    order.release(key(3))
    order.release(key(0))
    # Blocks of requests that have ended go first: 3 before 2, as they were released.
    assert order.evict(4) == [key(3), key(2), key(0), key(1)]


def test_bad_calls_are_refused() -> None:
    order = filled(1)
    for call in (order.hold, order.release, order.remove):
        with pytest.raises(kvpool.InvalidArgument, match="the cache has no block b'missing'"):
            call(b"missing")
    with pytest.raises(kvpool.InvalidArgument, match='no eviction policy is called "mru"'):
        kvpool.EvictionOrder(10, "mru")
    with pytest.raises(TypeError):
        order.insert("text")
    order.remove(key(0))
    order.insert(key(1))
    order.insert(key(1), evictable=True)
    assert (len(order), order.evictable, order.policy) == (1, 1, "lru")
    order.clear()
    assert len(order) == order.evictable == 0
    assert "lru: 0 blocks" in repr(order)


class Meddler(bytes):
    """A key that uses its order whenever Python runs code of it."""

    order: kvpool.EvictionOrder

    def __str__(self) -> str:
        return str(len(self.order))

    def __del__(self) -> None:
        len(self.order)


def test_code_of_keys_may_use_the_order() -> None:
    order = Meddler.order = kvpool.EvictionOrder(8)
    with pytest.raises(kvpool.InvalidArgument, match="has no block"):
        order.remove(Meddler(b"missing"))
    for call in (order.touch, lambda keys: order.use([(keys[0], 1)], 1), lambda keys: order.finish(keys, set())):
        order.insert(Meddler(b"x"), evictable=True)
        call([Meddler(b"x")])
    assert order.evict(1, [Meddler(b"y")]) == [b"x"]
    order.insert(Meddler(b"x"))
    order.insert(Meddler(b"x"))
    order.clear()
    assert len(order) == 0


def test_errors_of_several_threads_wait_for_nothing() -> None:
    order = filled(1)

    def wrong() -> None:
        for _ in range(2000):
            with pytest.raises(kvpool.InvalidArgument):
                order.remove(b"missing")

    threads = [threading.Thread(target=wrong, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()


def test_a_request_that_goes_on_keeps_what_an_ended_one_used() -> None:
    order = kvpool.EvictionOrder(8, "lru")
    older, newer = order.begin(), order.begin()
    order.insert(b"shared", newer, evictable=True)
    order.finish([b"shared"], set(), newer)
    order.insert(b"idle", evictable=True)
    order.finish([b"idle"], set())
    order.use([(b"shared", 0)], older)
    assert order.evict(1) == [b"idle"]


@pytest.mark.parametrize("policy", ["lru", "priority"])
@pytest.mark.parametrize("ends_first", ["older", "newer", "without a number"])
def test_the_end_of_a_request_leaves_what_others_use(policy: str, ends_first: str) -> None:
    order = kvpool.EvictionOrder(8, policy)
    older, newer = order.begin(), order.begin()
    order.insert(b"shared", older, 0, evictable=True)
    order.use([(b"shared", 0)], newer)
    ending = {"older": older, "newer": newer, "without a number": None}[ends_first]
    order.finish([b"shared"], {b"shared"}, ending)
    for name in (b"idle", b"another"):
        order.insert(name, evictable=True)
        order.finish([name], set())
    # It was released first, but another request still uses it.
    assert set(order.evict(2) or ()) == {b"idle", b"another"}
    for request in {older, newer} - {ending}:
        order.finish([b"shared"], {b"shared"}, request)
    order.insert(b"later", order.begin(), evictable=True)
    assert order.evict(2) == [b"shared", b"later"]


@pytest.mark.parametrize("stale", ["used after its end", "inserted after its end", "not named at its end"])
def test_a_request_that_has_ended_keeps_no_block(stale: str) -> None:
    order = kvpool.EvictionOrder(8, "lru")
    ended, other = order.begin(), order.begin()
    order.insert(b"old", other, 0, evictable=True)
    if stale == "not named at its end":
        order.use([(b"old", 0)], ended)
        order.finish([], set(), ended)
    else:
        order.finish([b"old"], set(), ended)
        if stale == "used after its end":
            order.use([(b"old", 0)], ended)
        else:
            order.insert(b"old", ended, 0, evictable=True)
    order.finish([b"old"], {b"old"}, other)
    order.insert(b"idle", evictable=True)
    order.finish([b"idle"], set())
    assert order.evict(2) == [b"old", b"idle"]


def test_numbers_of_requests_do_not_repeat_after_clear() -> None:
    order = kvpool.EvictionOrder(8, "lru")
    before = order.begin()
    order.clear()
    after = order.begin()
    assert after > before
    order.insert(b"used", after, 0, evictable=True)
    order.finish([b"used"], set(), before)
    order.insert(b"idle", evictable=True)
    order.finish([b"idle"], set())
    # The request before the clear has ended, the other one has not.
    assert order.evict(1) == [b"idle"]
    goes_on = order.begin()
    order.clear()
    order.insert(b"used", goes_on, 0, evictable=True)
    order.finish([b"used"], set())
    order.insert(b"idle", evictable=True)
    order.finish([b"idle"], set())
    assert order.evict(1) == [b"idle"]


@pytest.mark.parametrize("policy", ["lru", "priority"])
def test_any_calls_keep_the_count_of_blocks(policy: str) -> None:
    dice = random.Random(5)
    order = kvpool.EvictionOrder(64, policy)
    there: dict[bytes, bool] = {}
    for step in range(3000):
        some = [key(dice.randrange(100)) for _ in range(dice.randrange(1, 12))]
        request = order.begin()
        reused = {name for name in some if name in there}
        for position, name in enumerate(some):
            if name not in there:
                there[name] = dice.random() < 0.5
                order.insert(name, request, position, evictable=there[name])
        order.use([(name, position) for position, name in enumerate(some)], request)
        for name in dice.sample(sorted(there), min(5, len(there))):
            if dice.random() < 0.1:
                order.remove(name)
                del there[name]
            else:
                there[name] = dice.random() < 0.7
                (order.release if there[name] else order.hold)(name)
        if step % 3:
            order.finish(list(dict.fromkeys(some)), reused)
        else:
            order.touch(some)
        assert (len(order), order.evictable) == (len(there), sum(there.values()))
        protected = set(some)
        possible = {name for name, is_evictable in there.items() if is_evictable} - protected
        count = dice.randrange(0, len(possible) + 3)
        evicted = order.evict(count, protected)
        assert (evicted is None) == (count > len(possible))
        assert len(set(evicted or ())) == (count if evicted is not None else 0)
        assert possible >= set(evicted or ())
        for name in evicted or ():
            del there[name]
    assert len(there) > 10
