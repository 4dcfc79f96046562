"""A process with a kvpool node that holds values, for tests of tiers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

SCRIPT = """
import asyncio, sys
import kvpool
bytes_, values, address, token = sys.argv[1:]
pool = kvpool.Tier.pool(value_bytes=int(bytes_), values=int(values))
async def start():
    return await kvpool.Node.start(pool, "cache", listen=[address], token=token.encode() or None)
node = asyncio.run(start())
print(node.addresses[0], flush=True)
for line in sys.stdin:
    if line == "damage\\n":
        # A byte of each block, behind the back of the node.
        memory = memoryview(pool.plane(0)).cast("B")
        for at in range(500, len(memory), len(memory) // int(values)):
            memory[at] ^= 1
    print(node.stats().damaged_blocks if line == "damaged\\n" else pool.stats().evictable, flush=True)
"""


class CacheNode:
    """The process. It can be killed, stopped, and started again at its address."""

    def __init__(self, value_bytes: int, values: int = 64, token: str = "") -> None:
        self._arguments = [str(value_bytes), str(values)]
        self._token = token
        self.address = "127.0.0.1:0"
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-c", SCRIPT, *self._arguments, self.address, self._token]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = self._read()

    def _read(self) -> str:
        line = self._process.stdout.readline().strip()
        assert line, f"the node ended with {self._process.wait()}"
        return line

    def ask(self, what: str = "count") -> int:
        """The number of values in the node, after `what` was done; of "damaged", how many it has found damaged."""
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        return int(self._read())

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def stop(self) -> None:
        """Has the process hang, with its connections open."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)  # All of its threads.

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> CacheNode:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.kill()
