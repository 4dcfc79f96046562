"""Hints about sessions and cached blocks: envelopes in all their forms, limits, sessions, and refusals."""

from __future__ import annotations

import copy
import pickle
import time
from collections import UserDict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import kvpool
import numpy as np
import pytest
from conftest import TOKENS, layout

BLOCKS = 5  # of a request


@pytest.fixture
def hinted() -> kvpool.Pool:
    return kvpool.Pool(layout(), 20, prefix_cache=True, hints=True)


def prompt(session: int) -> list[int]:
    return [session * 1_000 + token for token in range(BLOCKS * TOKENS)]


def run(pool: kvpool.Pool, session: int, returns_in: float | None = None, tenant: int | None = None) -> None:
    """A request of a session, which fills its blocks and is closed."""
    with pool.try_admit(session, prompt(session), session=session, tenant=tenant) as sequence:
        with pool.begin_batch() as batch:
            batch.append(sequence, len(prompt(session)) - len(sequence))
        if returns_in is not None:
            sequence.expect_return(returns_in)


def evict(pool: kvpool.Pool, blocks: int) -> None:
    pool.try_allocate(pool.free_blocks + blocks).close()


def cached(pool: kvpool.Pool) -> dict[int, int]:
    """Cached blocks of each session."""
    return {session.id: session.cached_blocks for session in pool.sessions()}


def action(kind: str, /, **payload: object) -> dict[str, Any]:
    return {"action_id": kind, "action_type": kind, "action_version": "1.0", "payload": payload}


def envelope(*actions: object) -> dict[str, Any]:
    return {"protocol_version": "0.1", "message_id": "m", "actions": list(actions)}


def hint(pool: kvpool.Pool, kind: str, **payload: object) -> dict[str, Any]:
    answer = pool.hint(envelope(action(kind, **payload)))
    assert (answer["message_id"], len(answer["outcomes"])) == ("m", 1)
    outcome: dict[str, Any] = answer["outcomes"][0]
    assert outcome.pop("action_id") == kind
    return outcome


def test_a_retained_session_stays_while_others_go(hinted: kvpool.Pool) -> None:
    for session in (1, 2, 3):
        run(hinted, session)
    assert hint(hinted, "kv.retain", session_id=1, priority=80, ttl_seconds=60) == {"outcome": "accepted", "blocks": BLOCKS}
    evict(hinted, 2 * BLOCKS)
    assert cached(hinted) == {1: BLOCKS, 2: 0, 3: 0}
    assert len(hinted.sequence(9, prompt(1))) > 0
    hinted.audit()


def test_a_released_session_goes_first(hinted: kvpool.Pool) -> None:
    for session in (1, 2):
        run(hinted, session)
    assert hint(hinted, "kv.release", session_id=2)["outcome"] == "accepted"
    evict(hinted, BLOCKS)
    assert cached(hinted) == {1: BLOCKS}, "forgotten, too"
    assert hint(hinted, "kv.release", session_id=2) == {"outcome": "missing"}
    assert hint(hinted, "kv.demote", session_id=7) == {"outcome": "missing"}


def test_sessions_are_records(hinted: kvpool.Pool) -> None:
    before = hinted.prefix_cache.now_ms
    run(hinted, 1)
    run(hinted, 2)
    run(hinted, 1)
    assert hint(hinted, "kv.pin", session_id=1, ttl_seconds=30)["outcome"] == "accepted"
    newest, other = hinted.sessions()
    size = BLOCKS * hinted.layout.bytes_per_block
    assert (newest.id, newest.requests, other.id, other.requests) == (1, 2, 2, 1)
    assert (newest.cached_blocks, newest.cached_bytes, newest.pinned_bytes) == (BLOCKS, size, size)
    assert before <= other.last_use_ms <= newest.last_use_ms <= hinted.prefix_cache.now_ms
    assert 29_000 < newest.retained_until_ms - before < 60_000
    assert (other.retained_until_ms, other.returns_at_ms, other.pinned_bytes) == (None, None, 0)
    assert newest.as_dict()["id"] == 1 and copy.copy(newest) == pickle.loads(pickle.dumps(newest)) == newest


