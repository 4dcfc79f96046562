"""Cases of kvpool in vLLM's offloading, run in vLLM's environment by `test_vllm.py`."""

import inspect
import random
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.manager import CPUPrimaryTierOffloadingManager, TieringOffloadingManager

import kvpool
from kvpool._drift import EngineChanged
from kvpool.errors import InvalidArgument
from kvpool.vllm.offload import KvpoolOffloadingManager, KvpoolOffloadingSpec

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from cache_node import CacheNode

CHUNK_BYTES = 512
WAIT = 30.0


def keys_of(*numbers: int) -> list:
    return [make_offload_key(number.to_bytes(32, "big"), 0) for number in numbers]


def context_of(name: str, keys: list) -> ReqContext:
    context = ReqContext(req_id=name)
    for index, key in enumerate(keys):
        context.set_offload_key_position(key, (index + 1) * 64)
    return context


def store(manager, name: str, *numbers: int, finish: bool = True):
    keys = keys_of(*numbers)
    context = context_of(name, keys)
    manager.on_new_request(context)
    stored = manager.prepare_store(keys, context)
    if stored is not None:
        manager.complete_store(stored.keys_to_store, context)
    if finish:
        manager.on_request_finished(context)
    return stored


# --- places ---


def test_a_store_that_fits_beside_its_own_chunks_is_not_refused() -> None:
    """Chunks of the offer itself cannot be evicted ahead of it."""
    for policy in ("lru", "arc"):
        manager = KvpoolOffloadingManager(128, policy)
        assert store(manager, "a", *range(127)) is not None
        # One chunk is free, all others are of the offer: nothing needs to go.
        again = store(manager, "b", *range(127), 200)
        assert again is not None and again.evicted_keys == [], policy
        # One must go, and one that may.
        again = store(manager, "c", *range(127), 300)
        assert again is not None and again.evicted_keys == keys_of(200), policy
        assert store(manager, "d", *range(127), 400, 401) is None
        assert manager.frames.used == manager._num_allocated_chunks == 128


@pytest.mark.parametrize("policy", ["lru", "arc"])
def test_a_store_is_refused_where_vllms_manager_refuses_it(policy: str) -> None:
    """Whatever is offered, held or stored: kvpool evicts ahead, and refuses nothing for it."""
    dice = random.Random(11)
    refused = evicted = 0
    for _ in range(60):
        chunks = dice.choice((16, 64, 200))
        ours = KvpoolOffloadingManager(chunks, policy)
        for number in range(40):
            offer = keys_of(*dice.sample(range(2 * chunks), dice.randrange(1, chunks + 1)))
            context = context_of(f"{number}", offer)
            ours.on_new_request(context)
            there = [key for key in offer if ours._policy.get(key) is not None]
            room = chunks - ours._num_allocated_chunks + ours._num_evictable_cache_chunks
            room -= sum(ours._policy.get(key).ref_cnt == 0 for key in there)
            stored = ours.prepare_store(offer, context)
            assert (stored is not None) == (len(offer) - len(there) <= room)
            refused += stored is None
            if stored is not None:
                evicted += len(stored.evicted_keys)
                ours.complete_store(stored.keys_to_store, context, success=dice.random() < 0.9)
            if there and dice.random() < 0.3:
                there = [key for key in there if ours.lookup(key, context) is LookupResult.HIT]
                ours.prepare_load(there, context)
                if dice.random() < 0.9:
                    ours.complete_load(there, context)
            if dice.random() < 0.9:
                ours.on_request_finished(context)
            assert ours.frames.used == ours._num_allocated_chunks
    assert refused > 50 and evicted > 1000


# --- drift ---


def _overrides(ours: type, stock: type) -> list[str]:
    return [name for name, method in vars(ours).items() if inspect.isfunction(method) and hasattr(stock, name)]


def reload(name: str) -> None:
    module = sys.modules.pop(name)
    try:
        __import__(name)
    finally:
        sys.modules[name] = module


