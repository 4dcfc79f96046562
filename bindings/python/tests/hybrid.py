"""An engine whose layers differ, which holds the bytes of its pool: it checks what the next token reads, and each state."""

from __future__ import annotations

from pathlib import Path

import kvpool
import numpy as np
import numpy.typing as npt

CONFIGS = Path(__file__).resolve().parents[3] / "tests" / "configs"
MASK = 2**62 - 1


def model(name: str) -> kvpool.LayerGroups:
    """The groups of a model, DeepSeek's in fp8."""
    dtype = "fp8_e4m3" if name.startswith("deepseek-v4") else None
    return kvpool.LayerGroups.from_config(CONFIGS / f"{name}.json", dtype=dtype)


class Request:
    """A sequence, with the tokens that it should have."""

    def __init__(self, sequence: kvpool.GroupedSequence, tokens: list[int]) -> None:
        self.sequence = sequence
        self.tokens = list(tokens)
        self.sums = [7]  # of the first tokens
        self.extend()

    def extend(self, more: list[int] | None = None) -> None:
        self.tokens += more or []
        for token in self.tokens[len(self.sums) - 1 :]:
            self.sums.append((self.sums[-1] * 1_000_003 + token + 1) & MASK)

    def accept(self, right: list[int]) -> None:
        """Accepts these drafts, and removes the others."""
        self.sequence.accept(right)
        self.tokens = self.tokens[: len(self.sequence)]
        self.sums = self.sums[: len(self.tokens) + 1]

    def stamps(self, start: int, stop: int, of: int) -> npt.NDArray[np.int64]:
        """What a layer computes from all tokens up to each of these."""
        return np.array(self.sums[start + 1 : stop + 1], np.int64) ^ of


