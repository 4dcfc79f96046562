"""Numbers out of range, in every parameter of the public interface that takes one.

The stubs say which these are.
"""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kvpool
import numpy as np
import pytest
from conftest import layout

STUBS = Path(kvpool.__file__).with_name("_kvpool.pyi")

# Python takes True and False for numbers; here they are mistakes.
NOT_NATURAL = [-1, -(2**70), 2**64, 10**5000, True, False, np.int64(-1)]
NOT_REAL = [float("nan"), float("-inf"), -0.5, -1, True, 10**400]
NO_NUMBER = ["1", b"1", [1], object(), np.bool_(True)]
# In the range of the type, and of no pool.
HUGE = [2**64 - 1, 2**63 - 1, 2**62, 2**40, np.uint64(2**64 - 1)]


def number_parameters() -> Iterator[tuple[str, str, str, str]]:
    """Class, method, name and type of each parameter that is a number."""
    for node in ast.parse(STUBS.read_text()).body:
        for method in node.body if isinstance(node, ast.ClassDef) else []:
            if not isinstance(method, ast.FunctionDef):
                continue
            for argument in itertools.chain(method.args.args, method.args.kwonlyargs):
                kinds = ast.unparse(argument.annotation).split(" | ") if argument.annotation else []
                for kind in {"int", "float"}.intersection(kinds):
                    yield node.name, method.name, argument.arg, kind


PARAMETERS = list(number_parameters())
INTEGERS = [parameter[:3] for parameter in PARAMETERS if parameter[3] == "int"]
FLOATS = [parameter[:3] for parameter in PARAMETERS if parameter[3] == "float"]


class World:
    """An object of each class, and valid arguments."""

    def __init__(self) -> None:
        self.pool = kvpool.Pool(layout(), 20, blocks_max=40, prefix_cache=True)
        self.sequence = self.pool.sequence(1, range(9))
        self.batch = self.pool.begin_batch()
        self.batch.append(self.sequence, 6)
        self.lease = self.pool.try_allocate(2)
        self.table = kvpool.BlockTable()
        self.batch.block_table([self.sequence], self.table)
        self.groups = kvpool.LayerGroups([kvpool.LayerCache(bytes=64), kvpool.LayerCache(bytes=64, window=20)])
        self.layered = kvpool.Pool.layered(self.groups, blocks=20)
        self.grouped = self.layered.try_admit_grouped(1, range(9))
        self.step = self.layered.begin_batch()
        self.step.append_grouped([self.grouped], [6])
        self.frames = kvpool.FramePool(20, frames_max=40)
        self.frames.allocate(3)
        self.objects = {
            "Admin": kvpool.Admin.from_settings(self.frames, {"admin": "off"}).wait(),
            "Batch": self.batch,
            "BlockTable": self.table,
            "EvictionOrder": kvpool.EvictionOrder(8),
            "Events": self.pool.prefix_cache.events(),
            "FramePool": self.frames,
            "GroupedSequence": self.grouped,
            "LayerGroups": self.groups,
            "Layout": kvpool.Layout,
            "Lease": self.lease,
            "Pool": self.pool,
            "PrefixCache": self.pool.prefix_cache,
            "Sequence": self.sequence,
            "Tier": kvpool.Tier.in_process(1 << 20, value_bytes=64, namespace="test"),
            "Tensor": self.pool.plane(0),
        }

    def argument(self, owner: str, method: str, name: str) -> Any:
        """A valid argument of a parameter without a default."""
        match owner, method, name:
            case "FramePool", "allocate_into", "frames":
                return np.zeros(2, np.uint32)
            case "FramePool", "register", "frames":
                return [1]
            case "FramePool", _, "frames":
                return 4
            case "EvictionOrder", "use", "keys":
                return [(b"x", 0)]
            case "LayerGroups", _, "layers":
                return [kvpool.LayerCache(bytes=64)]
            case ("Batch", "draft_grouped", "sequence") | ("Pool", "reserve_grouped", "sequence"):
                return self.grouped
            case "Admin", _, "pool":
                return self.frames
            case "Admin", _, "settings":
                return {"admin": "off"}
            case "Tier", "get", "buffers":
                return [bytearray(64)]
        return {
            "address": "127.0.0.1:9",
            "at": 1,
            "blocks": 1,
            "blocks_max": 8,
            "buffers": [bytes(64)],
            "bytes_max": 1 << 20,
            "config": Path(__file__).parents[3] / "tests" / "configs" / "gpt-oss-120b.json",
            "count": 1,
            "end": 2,
            "first": 1,
            "frame": 1,
            "groups": self.groups,
            "hash": b"x",
            "hashes": [b"x"],
            "head_dim": 8,
            "id": 7,
            "k": np.zeros((1, 2, 8), np.float32),
            "indices": np.zeros(20, np.int32),
            "indptr": np.zeros(20, np.int32),
            "keep": 2,
            "key": b"x",
            "keys": [b"x"],
            "last_page_len": np.zeros(20, np.int32),
            "layer": 0,
            "layers": 1,
            "layout": layout(),
            "length": 6,
            "list": 0,
            "memory": 1 << 20,
            "moves_max": 1,
            "name": "qwen2.5-0.5b",
            "namespace": "test",
            "out": np.zeros(20, np.int64),
            "owner": self.lease,
            "peer": "cache",
            "place": 0,
            "prompt": [1, 2],
            "ratio": 1,
            "request": 1,
            "reused": set(),
            "row": 0,
            "sequence": self.sequence,
            "sequences": [self.grouped],
            "settings": {"peers": {"cache": "127.0.0.1:9"}},
            "source": 1,
            "start": 0,
            "starts": [0],
            "stop": 1,
            "stops": [1],
            "tenant": 7,
            "target": 2 if owner == "FramePool" else self.pool,
            "ticket": 0,
            "tokens": 1,
            "total": 7,
            "value_bytes": 64,
            "values": 4,
        }[name]

    def call(self, owner: str, method: str, name: str, value: object) -> object:
        """Calls a method with valid arguments but one. What must be awaited is closed."""
        function: Callable[..., Any]
        of = self.step if method in ("draft_grouped", "csr_table_grouped", "entry_mapping") else self.objects.get(owner)
        of = self.layered if method == "reserve_grouped" else of
        function = getattr(kvpool, owner) if method == "__new__" else getattr(of, method)
        arguments = {
            parameter.name: self.argument(owner, method, parameter.name)
            for parameter in inspect.signature(function).parameters.values()
            if parameter.default is parameter.empty and parameter.name != name
        }
        outcome = function(**arguments, **{name: value})
        if isinstance(outcome, kvpool.Call):
            outcome.close()
        return outcome


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize(("owner", "method", "name"), INTEGERS)
def test_integers_out_of_range(world: World, owner: str, method: str, name: str) -> None:
    for value in NOT_NATURAL:
        with pytest.raises(kvpool.InvalidArgument, match="cannot be .*; it is from 0 to [0-9]+"):
            world.call(owner, method, name, value)
    for value in NO_NUMBER:
        with pytest.raises(TypeError):
            world.call(owner, method, name, value)
    for value in HUGE:
        try:
            world.call(owner, method, name, value)
        except kvpool.KvPoolError:
            pass