def test_the_return_of_a_session(hinted: kvpool.Pool) -> None:
    run(hinted, 1, returns_in=60)
    run(hinted, 2, returns_in=np.float32(0.5))
    now = hinted.prefix_cache.now_ms
    times = {session.id: session.returns_at_ms for session in hinted.sessions()}
    assert 30_000 < times[1] - now <= 60_000 and times[2] - now <= 500
    with hinted.sequence(3, session=3) as sequence:
        for seconds in (-1, float("nan"), float("inf"), 1e300, True):
            with pytest.raises(kvpool.InvalidArgument, match="a time cannot be"):
                sequence.expect_return(seconds)
        with pytest.raises(TypeError):
            sequence.expect_return("soon")
        sequence.expect_return(1e19)
    with pytest.raises(kvpool.Closed):
        sequence.expect_return(1)
    with kvpool.Pool(layout(), 10).sequence(1, session=2) as sequence:
        sequence.expect_return(1)


def test_an_awaited_admission_has_a_session(hinted: kvpool.Pool) -> None:
    hinted.admit(1, [1, 2, 3], session=2**64 - 1).wait().close()
    assert hinted.sessions() == [], "nothing was computed"
    with hinted.admit(1, [1, 2, 3], session=2**64 - 1).wait() as sequence:
        with hinted.begin_batch() as batch:
            batch.append(sequence, 3)
    assert [session.id for session in hinted.sessions()] == [2**64 - 1]
    for wrong in (-1, 2**64, True):
        with pytest.raises(kvpool.InvalidArgument, match="a session cannot be"):
            hinted.sequence(1, session=wrong)


def test_grouped_sequences() -> None:
    heads = {"kv_heads": 1, "head_dim": 4}
    groups = kvpool.LayerGroups([kvpool.LayerCache(**heads, window=20), kvpool.LayerCache(**heads)] * 2)
    pool = kvpool.Pool.layered(groups, blocks=200, prefix_cache=True, hints={"longest": 60})
    with pool.try_admit_grouped(1, range(100), session=7) as sequence, pool.begin_batch() as batch:
        batch.append_grouped([sequence], [100])
        sequence.expect_return(10)
        with pytest.raises(kvpool.InvalidArgument):
            sequence.expect_return(-0.5)
    told = hint(pool, "kv.retain", session_id=7, ttl_seconds=3_600)
    assert (told["outcome"], told["limit"]) == ("clipped", "longest")
    (session,) = pool.sessions()
    assert (session.id, session.retained_until_ms) == (7, told["until"])
    assert 0 < session.returns_at_ms - session.last_use_ms <= 10_000 and session.cached_blocks > 0


@dataclass
class Payload:
    session_id: int
    ttl_seconds: float = 60.0
    priority: str = "high"


@dataclass
class Action:
    payload: object
    action_id: str = "a"
    action_type: str = "kv.retain"
    action_version: str = "1.0"


@dataclass
class Envelope:
    actions: list[object]
    protocol_version: str = "1.0"
    message_id: str = "an object"


class Slots:
    __slots__ = ("actions", "message_id", "protocol_version")


@dataclass
class Struct:
    """As `msgspec` has it: fields without a dictionary."""

    session_id: np.uint64 = field(default_factory=lambda: np.uint64(1))

    __struct_fields__ = ("session_id",)


def test_objects_with_the_attributes(hinted: kvpool.Pool) -> None:
    run(hinted, 1)
    slots = Slots()
    slots.actions, slots.message_id, slots.protocol_version = (Action(Struct()),), "slots", "0.1"
    for given in (
        Envelope([Action({"session_id": 1})]),
        Envelope([Action(Payload(1)), Action(UserDict(session_id="1", priority=90))]),
        SimpleNamespace(**envelope(SimpleNamespace(**action("kv.retain", session_id=1)))),
        UserDict(envelope(Action({"session_id": np.int64(1), "ttl_seconds": np.float32(2)}))),
        slots,
    ):
        answer = hinted.hint(given)
        assert answer["message_id"] == (given["message_id"] if isinstance(given, UserDict) else given.message_id)
        for told in answer["outcomes"]:
            assert told["outcome"] in ("accepted", "clipped") and told["blocks"] == BLOCKS, told