class Engine:
    def __init__(self, groups: kvpool.LayerGroups, blocks: int, *, cache: bool = True, storage: bool = False) -> None:
        self.groups = groups
        self.lists = groups.list_tokens
        # Groups that share blocks lie beside each other in a frame.
        shared = [one.shares_blocks_of for one in groups.groups]
        self.areas = [0 if of is None else 1 + shared[:at].count(of) for at, of in enumerate(shared)]
        shape = (blocks + 1, max(self.areas) + 1, max(self.lists))
        self.memory = np.zeros(shape, np.int64)
        self.moved: list[tuple[int, int]] = []
        self.breaks = False  # whether moves fail
        self.is_still = True  # whether nothing moves within a batch, so that all calls of it agree
        self.storage = storage  # whether the pool has the bytes, and makes all copies
        copier = None if storage else self.move
        self.pool = kvpool.Pool.layered(groups, blocks=blocks, prefix_cache=cache, threads=1, copier=copier, storage=storage)
        if storage:
            frames = np.asarray(self.pool.plane(0)).reshape(-1)
            strides = (groups.frame_bytes, shape[2] * 8, 8)
            self.memory = np.ndarray(shape, np.int64, buffer=frames.data, strides=strides)
        self.read = 0  # entries and frames of states that were compared

    def copy(self, copies: list[tuple[int, int, int]]) -> None:
        for _, source, target in copies if not self.storage else []:
            self.memory[target] = self.memory[source]

    def move(self, pairs: list[tuple[int, int]]) -> None:
        if self.breaks:
            raise OSError("the device is busy")
        self.moved += pairs
        self.copy([(0, *pair) for pair in pairs])

    def places(self, of: int, slots: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], int, npt.NDArray[np.int64]]:
        group = self.groups.groups[of]
        assert group.block_tokens is not None
        per = group.block_tokens // group.ratio
        return slots // per, self.areas[of], slots % per

    def slots(
        self, batch: kvpool.Batch, of: int, list_: int, requests: list[Request], starts: list[int], stops: list[int]
    ) -> npt.NDArray[np.int64]:
        """The slots of entries of a group in one of its lists, also by the other calls."""
        ratio = self.groups.groups[of].ratio
        sequences = [request.sequence for request in requests]
        out = np.full(sum(stops) - sum(starts) + 1, -7, np.int64)
        count = batch.entry_mapping(sequences, starts, stops, list_, ratio, out)
        assert count == sum(stop // ratio - start // ratio for start, stop in zip(starts, stops, strict=True))
        assert (out[count:] == -7).all()
        if ratio == 1 and self.is_still:
            same = np.zeros(count, np.int64)
            only = [same if other == list_ else None for other in range(len(self.lists))]
            assert batch.slot_mappings(sequences, np.array(starts), np.array(stops), only) == count
            assert (same == out[:count]).all()
        return out[:count]

    def entries(self, request: Request, of: int, list_: int, start: int, stop: int) -> npt.NDArray[np.int64]:
        """What a group computes from tokens: an entry for each `ratio` of them."""
        ratio = self.groups.groups[of].ratio
        ends = np.arange(start // ratio, stop // ratio) * ratio + ratio
        return np.array([request.sums[end] for end in ends], np.int64) ^ (of * 100 + list_)

    def step(
        self, batch: kvpool.Batch, requests: list[Request], tokens: list[int | list[int]]
    ) -> list[kvpool.GroupedAppend]:
        """Appends, and computes all layers."""
        return self.compute(batch, requests, batch.append_grouped([one.sequence for one in requests], tokens), tokens)

    def draft(self, batch: kvpool.Batch, request: Request, tokens: list[int]) -> kvpool.GroupedAppend:
        """Appends drafts, and computes all layers; the states stay."""
        return self.compute(batch, [request], [batch.draft_grouped(request.sequence, len(tokens))], [tokens])[0]

    def compute(
        self,
        batch: kvpool.Batch,
        requests: list[Request],
        appended: list[kvpool.GroupedAppend],
        tokens: list[int | list[int]] | list[list[int]],
    ) -> list[kvpool.GroupedAppend]:
        for one, request, new in zip(appended, requests, tokens, strict=True):
            self.copy(one.copies)
            if isinstance(new, list):
                request.extend(new)
            assert one.stop == len(request.sequence) <= len(request.tokens)
        starts, stops = [one.start for one in appended], [one.stop for one in appended]
        for of, group in enumerate(self.groups.groups):
            for list_ in group.lists:
                slots = self.slots(batch, of, list_, requests, starts, stops)
                spans = zip(requests, starts, stops, strict=True)
                values = [self.entries(request, of, list_, start, stop) for request, start, stop in spans]
                frames, area, cells = self.places(of, slots)
                assert (frames > 0).all()
                self.memory[frames, area, cells] = np.concatenate(values)
        for request, one in zip(requests, appended, strict=True):
            start, stop = one.stepped
            assert start == stop or stop == request.sequence.state_tokens <= one.stop
            for number, frames in enumerate(request.sequence.states if start < stop else []):
                before, after = request.stamps(start - 1, start, -number)[-1:], request.stamps(stop - 1, stop, -number)
                held = self.memory[frames.start : frames.stop, 0]
                # At position 0 the engine initializes it.
                assert start == 0 or (held == before).all()
                held[:] = after
                self.read += len(frames)
        return appended

    def check(self, requests: list[Request]) -> None:
        """Checks what the next token of each sequence sees, and that the tables agree."""
        sequences = [request.sequence for request in requests]
        with self.pool.begin_batch() as batch:
            longest = max(len(sequence) for sequence in sequences)
            tables = [np.full((len(sequences) + 1, -(-longest // per) + 2), -7, np.int32) for per in self.lists]
            widths = batch.block_tables(sequences, tables)
            assert widths == [-(-longest // per) for per in self.lists]
            for of, group in enumerate(self.groups.groups):
                for row, request, list_ in [(*one, list_) for one in enumerate(requests) for list_ in group.lists]:
                    length = len(request.sequence)
                    first = {
                        "window": max(0, length - (group.tokens or 1) + 1),
                        "chunk": length - length % (group.tokens or 1),
                    }.get(group.kind, 0)
                    for start, stop in {(0, min(group.sinks, first)), (first, length)}:
                        slots = self.slots(batch, of, list_, [request], [start], [stop])
                        frames, area, cells = self.places(of, slots)
                        assert (self.memory[frames, area, cells] == self.entries(request, of, list_, start, stop)).all()
                        self.read += len(slots)
                        table, per = tables[list_], group.block_tokens or 1
                        ends = np.arange(start // group.ratio, stop // group.ratio) * group.ratio
                        assert not self.is_still or (frames == table[row, ends // per]).all()
                    table, blocks = tables[list_][row], request.sequence.blocks(list_)
                    given_up = request.sequence.blocks_given_up(list_)
                    assert len(blocks) == -(-length // per) and (table[: len(blocks)] == 0).sum() == given_up
                    assert (table[len(blocks) :] == 0).all() and blocks.count(0) == given_up
            assert all((table[-1] == -7).all() for table in tables)

    def prefill(self, request: Request, chunk: int) -> None:
        """Computes the rest of a prompt, with checkpoints where it says."""
        sequence, end = request.sequence, len(request.tokens)
        while len(sequence) < end:
            with self.pool.begin_batch() as batch:
                cut = sequence.next_cut or end
                self.step(batch, [request], [min(cut - len(sequence), chunk)])
                if len(sequence) == cut < end:
                    self.copy(batch.checkpoint(sequence))
