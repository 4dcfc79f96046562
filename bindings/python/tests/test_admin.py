"""The admin interface of a pool of frames, in the process of its engine."""

from __future__ import annotations

import json
import logging
import os
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import kvpool
import pytest
from test_node_settings import SECRET, WAIT, is_free, secret, until

HERE = {"name": "engine", "admin": "127.0.0.1:0"}


def pool() -> kvpool.FramePool:
    """A pool of 100 frames: 10 in use, and 4 cached."""
    frames = kvpool.FramePool(100, magazine_frames=0)
    frames.allocate(10, sequence=7)
    cached = frames.allocate(4)
    frames.register(cached, [bytes([frame]) for frame in cached])
    frames.free(cached)
    return frames


def start(frames: kvpool.FramePool, settings: object, **more: Any) -> kvpool.Admin:
    return kvpool.Admin.from_settings(frames, settings, **more).wait()


def ask(admin: kvpool.Admin, path: str, body: str | None = None, token: str | None = None) -> str:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    data = None if body is None else body.encode()
    request = urllib.request.Request(f"{admin.address}{path}", data, headers)
    with urllib.request.urlopen(request, timeout=WAIT) as answer:
        return str(answer.read().decode())


def test_page_metrics_and_statistics_are_served() -> None:
    frames = pool()
    admin = start(frames, HERE)
    assert admin.name == "engine" and repr(admin) == f"<kvpool.Admin engine, {admin.address}>"
    assert "<html" in ask(admin, "/") and "<svg" in ask(admin, "/map.svg")
    stats = json.loads(ask(admin, "/stats"))
    assert (stats["total"], stats["used"], stats["free"], stats["evictable"]) == (100, 10, 86, 4)
    assert "block_bytes" not in stats and "sequences" not in stats
    assert admin.stats().wait()["fragmentation"]["longest_run"] == stats["fragmentation"]["longest_run"]
    owners = json.loads(ask(admin, "/owners"))["owners"]
    assert [(owner["kind"], owner["sequence"], owner["blocks"]) for owner in owners] == [("engine", 7, 10)]
    admin.report("tests", {"audited_blocks": 5, "audit_failures": 0})
    admin.report("tests", {"audited_blocks": 6, "audit_failures": 0})
    metrics = ask(admin, "/metrics")
    for line in [
        'kvpool_blocks{pool="engine",state="used"} 10',
        'kvpool_longest_free_run_blocks{pool="engine"} ',
        'kvpool_engine{pool="engine",engine="tests",counter="audited_blocks"} 6',
    ]:
        assert line in metrics
    assert json.loads(ask(admin, "/stats"))["extra"]["engine"]["tests"]["audited_blocks"] == 6
    assert json.loads(ask(admin, "/audit", "{}"))["sound"]
    for path, body in [("/migrations", None), ("/defrag", "{}"), ("/resize", '{"blocks": 5}'), ("/trim", '{"keep": 0}')]:
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(admin, path, body)
        assert refused.value.code == 501 and "a pool of frames" in refused.value.read().decode()
    # The pool is in use meanwhile, and is the same.
    frames.allocate(86)
    assert json.loads(ask(admin, "/stats"))["free"] == 0
    admin.set_pool(kvpool.FramePool(50))
    assert json.loads(ask(admin, "/stats"))["total"] == 50
    assert admin.shutdown().wait() is None


@pytest.mark.parametrize(
    ("settings", "setting", "message"),
    [
        ({"listen": "127.0.0.1:0"}, "listen", "listen needs a pool with sequences and bytes"),
        ({"peers": {"b": "127.0.0.1:1"}}, "peers", "settings:3: peers needs a pool"),
        ({"tier": "redis://u:secretpw@h:1/0"}, "tier", "tier needs a pool"),
        ({"kv_events": "tcp://127.0.0.1:0"}, "kv_events", "kv_events needs a pool"),
        ({"membership": "etcd://h:1/x"}, "membership", "membership needs a pool"),
        ({"migrate_below": 5, "migrate_to": "b"}, "migrate_below", "migrate_below needs a pool"),
        ({"size": 100}, "size", "size is a setting of `kvpool serve` alone"),
        ({"admn": "off"}, "admn", "there is no key `admn`; did you mean `admin`?"),
        ({"admin": 7}, "admin", "a port is missing"),
        ({"admin": "0.0.0.0:0"}, "admin", "admin needs token_file as well"),
        ({"admin": "https://127.0.0.1:0"}, "admin", "admin needs tls_cert as well"),
        ({"token_file": "/nowhere/token"}, None, "cannot read the token's file /nowhere/token"),
    ],
)
def test_bad_settings_are_named(settings: dict[str, object], setting: str | None, message: str) -> None:
    with pytest.raises(kvpool.errors.InvalidArgument, match=message) as refused:
        start(pool(), HERE | settings)
    assert refused.value.setting == setting
    assert "secretpw" not in str(refused.value)