def test_message_pack(hinted: kvpool.Pool) -> None:
    msgpack = pytest.importorskip("msgpack")
    run(hinted, 1)
    packed = msgpack.packb(envelope(action("kv.retain", session_id=1), action("kv.release", session_id=1)))
    for form in (packed, bytearray(packed), memoryview(packed)):
        outcomes = hinted.hint(form)["outcomes"]
        assert [told["action_id"] for told in outcomes] == ["kv.retain", "kv.release"]
    for wrong in (b"", b"\x01", packed[:-1], msgpack.packb({"actions": []}), b"\x91" * 100_000):
        with pytest.raises(kvpool.InvalidArgument, match="no envelope of hints") as refused:
            hinted.hint(wrong)
        assert (refused.value.kind, refused.value.argument) == ("Malformed", "envelope")
    # Numbers that JSON does not have are no times, and reject their action alone.
    for odd in (float("nan"), float("inf"), float("-inf"), -1.0, 1e300):
        odd_pin = action("kv.pin", session_id=1, ttl_seconds=odd)
        told = hinted.hint(msgpack.packb(envelope(odd_pin, action("kv.demote", session_id=8))))["outcomes"]
        assert [(one["outcome"], one.get("reason")) for one in told] == [("rejected", "malformed"), ("missing", None)]
        assert "payload" in told[0]["detail"] or "ttl_seconds" in told[0]["detail"]
    # Deeper than what `msgpack` writes.
    head = msgpack.packb(envelope(action("kv.retain")))[:-1]
    assert hinted.hint(head + b"\x91" * 600 + b"\x01")["outcomes"][0]["reason"] == "malformed"
    with pytest.raises(kvpool.InvalidArgument, match="depth limit"):
        hinted.hint(head + b"\x91" * 10_000 + b"\x01")


def test_tokens_of_an_open_sequence_and_hashes(hinted: kvpool.Pool) -> None:
    run(hinted, 1)
    with hinted.sequence(5, prompt(1)) as sequence:
        hashes = sequence.block_hashes
        first = {"start": 0, "end": 2 * TOKENS, "priority": 90, "duration": 60.0}
        directives = [first, {"start": 2 * TOKENS, "priority": 0}]
        answer = hinted.hint(envelope(action("kv.retain", sequence_id=5, directives=directives)))
        assert [(told["action_id"], told["outcome"]) for told in answer["outcomes"]] == [("kv.retain", "deferred")] * 2
    assert hint(hinted, "kv.demote", block_hashes=hashes[:2])["outcome"] == "accepted"


def test_actions_that_are_not_understood_are_rejected_by_themselves(hinted: kvpool.Pool) -> None:
    run(hinted, 1)
    good = action("kv.retain", session_id=1, ttl_seconds=9)
    outcomes = hinted.hint(envelope(action("kv.sing"), good, action("kv.pin", color=1)))["outcomes"]
    assert [told["outcome"] for told in outcomes] == ["rejected", "accepted", "rejected"]
    assert outcomes[0]["reason"] == "malformed" and "kv.sing" in outcomes[0]["detail"]
    assert hint(hinted, "kv.prefetch", session_id=1)["reason"] == "no_tier"
    assert hint(hinted, "kv.retain", session_id=-1)["reason"] == "malformed"


def test_envelopes_that_are_refused(hinted: kvpool.Pool) -> None:
    run(hinted, 1)
    good = action("kv.release", session_id=1)
    loop: list[object] = []
    loop.append(loop)
    for wrong, message in (
        ({}, "the envelope has no actions"),
        (7, "the envelope has no actions; it is of <class 'int'>"),
        (None, "the envelope has no actions"),
        ("text", "the envelope has no actions"),
        ({**envelope(good), "actions": "text"}, "actions are a list, not <class 'str'>"),
        ({**envelope(good), "actions": b"text"}, "actions are a list"),
        ({**envelope(good), "actions": None}, "actions are a list"),
        ({**envelope(good), "message_id": 7}, "message_id of the envelope is text, not <class 'int'>"),
        ({"actions": [good], "message_id": ""}, "the envelope has no protocol_version"),
        (envelope(good, 7), r"actions\[1\] has no action_id"),
        (envelope(good, {**good, "action_type": None}), r"action_type of actions\[1\] is text"),
        (envelope(good, action("kv.pin", ttl_seconds=float("nan"))), r"actions\[1\].payload.ttl_seconds cannot be nan"),
        (envelope(good, action("kv.pin", session_id=2**64)), r"actions\[1\].payload.session_id cannot be 1844\d+616"),
        (envelope(good, action("kv.pin", session_id=10**5_000)), "a number of thousands of digits"),
        (envelope(good, action("kv.pin", session_id="\ud800")), "UTF-8"),
        (envelope(good, action("kv.pin", block_hashes=[object()])), r"block_hashes\[0\] cannot be of <class 'object'>"),
        (envelope(good, action("kv.pin", block_hashes=[b"12"])), r"payload.block_hashes\[0\] cannot be of <class 'bytes'>"),
        (envelope(good, action("kv.pin", block_hashes=loop)), "more than 16 levels"),
        (envelope(good, {**good, "payload": {1: 2}}), "a key that is not text: 1"),
        ({**envelope(good), "protocol_version": "2.0"}, "protocol_version .2.0. is not understood"),
        (envelope(*[good] * 257), "257 actions"),
    ):
        with pytest.raises(kvpool.InvalidArgument, match=message) as refused:
            hinted.hint(wrong)
        assert refused.value.kind in ("Malformed", "Version", "Actions") and refused.value.argument == "envelope"
    assert cached(hinted) == {1: BLOCKS}, "nothing was done"


