"""Nodes with the services of `kvpool serve`, from its settings."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kvpool
import pytest
from cache_node import CacheNode
from conftest import TOKENS, layout

WAIT = 30.0  # The longest time of any step: the machine may be busy.
SECRET = "one-secret-of-the-tests"


def until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def free_ports(count: int) -> list[int]:
    servers = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(server.getsockname()[1]) for server in servers]
    for server in servers:
        server.close()
    return ports


def get(node: kvpool.Node, path: str, token: str = SECRET) -> str:
    assert node.admin_address is not None
    request = urllib.request.Request(f"{node.admin_address}{path}", headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=WAIT) as answer:
        return str(answer.read().decode())


def secret(folder: Path, text: str = SECRET) -> Path:
    file = folder / "token"
    file.write_text(text + "\n")
    file.chmod(0o600)
    return file


def own(folder: Path, name: str, **more: object) -> dict[str, object]:
    """Settings of a node that is reached over the loopback, with a free port each."""
    return {"name": name, "admin": "127.0.0.1:0", "listen": "127.0.0.1:0", "token_file": secret(folder)} | more


def pool(settings: dict[str, object], blocks: int = 100) -> kvpool.Pool:
    return kvpool.Pool(layout(), blocks, prefix_cache=True, hash_key=kvpool.Node.hash_key(settings))


def start(pool: kvpool.Pool, settings: Any) -> kvpool.Node:
    return kvpool.Node.from_settings(pool, settings).wait()


def cache(pool: kvpool.Pool, number: int, tokens: range) -> None:
    sequence = pool.sequence(number, tokens)
    with pool.begin_batch() as batch:
        batch.append(sequence, len(tokens))
    sequence.close()


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[str]:
    if shutil.which("redis-server") is None:
        pytest.skip("there is no redis-server")
    path = tmp_path / "redis"
    options = ["--port", "0", "--unixsocket", str(path), "--save", "", "--dir", str(tmp_path)]
    server = subprocess.Popen(["redis-server", *options], stdout=subprocess.DEVNULL)
    until(path.exists)
    yield f"redis+unix://{path}"
    server.kill()
    server.wait()


def test_the_admin_interface_has_the_page_and_the_metrics(tmp_path: Path) -> None:
    settings = own(tmp_path, "a")
    ours = pool(settings)
    node = start(ours, settings)
    assert node.health() == {"node": "a", "state": "ok", "ready": True, "reasons": []}
    assert "<html" in get(node, "/") and json.loads(get(node, "/stats"))["total"] == 100
    assert "kvpool_blocks" in get(node, "/metrics") and 'kvpool_serving' in get(node, "/metrics")
    assert json.loads(get(node, "/healthz"))["state"] == "ok"
    with pytest.raises(urllib.error.HTTPError, match="401"):
        get(node, "/stats", "another-secret-of-the-tests")
    assert node.shutdown().wait()
    with pytest.raises(kvpool.errors.Closed):
        node.health()


def test_a_hint_prefetches_from_the_tier(tmp_path: Path, redis: str) -> None:
    settings = own(tmp_path, "a", tier=redis, tier_namespace="tests")
    ours = kvpool.Pool(layout(), 100, prefix_cache=True, hints=True, hash_key=kvpool.Node.hash_key(settings))
    node = start(ours, settings)
    prompt = range(8 * TOKENS)
    with ours.try_admit(1, prompt, session=7) as sequence, ours.begin_batch() as batch:
        batch.append(sequence, len(prompt))
    until(lambda: node.services().wait()["tiers"]["redis"]["pool"]["stored_blocks"] == 8)
    assert ours.prefix_cache is not None and ours.prefix_cache.evict() == 8
    kinds = ("kv.prefetch", "kv.sing")
    actions = [{"action_id": kind, "action_type": kind, "action_version": "1.0", "payload": {"session_id": 7}} for kind in kinds]
    envelope = {"protocol_version": "1.0", "message_id": "m", "actions": actions}
    answer = node.hint(envelope).wait()
    assert [told["outcome"] for told in answer["outcomes"]] == ["deferred", "rejected"], answer
    until(lambda: len(ours.sequence(2, prompt)) == 7 * TOKENS)
    with pytest.raises(kvpool.InvalidArgument, match="no actions"):
        node.hint({"protocol_version": "1.0", "message_id": "m"})
    with pytest.raises(kvpool.InvalidArgument, match="^protocol_version") as refused:
        node.hint(envelope | {"protocol_version": "9.0"})
    assert refused.value.kind == "Version"
    assert node.shutdown().wait()
    with pytest.raises(kvpool.errors.Closed):
        node.hint(envelope)


def test_prefixes_come_from_the_tier_of_another_node(tmp_path: Path, redis: str) -> None:
    shared = {"tier": redis, "tier_namespace": "tests"}
    settings = [own(tmp_path, name, **shared) for name in "ab"]
    (first, a), (second, b) = [(ours := pool(of), start(ours, of)) for of in settings]
    cache(first, 1, range(8 * TOKENS))
    until(lambda: a.services().wait()["tiers"]["redis"]["pool"]["stored_blocks"] == 8)
    assert b.bring_back(range(8 * TOKENS), timeout=WAIT).wait() == 8
    sequence = second.sequence(2, range(8 * TOKENS))
    assert len(sequence) == 7 * TOKENS  # the last token is computed
    assert b.services().wait()["tiers"]["redis"]["pool"]["fetched_blocks"] == 8
    assert 'kvpool_tier' in get(b, "/metrics")
    assert b.bring_back(range(1000, 1100)).wait() == 0
    for node in (a, b):
        assert node.shutdown().wait()


def test_a_tier_that_is_gone_is_said_in_log_and_services(
    tmp_path: Path, redis: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = own(tmp_path, "a", tier=f"{redis}-gone", tier_namespace="tests", tier_patience="100ms")
    ours = pool(settings)
    node = start(ours, settings)
    with caplog.at_level(logging.WARNING, "kvpool"):
        cache(ours, 1, range(2 * TOKENS))
        until(lambda: node.services().wait()["tiers"]["redis"]["failures"] > 0)
        assert node.services().wait()["tiers"]["redis"]["last_error"]
        until(lambda: any("a service fails" in record.message for record in caplog.records))
    record = next(record for record in caplog.records if "a service fails" in record.message)
    assert record.name.startswith("kvpool.node") and "name: redis" in record.message
    node.close()


def test_events_are_published(tmp_path: Path) -> None:
    settings = own(tmp_path, "a", kv_events="tcp://127.0.0.1:0", kv_events_replay="tcp://127.0.0.1:0")
    ours = pool(settings)
    node = start(ours, settings)
    events, replay = node.event_addresses
    for address in (events, replay):
        host, port = address.removeprefix("tcp://").split(":")
        with socket.create_connection((host, int(port)), timeout=WAIT) as client:
            assert client.recv(1) == b"\xff"  # the greeting of ZMTP
    cache(ours, 1, range(2 * TOKENS))
    until(lambda: node.services().wait()["kv_events"]["publisher"]["batches"] > 1)
    assert node.shutdown().wait()


def test_sequences_move_and_peers_are_reloaded(tmp_path: Path) -> None:
    settings = own(tmp_path, "b")
    second = pool(settings)
    b = start(second, settings)
    file = tmp_path / "kvpool.toml"
    text = f'name = "a"\nadmin = "127.0.0.1:0"\nlisten = "127.0.0.1:0"\ntoken_file = "{tmp_path}/token"\n'
    file.write_text(text)
    first = kvpool.Pool(layout(), 100, prefix_cache=True, hash_key=kvpool.Node.hash_key(file))
    a = start(first, file)
    assert a.reload().wait() == "changes of peers: none"
    file.write_text(text + f'doubt_limit = "1min"\n[peers]\nb = "{b.addresses[0]}"\n')
    changes = a.reload().wait()
    assert changes == f"changes of peers: +b={b.addresses[0]}; changes that need a restart: doubt_limit"
    until(lambda: a.peers().wait().get("b", False))

    async def move() -> None:
        sequence = first.sequence(7, range(3 * TOKENS))
        with first.begin_batch() as batch:
            batch.append(sequence, 3 * TOKENS)
        await first.migrate(sequence, "b")
        arrived, peer = await anext(b)
        assert (peer, arrived.id, len(arrived)) == ("a", 7, 3 * TOKENS)
        arrived.close()

    asyncio.run(move())
    # What is refused changes nothing.
    file.write_text(text + "nam = 1\n")
    with pytest.raises(kvpool.errors.InvalidArgument, match="kvpool.toml:5: there is no key `nam`"):
        a.reload().wait()
    assert a.peers().wait() == {"b": True}
    # Other settings than those of the start, with another token.
    other = own(tmp_path, "a")
    secret(tmp_path, "another-secret-of-the-tests")
    with pytest.raises(kvpool.errors.NodeError, match="^tls_cert: cannot read /nowhere/cert"):
        a.reload(other | {"tls_cert": "/nowhere/cert", "tls_key": "/nowhere/key"}).wait()
    assert "other tokens" in a.reload(other).wait()
    assert get(a, "/stats", "another-secret-of-the-tests")
    for node in (a, b):
        assert node.shutdown().wait()


@pytest.mark.parametrize(
    ("more", "setting", "message"),
    [
        ({"admn": "off"}, "admn", "settings:5: there is no key `admn`; did you mean `admin`?"),
        ({"admin": 7}, "admin", 'admin = "7": a port is missing; accepted: IP:PORT'),
        ({"admin": True}, "admin", "settings:2: admin: a boolean; accepted: IP:PORT"),
        ({"admin": None}, "admin", "admin: a value cannot be of type"),
        ({"peers": {"b": 1}}, "peers", "settings:5: peers: the address of b is no text"),
        ({"tier": ["redis://u:secretpw@h:1/0"]}, "tier", "settings:5: tier: a list; accepted"),
        ({"tier": "redis://127.0.0.1:1"}, "tier", "tier needs tier_namespace as well"),
        ({"size": 100}, "size", "size is a setting of `kvpool serve` alone: the engine has its own pool"),
        ({"load": "conversations"}, "load", "load is a setting of `kvpool serve` alone"),
        ({"log_level": "warn"}, "log_level", "log_level is a setting of `kvpool serve` alone"),
        ({"migrate_below": 100, "migrate_to": "b", "peers": ["b=localhost:1"]}, "migrate_below", "the pool has 100"),
        ({"token_file": "/nowhere/token"}, None, "cannot read the token's file /nowhere/token"),
    ],
)
def test_bad_settings_are_named(tmp_path: Path, more: dict[str, object], setting: str | None, message: str) -> None:
    with pytest.raises(kvpool.errors.InvalidArgument, match=message) as refused:
        start(kvpool.Pool(layout(), 100, prefix_cache=True), own(tmp_path, "a") | more)
    assert refused.value.setting == setting
    assert "secretpw" not in str(refused.value)


def test_what_cannot_start_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    settings = own(tmp_path, "a")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for key, address in [("admin", f"127.0.0.1:{port}"), ("listen", f"127.0.0.1:{port}"), ("kv_events", f"tcp://127.0.0.1:{port}")]:
            with pytest.raises(kvpool.errors.NodeError, match=f"^{key}: .*{port}") as refused:
                start(pool(settings), settings | {key: address})
            assert (refused.value.kind, refused.value.setting) == ("Setting", key)
    etcd = {"membership": "etcd://127.0.0.1:1/x"}
    try:
        start(pool(settings), settings | etcd).close()
    except kvpool.errors.InvalidArgument as refused:
        assert (refused.kind, refused.setting, refused.feature) == ("NotBuilt", "membership", "etcd")
    with pytest.raises(kvpool.errors.NodeError, match="^nixl: "):
        start(pool(settings), settings | {"nixl": "/nowhere/libnixl.so"})
    with pytest.raises(kvpool.errors.InvalidArgument, match="the path of a file or a mapping"):
        kvpool.Node.from_settings(pool(settings), 7)
    with pytest.raises(kvpool.errors.InvalidArgument, match="named by the argument"):
        start(pool(settings), tmp_path / "none.toml")
    with pytest.raises(kvpool.errors.NodeError, match="no tier"):
        start(pool(settings), settings).bring_back(range(9))


def test_hashes_are_those_of_the_secret(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = own(tmp_path, "a")
    assert kvpool.Node.hash_key({"name": "a"}) is None
    key = kvpool.Node.hash_key(settings)
    assert key is not None and len(key) == 32
    for hashing in ("fast", "keyed"):
        ours = kvpool.Pool(layout(), 9, prefix_cache=True, hash_key=key, hashing=hashing)
        start(ours, settings | {"hash_key_file": tmp_path / "token"}).close()
    other = kvpool.Pool(layout(), 9, prefix_cache=True)
    with pytest.raises(kvpool.errors.InvalidArgument, match="another key of the hashes") as refused:
        start(other, settings | {"hash_key_file": tmp_path / "token"})
    assert refused.value.setting == "hash_key_file"
    with caplog.at_level(logging.WARNING, "kvpool"):
        start(other, settings).close()
        until(lambda: any("exchange sequences only" in record.message for record in caplog.records))


def is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def with_ports(tmp_path: Path) -> tuple[list[int], dict[str, object]]:
    ports = free_ports(3)
    settings = own(
        tmp_path,
        "a",
        admin=f"127.0.0.1:{ports[0]}",
        listen=f"127.0.0.1:{ports[1]}",
        kv_events=f"tcp://127.0.0.1:{ports[2]}",
    )
    return ports, settings


def test_a_port_is_free_when_the_node_is_gone(tmp_path: Path) -> None:
    ports, settings = with_ports(tmp_path)
    ends: list[Callable[[Any], object]] = [lambda node: node.close(), lambda node: node.shutdown().wait(), lambda _: None]
    for end in ends:
        ours = pool(settings)
        node = start(ours, settings)
        assert not any(map(is_free, ports))
        end(node)
        del node
        until(lambda: all(map(is_free, ports)))
        ours.audit()


@pytest.mark.parametrize("admin", [True, False])
def test_a_shutdown_waits_until_the_ports_are_free(tmp_path: Path, admin: bool) -> None:
    ports, settings = with_ports(tmp_path)
    for _ in range(20):
        node = start(pool(settings), settings if admin else settings | {"admin": "off"})
        assert node.shutdown(patience=0).wait() in (True, False)
        assert all(map(is_free, ports))


def test_a_kept_call_does_not_keep_a_closed_node(tmp_path: Path) -> None:
    ports, settings = with_ports(tmp_path)
    node = start(pool(settings), settings)
    kept = [node.peers(), node.migrations(), node.services(), node.reload(), node.declare_ended("b"), node.shutdown()]
    node.close()
    until(lambda: all(map(is_free, ports)))
    for call in kept:
        with pytest.raises(kvpool.errors.Closed):
            call.wait()


def test_the_end_of_a_tier_that_is_in_use_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    hangs = socket.create_server(("127.0.0.1", 0))
    address = f"redis://127.0.0.1:{hangs.getsockname()[1]}"
    settings = own(tmp_path, "a", tier=address, tier_namespace="tests", tier_patience="30s")
    node = start(pool(settings), settings)

    async def main() -> None:
        under_way = asyncio.ensure_future(node.bring_back(range(8 * TOKENS), timeout=WAIT))
        await asyncio.sleep(0.1)
        await node.shutdown(patience=0)
        under_way.cancel()

    with hangs, caplog.at_level(logging.WARNING, "kvpool"):
        asyncio.run(main())
        until(lambda: any("the tier is still in use" in record.message for record in caplog.records))


def test_a_file_that_is_as_before_changes_nothing_after_a_resize(tmp_path: Path) -> None:
    settings = own(tmp_path, "a", peers=["b=127.0.0.1:1"], migrate_below=60, migrate_to="b")
    ours = pool(settings)
    node = start(ours, settings)
    for blocks in (50, 80):
        assert ours.resize(blocks).wait().after == blocks
        assert node.reload().wait() == "changes of peers: none"
    node.close()


def test_a_node_is_closed_twice_and_not_used_in_a_fork(tmp_path: Path) -> None:
    settings = own(tmp_path, "a")
    node = start(pool(settings), settings)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            node.health()
        except kvpool.errors.Forked:
            # The child has a runtime and a log of its own.
            mine = start(pool(settings), settings)
            code = 0 if mine.health()["state"] == "ok" and mine.shutdown().wait() else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert get(node, "/healthz")
    node.close()
    node.close()
    with pytest.raises(kvpool.errors.Closed):
        node.services()
    plain = kvpool.Node.start(pool(settings), "b").wait()
    with pytest.raises(kvpool.errors.NodeError, match="not started from settings"):
        plain.reload().wait()
    assert plain.health()["state"] == "ok" and plain.services().wait()["node"]["sent"] == 0
    plain.close()


def test_the_interpreter_ends_with_a_node_alive(
    tmp_path: Path, run_python: Callable[[str], subprocess.CompletedProcess[str]]
) -> None:
    settings = own(tmp_path, "a", tier="redis://127.0.0.1:1", tier_namespace="x", kv_events="tcp://127.0.0.1:0")
    ended = run_python(
        f"""