def modules() -> list[tuple[str, type, type]]:
    import kvpool.vllm.compaction as compaction
    import kvpool.vllm.plugin as plugin
    import kvpool.vllm.tier as tier
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
    from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

    return [
        ("kvpool.vllm.offload", KvpoolOffloadingManager, CPUOffloadingManager),
        ("kvpool.vllm.offload", KvpoolOffloadingSpec, CPUOffloadingSpec),
        ("kvpool.vllm.tier", tier.KvpoolTier, SecondaryTierManager),
        ("kvpool.vllm.tier", tier._Lookups, AsyncLookupManager),
        ("kvpool.vllm.compaction", compaction._Compacting, Scheduler),
        ("kvpool.vllm.plugin", plugin.BlockPool, plugin._STOCK_POOL),
        ("kvpool.vllm.plugin", plugin.FreeQueue, plugin._STOCK_QUEUE),
    ]


def check_again(name: str) -> None:
    if name.endswith(".plugin"):
        sys.modules[name].check()
    else:
        reload(name)


@pytest.mark.parametrize("number", range(7))
def test_every_override_is_checked_by_name(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    name, ours, stock = modules()[number]
    names = [each for each in _overrides(ours, stock) if each != "__init__"]
    assert names
    for method in names:
        if method not in vars(stock):
            continue  # Inherited by vLLM's class, and so by ours.
        with monkeypatch.context() as patch:
            patch.setattr(stock, method, lambda self, changed, *, now=None: None)
            with pytest.raises(EngineChanged, match=method):
                check_again(name)
        with monkeypatch.context() as patch:
            patch.setattr(stock, "_renamed", vars(stock)[method], raising=False)
            patch.delattr(stock, method)
            if not hasattr(stock, method):
                with pytest.raises(EngineChanged, match=f"{method} is missing"):
                    check_again(name)
    check_again(name)


def test_attributes_of_the_manager_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    stock = CPUOffloadingManager.__init__

    def changed(self, *args, **kwargs):
        stock(self, *args, **kwargs)
        self._pages_in_use = self.__dict__.pop("_num_allocated_chunks")

    monkeypatch.setattr(CPUOffloadingManager, "__init__", changed)
    with pytest.raises(EngineChanged, match="_num_allocated_chunks is missing"):
        KvpoolOffloadingManager(10)


# --- a node as a secondary tier ---


class Engine:
    """vLLM's tiering over memory of its own, with kvpool's tier. The worker is this class."""

    def __init__(self, node: CacheNode, chunks: int = 32, model: str = "model", **settings: object) -> None:
        self.memory = np.zeros((chunks, CHUNK_BYTES), np.int8)
        region = SimpleNamespace(create_kv_memoryview=lambda: memoryview(self.memory), cleanup=lambda: None)
        primary = CPUPrimaryTierOffloadingManager(chunks, region)
        parallel = SimpleNamespace(tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=True)
        config = SimpleNamespace(
            groups=[SimpleNamespace(tokens_per_block=16, layer_names=["a", "b"])],
            parallel=parallel,
            canonical_layout=False,
            replicated_layout=False,
            model=SimpleNamespace(name=model, dtype="bfloat16"),
            cache=SimpleNamespace(tokens_per_hash=16),
        )
        described = {
            "type": "KvpoolTier", "module_path": "kvpool.vllm.tier", "peer": "cache", "address": node.address,
            "namespace": "tests", "lookup_timeout": WAIT, "load_timeout": WAIT, "store_timeout": WAIT, "patience": WAIT,
            "rest": 0.05,
        }
        self.tier = SecondaryTierFactory.create_secondary_tier(
            described | settings, primary.get_kv_memoryview(), SimpleNamespace(config=config, blocks_per_chunk=4)
        )
        self.manager = TieringOffloadingManager(primary, [self.tier])
        self.requests = 0

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=(), preempted_req_ids=()))

    def begin(self, keys: list) -> ReqContext:
        self.requests += 1
        context = context_of(f"{self.requests}", keys)
        self.manager.on_new_request(context)
        return context

    def end(self, context: ReqContext) -> None:
        self.manager.on_request_finished(context)
        self.step()

    def write(self, *numbers: int) -> None:
        """A request that computes chunks, and stores them in all tiers."""
        keys = keys_of(*numbers)
        context = self.begin(keys)
        stored = self.manager.prepare_store(keys, context)
        if stored is None or not stored.keys_to_store:
            return self.end(context)
        for key, chunk in zip(stored.keys_to_store, stored.store_spec.chunk_ids):
            self.memory[chunk] = content(key)
        self.manager.complete_store(stored.keys_to_store, context)
        self.end(context)

    def read(self, *numbers: int) -> list[int]:
        """A request that loads what is there. Returns the numbers of the chunks that it found."""
        keys = keys_of(*numbers)
        context = self.begin(keys)
        end = time.monotonic() + WAIT
        while True:
            results = [self.manager.lookup(key, context) for key in keys]
            if not {LookupResult.RETRY, LookupResult.HIT_PENDING} & set(results):
                break
            assert time.monotonic() < end, results
            self.step()
            time.sleep(0.002)
        found = [key for key, result in zip(keys, results) if result is LookupResult.HIT]
        if found:
            chunks = self.manager.prepare_load(found, context).chunk_ids
            for key, chunk in zip(found, chunks):
                assert (self.memory[chunk] == content(key)).all(), "wrong bytes"
            self.manager.complete_load(found, context)
        self.end(context)
        return [number for number, key in zip(numbers, keys) if key in found]

    def settle(self) -> None:
        """Waits for all jobs."""
        until(lambda: (self.step(), not self.manager._jobs)[1])

    def close(self) -> None:
        self.manager.shutdown()