def test_an_exception_of_an_attribute_propagates(hinted: kvpool.Pool) -> None:
    class Broken:
        @property
        def actions(self) -> list[object]:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        hinted.hint(Broken())


def test_limits() -> None:
    size = layout().bytes_per_block
    bounds = {"pinned_bytes": 2 * size, "session_bytes": 3 * size, "longest": 60}
    pool = kvpool.Pool(layout(), 20, prefix_cache=True, hints=bounds)
    run(pool, 1)
    told = hint(pool, "kv.pin", session_id=1, ttl_seconds=10)
    assert (told["outcome"], told["blocks"], told["limit"]) == ("clipped", 2, "pinned_bytes")
    told = hint(pool, "kv.retain", session_id=1, ttl_seconds=10)
    assert (told["outcome"], told["blocks"], told["limit"]) == ("clipped", 3, "session_bytes")
    kvpool.Pool(layout(), 20, prefix_cache=True, hints={})
    bounds = {"tenant_bytes": 2 * size}
    pool = kvpool.Pool(layout(), 20, prefix_cache=True, tenants={7: {}}, hints=bounds)
    run(pool, 1, tenant=7)
    told = hint(pool, "kv.retain", session_id=1, ttl_seconds=10)
    assert (told["outcome"], told["blocks"], told["limit"]) == ("clipped", 2, "tenant_bytes")
    run(pool, 2, tenant=7)
    told = hint(pool, "kv.pin", session_id=2, ttl_seconds=10)
    assert (told["outcome"], told["reason"]) == ("rejected", "tenant")
    for limits, message in (
        ({"colour": 1}, "hints have no limit 'colour'; there are pinned_bytes, session_bytes, tenant_bytes and longest"),
        ({7: 1}, "hints have no limit 7"),
        ("yes", "hints are True, False or a mapping with limits, not 'yes'"),
        (1, "hints are True, False or a mapping"),
        ({"pinned_bytes": 21 * size}, "pinned_bytes"),
        ({"longest": 0}, "longest"),
        ({"tenant_bytes": 0}, "tenant_bytes"),
    ):
        with pytest.raises(kvpool.BuildError, match=message):
            kvpool.Pool(layout(), 20, prefix_cache=True, hints=limits)
    for limits in ({"pinned_bytes": -1}, {"session_bytes": True}, {"longest": -1}, {"longest": float("inf")}):
        with pytest.raises(kvpool.InvalidArgument):
            kvpool.Pool(layout(), 20, prefix_cache=True, hints=limits)
    with pytest.raises(kvpool.BuildError, match="prefix_cache"):
        kvpool.Pool(layout(), 20, hints=True)


def test_a_pool_without_hints(pool: kvpool.Pool) -> None:
    run(pool, 1)
    told = hint(pool, "kv.retain", session_id=1)
    assert (told["outcome"], told["reason"]) == ("rejected", "disabled") and pool.sessions() == []
    kvpool.Pool(layout(), 10, hints=False)
    pool.close()
    with pytest.raises(kvpool.Closed):
        pool.sessions()
    with pytest.raises(kvpool.Closed):
        pool.hint(envelope())


def test_a_retention_ends(hinted: kvpool.Pool) -> None:
    run(hinted, 1)
    run(hinted, 2)
    assert hint(hinted, "kv.retain", session_id=1, ttl_seconds=0.05)["outcome"] == "accepted"
    time.sleep(0.1)
    evict(hinted, BLOCKS)
    assert cached(hinted) == {1: 0, 2: BLOCKS}
