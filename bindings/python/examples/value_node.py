"""A node that holds values for engines: what `kvpool.Tier.peer` and vLLM's secondary tier talk to.

    python bindings/python/examples/value_node.py --value-bytes 2097152 --values 10000 --listen 127.0.0.1:7411

Its memory is a little more than values times bytes. With `--token-file`, engines must present the same
token. An address beyond the loopback needs `--tls-cert`, `--tls-key` and `--tls-ca`.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from pathlib import Path

import kvpool


async def serve(arguments: argparse.Namespace) -> None:
    pool = kvpool.Tier.pool(value_bytes=arguments.value_bytes, values=arguments.values)
    token = arguments.token_file and arguments.token_file.read_bytes().strip()
    files = [file.read_bytes() for file in (arguments.tls_cert, arguments.tls_key, arguments.tls_ca) if file]
    tls = (files[0], files[1], files[2]) if len(files) == 3 else None
    node = await kvpool.Node.start(pool, arguments.name, listen=[arguments.listen], token=token, tls=tls)
    print(f"{arguments.name} at {', '.join(node.addresses)}", flush=True)
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    await ended.wait()
    await node.shutdown(5)


def main() -> None:
    parser = argparse.ArgumentParser(description="A kvpool node that holds values")
    parser.add_argument("--value-bytes", type=int, required=True)
    parser.add_argument("--values", type=int, required=True)
    parser.add_argument("--listen", default="127.0.0.1:7411")
    parser.add_argument("--name", default="cache")
    for name in ("--token-file", "--tls-cert", "--tls-key", "--tls-ca"):
        parser.add_argument(name, type=Path)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
