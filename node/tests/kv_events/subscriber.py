"""A router's view of a cache: follows events in vLLM's format over ZeroMQ, and keeps a set of hashes.

Knows ZeroMQ and MessagePack, and nothing of kvpool. Usage: subscriber.py EVENTS REPLAY TOPIC

Each line on the standard input is the number of a batch: the program follows until it has applied that
batch, and prints a line of JSON: the set and counts.
"""

import json
import sys
import threading

import msgpack
import zmq

STORED = {
    "type",
    "group_idx",
    "kv_cache_spec_kind",
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
}


class Router:
    def __init__(self, events, replay, topic):
        self.context = zmq.Context()
        self.replay_address = replay
        self.sub = self.context.socket(zmq.SUB)
        self.sub.setsockopt(zmq.RECONNECT_IVL, 20)
        self.sub.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self.sub.connect(events)
        self.topic = topic.encode()
        self.hashes = set()
        self.next = 0
        self.time = 0.0
        names = ["live", "replayed", "gaps", "replays", "clears", "stored", "removed", "tokens"]
        self.counts = dict.fromkeys(names, 0)

    def apply(self, number, payload):
        batch = msgpack.unpackb(payload)
        assert isinstance(batch, list) and len(batch) == 3, batch
        self.time, events, rank = batch
        assert isinstance(self.time, float) and rank == 0, batch
        for event in events:
            kind = event["type"]
            if kind == "AllBlocksCleared":
                assert set(event) == {"type"}, event
                self.hashes.clear()
                self.counts["clears"] += 1
            elif kind == "BlockStored":
                assert set(event) == STORED, event
                blocks, tokens = event["block_hashes"], event["token_ids"]
                assert len(tokens) in (0, len(blocks) * event["block_size"]), event
                assert event["parent_block_hash"] is None or tokens, event
                assert event["medium"] == "CPU", event
                assert event["lora_id"] is None and event["lora_name"] is None, event
                self.hashes.update(blocks)
                self.counts["stored"] += len(blocks)
                self.counts["tokens"] += len(tokens)
            elif kind == "BlockRemoved":
                assert set(event) == {"type", "block_hashes", "medium", "group_idx"}, event
                self.hashes.difference_update(event["block_hashes"])
                self.counts["removed"] += len(event["block_hashes"])
            else:
                raise AssertionError(event)
        self.next = number + 1

    @staticmethod
    def starts_afresh(payload):
        events = msgpack.unpackb(payload)[1]
        return bool(events) and events[0]["type"] == "AllBlocksCleared"

    def replay(self):
        """Asks for all batches from the next one on."""
        self.counts["replays"] += 1
        dealer = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(self.replay_address)
        dealer.send_multipart((b"", self.next.to_bytes(8, "big")))
        try:
            while dealer.poll(5000):
                empty, number, payload = dealer.recv_multipart()
                assert empty == b"", empty
                if not payload:
                    assert int.from_bytes(number, "big", signed=True) == -1, number
                    return
                number = int.from_bytes(number, "big")
                if number == self.next or self.starts_afresh(payload):
                    self.apply(number, payload)
                    self.counts["replayed"] += 1
        finally:
            dealer.close()

    def receive(self, timeout):
        """Applies a live batch, if there is one."""
        if not self.sub.poll(timeout):
            return False
        topic, number, payload = self.sub.recv_multipart()
        assert topic == self.topic and len(number) == 8, (topic, number)
        number = int.from_bytes(number, "big")
        if number < self.next and msgpack.unpackb(payload)[0] > self.time:
            # The publisher was restarted.
            self.next = 0
            self.hashes.clear()
        if number > self.next:
            self.counts["gaps"] += 1
            self.replay()
        if number == self.next:
            self.apply(number, payload)
            self.counts["live"] += 1
        return True

    def follow(self, last):
        """Follows until a batch was applied."""
        while self.next <= last:
            if not self.receive(500):
                self.replay()


def main():
    router = Router(*sys.argv[1:])
    wanted = []

    def read():
        for line in sys.stdin:
            wanted.append(int(line))

    threading.Thread(target=read, daemon=True).start()
    router.replay()
    print(json.dumps({"ready": router.next}), flush=True)
    done = 0
    while True:
        router.receive(20)
        while done < len(wanted):
            router.follow(wanted[done])
            done += 1
            answer = {"hashes": sorted(router.hashes), "next": router.next, **router.counts}
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