def test_arguments_are_checked() -> None:
    with pytest.raises(kvpool.errors.InvalidArgument, match="the path of a file or a mapping"):
        start(pool(), 7)
    with pytest.raises(kvpool.errors.InvalidArgument, match="the number of a pool cannot be 65536"):
        start(pool(), HERE, number=65536)
    with pytest.raises(TypeError):
        start("pool", HERE)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        kvpool.Node.from_settings(pool(), HERE)  # type: ignore[arg-type]
    # Services that are off are none.
    off = start(pool(), HERE | {"admin": "off", "tier": "off", "listen": "off"})
    assert off.address is None and off.stats().wait()["used"] == 10
    off.close()


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(kvpool.errors.NodeError, match=f"^admin: .*{port}.* is in use") as refused:
            start(pool(), {"admin": f"127.0.0.1:{port}"})
        assert (refused.value.kind, refused.value.setting) == ("Setting", "admin")
        # A pool of another number has another port.
        with pytest.raises(kvpool.errors.NodeError, match=f"{port}"):
            start(pool(), {"admin": f"127.0.0.1:{port - 1}"}, number=1)


def test_pools_with_the_same_settings_are_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "kvpool.toml"
    file.write_text(f'name = "engine"\nadmin = "unix:{tmp_path}/admin"\n')
    first, second = (start(pool(), file, number=number) for number in (0, 1))
    assert (first.address, second.address) == (f"unix:{tmp_path}/admin", f"unix:{tmp_path}/admin.1")
    assert (first.name, second.name) == ("engine", "engine-1")
    first.close()
    second.close()


def test_tokens_are_reloaded(tmp_path: Path) -> None:
    settings = HERE | {"token_file": secret(tmp_path)}
    admin = start(pool(), settings)
    with pytest.raises(urllib.error.HTTPError, match="401"):
        ask(admin, "/stats")
    assert ask(admin, "/stats", token=SECRET)
    assert admin.reload().wait() == "changes of peers: none"
    secret(tmp_path, "another-secret-of-the-tests")
    with pytest.raises(kvpool.errors.InvalidArgument, match="peers needs a pool"):
        admin.reload(settings | {"peers": ["b=localhost:1"]}).wait()
    assert ask(admin, "/stats", token=SECRET)
    changes = admin.reload(settings | {"admin_connections": 9}).wait()
    assert changes == "changes of peers: none; other tokens; changes that need a restart: admin_connections"
    assert ask(admin, "/stats", token="another-secret-of-the-tests")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        ask(admin, "/stats", token=SECRET)
    admin.close()


def test_its_port_is_free_when_it_is_gone() -> None:
    for end in (lambda admin: admin.close(), lambda admin: admin.shutdown(patience=0).wait(), lambda _: None):
        admin = start(pool(), HERE)
        port = int(str(admin.address).rsplit(":", 1)[1])
        kept = [admin.stats, admin.reload, admin.shutdown, lambda: admin.address, lambda: admin.set_pool(pool())]
        assert not is_free(port)
        end(admin)
        if "closed" in repr(admin):
            for call in kept:
                with pytest.raises(kvpool.errors.Closed):
                    call()
            admin.close()
        del admin, kept
        until(lambda: is_free(port))


def test_it_is_not_used_in_a_fork(caplog: pytest.LogCaptureFixture) -> None:
    frames = pool()
    admin = start(frames, HERE)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            admin.stats()
        except kvpool.errors.Forked:
            mine = start(pool(), HERE)
            code = 0 if mine.stats().wait()["used"] == 10 else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert ask(admin, "/healthz")
    admin.close()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_the_interpreter_ends_with_one_alive(run_python: Any) -> None:
    ended = run_python(
        f"""
import kvpool
admin = kvpool.Admin.from_settings(kvpool.FramePool(100), {HERE!r}).wait()
print(admin.stats().wait()["total"])
"""
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "100\n", "")