def flush_reset(manager: TieringOffloadingManager) -> None:
    """Ends a reset, which takes two calls from vLLM 0.33 on."""
    getattr(manager, "on_reset_flushed", lambda: None)()


def content(key: bytes) -> np.ndarray:
    return np.frombuffer(np.random.default_rng(list(key)).bytes(CHUNK_BYTES), np.int8)


def until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not what():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.fixture
def node() -> Iterator[CacheNode]:
    with CacheNode(CHUNK_BYTES) as node:
        yield node


@pytest.fixture
def engine(node: CacheNode) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(**settings: object) -> Engine:
        engines.append(Engine(node, **settings))
        # The link is up once a value was stored.
        until(lambda: (engines[-1].write(10**6 + len(engines), time.monotonic_ns() % 10**9),
                       engines[-1].settle(), engines[-1].tier._tier.stats().stored > 0)[2])
        return engines[-1]

    yield make
    for each in engines:
        each.close()


def test_the_link_comes_from_settings(engine: Callable[..., Engine], node: CacheNode) -> None:
    no_link: dict[str, object] = {"peer": None, "address": None}
    settings = {"peers": {"cache": node.address}, "admin": "127.0.0.1:0"}
    one, other = engine(), engine(settings=settings, **no_link)
    one.write(*range(5))
    one.settle()
    assert other.read(*range(6)) == list(range(5))
    with pytest.raises(InvalidArgument, match="or all by settings"):
        engine(settings=settings)
    with pytest.raises(InvalidArgument, match="or all by settings"):
        engine(**no_link)
    with pytest.raises(InvalidArgument, match="there is no key `peer`; did you mean `peers`"):
        engine(settings={"peer": "x"}, **no_link)


def test_chunks_of_one_engine_are_hits_in_another(engine: Callable[..., Engine]) -> None:
    one, other, stranger = engine(), engine(), engine(model="another model")
    one.write(*range(12))
    one.settle()
    assert other.read(*range(14)) == list(range(12))
    assert stranger.read(*range(12)) == []
    # From its own memory now.
    before = other.tier._tier.stats().hits
    assert other.read(*range(12)) == list(range(12)) and other.tier._tier.stats().hits == before
    # More than its memory has room for, over many requests.
    dice = random.Random(2)
    for _ in range(30):
        first = dice.randrange(40)
        other.write(*range(first, first + 6))
        one.read(*range(first, first + 6))
    for each in (one, other):
        each.settle()
        each.manager.reset_cache()
        flush_reset(each.manager)
        assert each.read(0, 1, 2) in ([0, 1, 2], [0, 1], [0], [])