import kvpool, time
settings = {settings | {"token_file": str(tmp_path / "token")}!r}
layout = kvpool.Layout(layers=2, kv_heads=2, head_dim=8, block_tokens=4, dtype="f32")
pool = kvpool.Pool(layout, 100, prefix_cache=True, hash_key=kvpool.Node.hash_key(settings))
node = kvpool.Node.from_settings(pool, settings).wait()
sequence = pool.sequence(1, range(40))
with pool.begin_batch() as batch:
    batch.append(sequence, 40)
while not node.services().wait()["tiers"]["redis"]["failures"]:
    time.sleep(0.01)
"""
    )
    assert (ended.returncode, ended.stdout) == (0, "")
    # Without handlers, Python writes warnings to the standard error.
    assert all("a service fails" in line for line in ended.stderr.splitlines()), ended.stderr


BYTES = 1000


def value(number: int) -> bytes:
    return bytes([number]) * BYTES


def share(one: kvpool.Tier, other: kvpool.Tier) -> None:
    """Stores values by one tier, and reads them by the other."""
    keys = [b"first", b"second"]
    until(lambda: one.put(keys, [value(1), value(2)], timeout=WAIT).wait() == ["stored"] * 2)
    found = [bytearray(BYTES) for _ in range(3)]
    until(lambda: other.get([*keys, b"third"], found, timeout=WAIT).wait() == ["hit", "hit", "miss"])
    assert found == [value(1), value(2), bytes(BYTES)]


def test_a_tier_is_the_node_or_the_store_of_its_settings(tmp_path: Path, redis: str) -> None:
    sizes: dict[str, Any] = {"value_bytes": BYTES, "namespace": "tests", "patience": WAIT, "rest": 0.05}
    with CacheNode(BYTES, token=SECRET) as node:
        peers = {"peers": {"cache": node.address}, "token_file": secret(tmp_path)}
        one, other = (kvpool.Tier.from_settings(peers, **sizes) for _ in range(2))
        share(one, other)
        with kvpool_admin(tmp_path, peers, sizes) as page:
            stats = json.loads(page("/stats"))
            assert (stats["extra"]["tiers"]["peer"]["stored"], stats["extra"]["peers"]) == (0, {"cache": "up"})
            assert "<html" in page("/") and "kvpool_tier_up" in page("/metrics")
    file = tmp_path / "kvpool.toml"
    file.write_text(f'tier = "{redis}"\ntier_namespace = "x"\nhash_key_file = "{tmp_path}/token"\n')
    one, other = (kvpool.Tier.from_settings(file, **sizes) for _ in range(2))
    assert "redis" in repr(one)
    share(one, other)
    one.close()
    one.close()
    for bad in [{}, {"peers": ["b=localhost:1", "c=localhost:2"]}]:
        with pytest.raises(kvpool.errors.InvalidArgument, match="a store as `tier`, or one node in `peers`"):
            kvpool.Tier.from_settings(bad, **sizes)
    with pytest.raises(kvpool.errors.InvalidArgument, match="size is a setting of `kvpool serve` alone"):
        kvpool.Tier.from_settings(peers | {"size": 7}, **sizes)


@contextmanager
def kvpool_admin(folder: Path, settings: dict[str, Any], sizes: dict[str, Any]) -> Iterator[Callable[[str], str]]:
    """A tier with an admin interface. It ends with the tier."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    tier = kvpool.Tier.from_settings(settings | {"admin": address}, **sizes)

    def page(path: str) -> str:
        request = urllib.request.Request(f"http://{address}{path}", headers={"Authorization": f"Bearer {SECRET}"})
        with urllib.request.urlopen(request, timeout=WAIT) as answer:
            return str(answer.read().decode())

    until(lambda: tier.exists([b"first"], timeout=WAIT).wait() == ["hit"])
    yield page
    tier.close()

    def is_gone() -> bool:
        try:
            page("/healthz")
        except OSError:
            return True
        return False

    until(is_gone)
