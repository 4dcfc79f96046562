"""Several threads on one pool; with the GIL and without."""

from __future__ import annotations

import random
import threading

import kvpool
from conftest import layout


def test_four_threads_on_one_pool() -> None:
    pool = kvpool.Pool(layout(), 256, prefix_cache=True)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        kept: list[kvpool.Lease] = []
        try:
            for step in range(400):
                match rng.randrange(5):
                    case 0 | 1:
                        try:
                            kept.append(pool.try_allocate(rng.randrange(1, 20), contiguous=rng.random() < 0.2))
                        except kvpool.OutOfBlocks:
                            kept.clear()
                    case 2 if kept:
                        kept.pop(rng.randrange(len(kept))).close()
                    case 3:
                        try:
                            lease = pool.try_allocate(4)
                        except kvpool.OutOfBlocks:
                            continue
                        kept.append(lease.share())
                        lease.close()
                    case _:
                        prompt = [rng.randrange(3)] * 9
                        with pool.sequence(number * 1000 + step, prompt) as sequence, pool.begin_batch() as batch:
                            try:
                                batch.append(sequence, 9 - len(sequence))
                            except kvpool.OutOfBlocks:
                                continue
                            table = kvpool.BlockTable()
                            batch.block_table([sequence], table)
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    audit = pool.audit()
    assert audit.owned == 0
    assert pool.available_blocks == 256


def test_a_sequence_serves_one_call_at_a_time() -> None:
    pool = kvpool.Pool(layout(), 256)
    sequence = pool.sequence(1)
    refused = [0]
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        with pool.begin_batch() as batch:
            appended = 0
            while appended < 50:
                try:
                    batch.append(sequence, 1)
                    appended += 1
                except kvpool.Busy:
                    refused[0] += 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(sequence) == 200
    sequence.close()
    pool.audit()
