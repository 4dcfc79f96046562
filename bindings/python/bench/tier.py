"""Values through a node in another process, against plain copies over TCP between the same processes.

    python bindings/python/bench/tier.py [--bytes 1048576] [--values 32] [--rounds 9]

Each round copies the values to the other process over one TCP connection, and back; puts new values;
asks another tier for them, which brings them into its window; and gets them from there. Median GB/s,
and the part of the plain copy in that direction. Every value that is read is compared.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import kvpool

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from cache_node import CacheNode

WAIT = 60.0
ECHO = """
import socket, sys
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
peer, _ = server.accept()
memory = memoryview(bytearray(int(sys.argv[1])))
while True:
    at = 0
    while at < len(memory):
        read = peer.recv_into(memory[at:])
        if not read:
            sys.exit()
        at += read
    peer.sendall(b"1")
    peer.recv(1)
    peer.sendall(memory)
"""


class Echo:
    """A process that receives bytes, and sends them back."""

    def __init__(self, bytes_: int) -> None:
        command = [sys.executable, "-c", ECHO, str(bytes_)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.peer = socket.create_connection(("127.0.0.1", int(self.process.stdout.readline())))
        self.memory = memoryview(bytearray(bytes_))

    def send(self) -> None:
        self.peer.sendall(self.memory)
        assert self.peer.recv(1) == b"1"

    def receive(self) -> None:
        self.peer.sendall(b"1")
        at = 0
        while at < len(self.memory):
            at += self.peer.recv_into(self.memory[at:])


def until(what: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT
    while not what():
        assert time.monotonic() < end
        time.sleep(0.01)


def main() -> None:
    parser = argparse.ArgumentParser(description="values through a node, against plain copies")
    parser.add_argument("--bytes", type=int, default=1 << 20)
    parser.add_argument("--values", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    size, count = arguments.bytes, arguments.values
    names = ("TCP, there", "TCP, back", "put", "exists", "get behind exists", "get alone")
    seconds: dict[str, list[float]] = {name: [] for name in names}

    def timed(name: str, work: Callable[[], object]) -> object:
        begin = time.perf_counter()
        result = work()
        seconds[name].append(time.perf_counter() - begin)
        return result

    settings = {"value_bytes": size, "namespace": "bench", "window": 4 * count, "puts": 2 * count, "patience": WAIT}
    echo = Echo(size * count)
    with CacheNode(size, 4 * count) as node:
        writer, one, other = (kvpool.Tier.peer("cache", node.address, **settings) for _ in range(3))
        for tier in (writer, one, other):
            until(lambda tier=tier: tier.put([b"link"], [bytes(size)], timeout=WAIT).wait() == ["stored"])
        read = [bytearray(size) for _ in range(count)]
        for number in range(arguments.rounds):
            keys = [b"%d %d" % (number, place) for place in range(count)]
            values = [os.urandom(size) for _ in keys]
            timed("TCP, there", echo.send)
            timed("TCP, back", echo.receive)
            assert timed("put", lambda: writer.put(keys, values, timeout=WAIT).wait()) == ["stored"] * count
            assert timed("exists", lambda: one.exists(keys, timeout=WAIT).wait()) == ["hit"] * count
            for name, tier in (("get behind exists", one), ("get alone", other)):
                assert timed(name, lambda: tier.get(keys, read, timeout=WAIT).wait()) == ["hit"] * count
                assert [bytes(value) for value in read] == values
    echo.peer.close()
    echo.process.wait()
    print(f"{count} values of {size} bytes, median of {arguments.rounds} rounds")
    print("| | GB/s | of TCP |\n|---|---|---|")
    for name, times in seconds.items():
        plain = "TCP, there" if name == "put" else "TCP, back"
        ratio = statistics.median(seconds[plain]) / statistics.median(times)
        print(f"| {name} | {size * count / statistics.median(times) / 1e9:.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