@pytest.mark.parametrize(("owner", "method", "name"), [case for case in FLOATS if case[0] != "Node"])
def test_times_and_shares_out_of_range(world: World, owner: str, method: str, name: str) -> None:
    for value in NOT_REAL:
        with pytest.raises(kvpool.InvalidArgument, match="a (time|share) cannot be"):
            world.call(owner, method, name, value)
    for value in ("1", b"1", [1], object()):
        with pytest.raises(TypeError):
            world.call(owner, method, name, value)
    for value in (0, 0.5, 1e18):
        try:
            outcome = world.call(owner, method, name, value)
            if isinstance(outcome, kvpool.Defragmenter):
                outcome.stop().wait()
        except kvpool.KvPoolError:
            pass


def test_shares_are_parts_of_one(world: World) -> None:
    with pytest.raises(kvpool.InvalidArgument, match="a share cannot be 1.5; it is from 0 to 1"):
        world.pool.start_defragmenter(threshold=1.5)
    for threshold in (0, 1, np.float32(0.5)):
        world.pool.start_defragmenter(threshold=threshold).stop().wait()


def test_numpy_integers_are_integers(world: World) -> None:
    for kind in (np.int8, np.int64, np.uint32, np.uint64):
        with world.pool.try_allocate(kind(3)) as lease:
            assert len(lease) == 3
        assert len(world.frames.allocate(kind(2))) == 2


def test_versions_of_dlpack_and_devices(world: World) -> None:
    plane = world.pool.plane(0)
    for version in [(-1, 0), (1, 2**64), (2**32, 0), (True, 0)]:
        with pytest.raises(kvpool.InvalidArgument, match="a version cannot be"):
            plane.__dlpack__(max_version=version)
    for device in [(-1, 0), (2**64, 0), (1, 2**64), (1, 0, 0)]:
        with pytest.raises(BufferError, match="exported there only"):
            plane.__dlpack__(dl_device=device)


def test_lists_of_numbers(world: World) -> None:
    for wrong in (-1, 2**32, 2**64, 10**5000, True, np.int64(-1)):
        with pytest.raises(kvpool.InvalidArgument, match="entry 1") as refused:
            world.pool.sequence(5, [1, wrong])
        assert refused.value.index == 1
        for take in (world.frames.free, world.frames.share, world.frames.references, world.frames.keep, world.frames.claim):
            with pytest.raises(kvpool.InvalidArgument, match="entry 1.* is no frame number"):
                take([1, wrong])
    for frames in (np.zeros((2, 2), np.uint32), np.zeros((1, 0), np.uint32)):
        with pytest.raises(kvpool.BufferRefused, match="they have one dimension"):
            world.frames.free(frames)
    with pytest.raises(kvpool.InvalidArgument, match="entry 0"):
        world.frames.free(np.zeros(2, np.float32))


def test_keys_have_their_length() -> None:
    for key in (b"", b"short", bytes(33)):
        for make in (lambda: kvpool.FramePool(4, hash_key=key), lambda: kvpool.Pool(layout(), 4, prefix_cache=True, hash_key=key)):
            with pytest.raises(kvpool.InvalidArgument, match=f"the hash key has {len(key)} bytes; it has 32"):
                make()
    with pytest.raises(TypeError):
        kvpool.FramePool(4, hash_key=[0] * 32)