def test_a_node_that_is_killed_costs_hits_alone_and_serves_again(node: CacheNode, engine: Callable[..., Engine]) -> None:
    one, other = (engine(lookup_timeout=0.5, patience=0.5, window=window) for window in (64, 4))
    until(lambda: (one.write(*range(8)), one.settle(), other.read(0, 1) == [0, 1])[2])
    node.kill()
    assert other.read(6, 7) == []
    one.write(20, 21)
    one.settle()
    assert one.read(20, 21) == [20, 21], "from its own memory"
    node.start()
    until(lambda: (one.write(time.monotonic_ns() % 10**9), one.settle(), node.ask() > 0)[2])
    one.write(*range(30, 36))
    one.settle()
    until(lambda: other.read(*range(30, 36)) == list(range(30, 36)))


def test_a_node_that_hangs_holds_no_step_up(node: CacheNode, engine: Callable[..., Engine]) -> None:
    one = engine()
    slow = engine(lookup_timeout=0.5, load_timeout=0.5, store_timeout=0.5, patience=0.5)
    one.write(*range(8))
    one.settle()
    node.stop()
    assert slow.read(*range(8)) == []
    slow.write(50, 51)
    slow.settle()
    assert slow.read(50, 51) == [50, 51]
    node.resume()
    until(lambda: slow.read(*range(8)) == list(range(8)))


def test_damaged_chunks_are_misses(node: CacheNode, engine: Callable[..., Engine]) -> None:
    one, other = engine(), engine()
    one.write(*range(8))
    one.settle()
    node.ask("damage")
    assert other.read(*range(8)) == []
    assert other.tier._tier.stats().bad_values == node.ask("damaged") == 8
    # They are computed and stored, and not found behind the damaged ones.
    other.write(*range(8))
    other.settle()
    assert other.read(*range(8)) == list(range(8))


def test_a_chunk_that_is_lost_between_lookup_and_load_is_a_miss(engine: Callable[..., Engine], monkeypatch) -> None:
    one, other = engine(), engine()
    one.write(0, 1, 2, 3)
    one.settle()
    get = kvpool.Tier.get
    lost = keys_of(1, 3)

    class Forgetful:
        def __init__(self, tier: kvpool.Tier) -> None:
            self.tier = tier

        def __getattr__(self, name: str) -> object:
            return getattr(self.tier, name)

        def get(self, keys: list, buffers: list, *, timeout: float) -> SimpleNamespace:
            kept = [(key, buffer) for key, buffer in zip(keys, buffers) if key not in lost]
            words = dict(zip((key for key, _ in kept), get(self.tier, *map(list, zip(*kept)), timeout=timeout).wait()))
            return SimpleNamespace(wait=lambda: [words.get(key, "miss") for key in keys])

    other.tier._tier = Forgetful(other.tier._tier)
    assert other.read(0, 1, 2, 3) == [0, 2]


def test_a_reset_waits_for_jobs(engine: Callable[..., Engine]) -> None:
    one = engine()
    for number in range(12):
        one.write(number * 10, number * 10 + 1)
    one.manager.reset_cache()
    assert not one.manager._jobs
    flush_reset(one.manager)
    assert one.read(0, 1) == [0, 1]


def test_bad_settings_are_refused_by_name(node: CacheNode, tmp_path: Path) -> None:
    for settings, error, why in (
        ({"peers": "x"}, TypeError, "peers"),
        ({"address": "nowhere"}, kvpool.InvalidArgument, "neither host:port nor unix:/path"),
        ({"token_file": str(tmp_path / "none")}, FileNotFoundError, "none"),
        ({"tls_cert": "x"}, kvpool.InvalidArgument, "tls_cert, tls_key and tls_ca belong together"),
        ({"locality": "near"}, ValueError, "near"),
        ({"window": 0}, kvpool.KvPoolError, ""),
    ):
        with pytest.raises(error, match=why):
            Engine(node, **settings)
