# Types of the compiled module. `mypy.stubtest` compares this file with the module. `stubs.py` writes the docstrings and
# the defaults.

from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Iterator, Mapping, Sequence as Items
from os import PathLike
from types import TracebackType
from typing import Any, Generic, Literal, Protocol, Self, TypedDict, TypeVar, final, type_check_only

from typing_extensions import Buffer  # known to every type checker; not imported when the package runs

from . import errors as errors

@type_check_only
class _Array(Protocol):
    # The types of numpy say from Python 3.12 on that arrays are buffers.
    @property
    def __array_interface__(self) -> dict[str, Any]: ...

@type_check_only
class _HintLimits(TypedDict, total=False):
    pinned_bytes: int
    session_bytes: int
    tenant_bytes: int
    longest: float

@type_check_only
class _TenantLimits(TypedDict, total=False):
    quota: int
    floor: int

@type_check_only
class _Hints(Protocol):
    # As the `KvHintsEnvelope` of vLLM.
    @property
    def protocol_version(self) -> str: ...
    @property
    def message_id(self) -> str: ...
    @property
    def actions(self) -> Items[Any]: ...

_T = TypeVar("_T")
_S = TypeVar("_S", Sequence, GroupedSequence)
_Buffer = Buffer | _Array
_Priority = Literal["normal", "high", "urgent"]
_Part = Literal["k", "v", "k_scales", "v_scales"]
_Dtype = Literal["f32", "f16", "bf16", "fp8_e4m3", "fp8_e5m2", "int8"]
_Numbers = Iterable[int] | _Buffer
_Config = str | PathLike[str] | Mapping[str, Any]
_Settings = str | PathLike[str] | Mapping[str, Any]
_Envelope = Mapping[str, Any] | Buffer | _Hints
_TierWord = Literal["stored", "hit", "miss", "late", "busy", "declined", "failed"]

__version__: str

@final
class Call(Coroutine[Any, Any, _T], Generic[_T]):
    """A call to be awaited. Nothing happens before it is awaited; then it is tried at once, and waits
    only if it must. [`wait`](Self::wait) makes the same call on a thread without asyncio. A call
    that is dropped before either is a `RuntimeWarning`.

    It has the interface of a coroutine, so that `await`, `asyncio.create_task`, `gather`,
    `wait_for` and task groups take it.
    """
    def wait(self) -> _T:
        """Makes the call instead of awaiting it: blocks this thread without the GIL until it ends. A
        signal ends the wait, like a cancellation. On the thread of an event loop it blocks the
        loop: await the call there.
        """
    def __await__(self) -> Generator[Any, Any, _T]: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __next__(self) -> Any: ...
    def send(self, value: Any, /) -> Any:
        """Resumes the coroutine."""
    def throw(self, kind: Any, value: Any = None, traceback: Any = None) -> Any:
        """Raises an exception inside of the coroutine, for example a cancellation. What it waits for
        is dropped first, together with a result that it did not take: blocks are free again when
        the task sees the exception.
        """
    def close(self) -> None:
        """Ends the coroutine: what it waits for is dropped."""

@type_check_only
class _Record:
    def as_dict(self) -> dict[str, Any]:
        """Returns the attributes by name."""
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    __hash__ = None  # type: ignore[assignment]

@final
class Layout:
    """Shape of the blocks of a pool: K and V of `block_tokens` tokens, over all layers.

    `Layout(layers=28, kv_heads=4, head_dim=128)` describes one tensor-parallel rank if
    `tensor_parallel` is the number of ranks. `dtype` is one of f32, f16, bf16, fp8_e4m3, fp8_e5m2
    and int8. With `latent=True` there is one vector of `head_dim` elements per token and layer
    (multi-head latent attention). `arrangement` is "layer_first" or "block_first". With
    `dynamic_scales=True` a quantised layout keeps one f32 scale per token and head.

    Raises BuildError for a shape that is impossible.
    """
    def __new__(
        cls,
        *,
        layers: int,
        head_dim: int,
        kv_heads: int | None = None,
        block_tokens: int = 16,
        dtype: _Dtype = "bf16",
        tensor_parallel: int = 1,
        replicate_kv_heads: bool = False,
        latent: bool = False,
        joined: bool = False,
        arrangement: Literal["layer_first", "block_first"] = "layer_first",
        dynamic_scales: bool = False,
    ) -> Self: ...
    @staticmethod
    def named(
        name: str, *, block_tokens: int | None = None, dtype: _Dtype | None = None, tensor_parallel: int = 1
    ) -> Layout:
        """Returns the layout of a known model, on one rank of `tensor_parallel`."""
    @staticmethod
    def names() -> list[str]:
        """Returns the names of the known models."""
    @property
    def layers(self) -> int:
        """Number of layers."""
    @property
    def kv_heads(self) -> int:
        """Number of KV heads on this rank."""
    @property
    def head_dim(self) -> int:
        """Elements per head."""
    @property
    def block_tokens(self) -> int:
        """Tokens per block."""
    @property
    def dtype(self) -> _Dtype:
        """Name of the element type."""
    @property
    def latent(self) -> bool:
        """Whether a token has one latent vector instead of K and V."""
    @property
    def bytes_per_block(self) -> int:
        """Bytes of one block, over all layers."""
    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token, over all layers."""
    def __getnewargs_ex__(self) -> tuple[tuple[()], dict[str, Any]]: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    __hash__ = None  # type: ignore[assignment]

@final
class Handle:
    """Names a block of a lease, for inspection.

    It holds no reference. Each use is checked: a handle of a block that was freed raises
    StaleHandle, one of another pool ForeignHandle. Handles are equal if they name the same block in
    the same generation.
    """
    @property
    def block(self) -> int:
        """Id of the block. It stays while the block lives, also if its bytes move."""
    @property
    def generation(self) -> int:
        """Number of times that the block had been freed when the handle was made."""
    @property
    def pool(self) -> int:
        """Number of the pool within the process."""
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...

@final
class Lease:
    """Owns blocks: frees them when it is closed, or collected. Also a context manager.

    The bytes of its blocks can be written through `Pool.view` until they are sealed. Compaction moves
    sealed blocks only.
    """
    @property
    def blocks(self) -> list[int]:
        """Ids of the blocks, in the order of their allocation."""
    @property
    def frames(self) -> list[int]:
        """Current frame of each block. Compaction may change those of sealed blocks between batches."""
    @property
    def runs(self) -> list[tuple[int, int]]:
        """The frames as runs: pairs of first frame and length. A transfer needs one descriptor each."""
    @property
    def handles(self) -> list[Handle]:
        """A handle for each block, for inspection; valid while the lease lives."""
    @property
    def closed(self) -> bool:
        """Whether the lease was closed."""
    def blocks_into(self, out: _Buffer) -> int:
        """Writes the block ids into a one-dimensional int32 or int64 buffer, from its start on. Returns
        their number.
        """
    def frames_into(self, out: _Buffer) -> int:
        """Writes the frames into a one-dimensional int32 or int64 buffer, from its start on. Returns
        their number.
        """
    def truncate(self, keep: int) -> None:
        """Frees the blocks from index `keep` on."""
    def split_off(self, at: int) -> Lease:
        """Splits the blocks from index `at` on into another lease."""
    def seal(self, start: int = 0, stop: int | None = None) -> None:
        """Marks the bytes of the blocks in a range of indices as final: compaction may move them."""
    def reopen(self, place: int) -> bool:
        """Makes a sealed block writable again. Returns False if another lease shares it, or if a move
        is reading its bytes.
        """
    def share(self) -> Lease:
        """Returns a second lease of the same blocks, which stay allocated until both are closed. Views
        of the blocks count for both.
        """
    def close(self) -> None:
        """Frees the blocks. Does nothing if the lease is closed already."""
    def __len__(self) -> int: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        _value: BaseException | None = None,
        _traceback: TracebackType | None = None,
    ) -> None: ...

@final
class Sequence:
    """The blocks of one request's tokens. Closed when it is collected; also a context manager.

    One thread at a time may use a sequence: another call meanwhile raises Busy.
    """
    @property
    def id(self) -> int:
        """Its id, unique among the open sequences of its pool."""
    @property
    def priority(self) -> _Priority:
        """Priority of its allocations."""
    @property
    def committed(self) -> int:
        """Number of final tokens: the length without drafted tokens."""
    @property
    def announced(self) -> int:
        """Number of tokens whose ids are known; 0 in a pool without a prefix cache."""
    @property
    def block_hashes(self) -> list[str]:
        """Hashes of the full blocks of its known tokens, in order; empty without a prefix cache."""
    @property
    def versions(self) -> list[VersionRange]:
        """The versions of the weights with which its tokens were computed, in the order of their
        positions; empty without a prefix cache. Blocks that it fills after a batch of other
        versions than those of its hashes are not found.
        """
    @property
    def blocks(self) -> list[int]:
        """Ids of its blocks, in order."""
    @property
    def handles(self) -> list[Handle]:
        """A handle for each block, for inspection and pins; valid while the block is in the sequence."""
    @property
    def reserved_blocks(self) -> int:
        """Number of blocks reserved beyond its tokens. Appends within them cannot fail."""
    @property
    def closed(self) -> bool:
        """Whether the sequence was closed, or moved to another pool."""
    def announce(self, tokens: _Numbers) -> None:
        """Tells the ids of tokens that will be appended, so that the prefix cache can find them."""
    def extra_key(self, start: int, end: int, key: bytes) -> None:
        """Gives the tokens from `start` up to `end`, before the first of them is announced, a key that
        separates them from equal tokens: that of an image, for example.
        """
    def expect_return(self, seconds: float) -> None:
        """Tells that the next request of its session is expected in `seconds` seconds: when a tool
        that it calls returns, for example. Takes effect when the sequence is closed, with policies
        that use it and in `SessionInfo.returns_at_ms`; has no effect without a prefix cache.
        """
    def fork(self, id: int) -> Sequence:
        """Opens another sequence that shares every block until one of the two writes."""
    def commit(self, length: int) -> None:
        """Makes drafted tokens final, up to this length.

        Raises Busy if a writable view of a block exists that becomes final.
        """
    def truncate(self, length: int) -> None:
        """Removes tokens from the end, down to this length."""
    def reserve(self, tokens: int) -> None:
        """Reserves the blocks that the next `tokens` tokens need, without waiting. See also
        `Pool.reserve`.
        """
    def release_reservation(self) -> int:
        """Releases the reserved blocks, and returns their number."""
    def close(self) -> None:
        """Closes the sequence: its blocks are freed, or stay in the prefix cache. Does nothing if it
        is closed already.
        """
    def __len__(self) -> int: ...
    def __bool__(self) -> bool: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        _value: BaseException | None = None,
        _traceback: TracebackType | None = None,
    ) -> None: ...

@final
class BlockTable:
    """A padded block table: `[rows, width]` frames in int32, as paged attention kernels expect it.

    `Batch.block_table` fills it, and reuses its memory. It is a buffer: `memoryview(table)` and
    `numpy.asarray(table)` make no copy; while such a view exists, filling it again raises Busy. Rows
    are padded with the null block's frame, or -1 in a pool without one.
    """
    def __new__(cls, width_min: int = 0) -> Self: ...
    @property
    def rows(self) -> int:
        """Number of rows, one per sequence."""
    @property
    def width(self) -> int:
        """Entries per row: the blocks of the longest sequence, or the minimum width."""
    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each sequence."""
    def row(self, row: int) -> list[int]:
        """Returns the entries of one sequence, including padding."""
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class LayerCache:
    """One cache of a layer: the bytes of an entry, and the entries that a sequence keeps.

    The entry is one of these: K and V of `kv_heads` heads with `head_dim` elements (`v_dim` of V,
    if that differs); `latent` elements, one vector for all heads; or a number of `bytes`.
    `side_bytes` lie beside a latent entry or one of bytes, for example the keys of a sparse index.

    A sequence keeps an entry for each token, unless one of these is given: `window`, the tokens
    that a token attends to, itself included, with the first `sinks` ones; `chunk`, the tokens since
    the last multiple of that length; `ratio`, one entry for as many tokens; `state=True`, one entry
    whatever the number of tokens. With `follows` the layer reads the cache of the layer of that
    number, and has no entry, or `bytes` beside that one's.
    """
    def __new__(
        cls,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        v_dim: int | None = None,
        latent: int | None = None,
        bytes: int | None = None,
        side_bytes: int = 0,
        window: int | None = None,
        sinks: int = 0,
        chunk: int | None = None,
        ratio: int | None = None,
        state: bool = False,
        follows: int | None = None,
    ) -> Self: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __ne__(self, other: object, /) -> bool: ...
    __hash__ = None  # type: ignore[assignment]

@final
class LayerGroup(_Record):
    """Layers that keep the same entries with the same bytes: the blocks of one serve all."""
    @property
    def kind(self) -> Literal["all", "compressed", "window", "chunk", "state"]:
        """What a sequence keeps: "all" tokens, "compressed" ones, a "window", a "chunk", or a
        "state".
        """
    @property
    def tokens(self) -> int | None:
        """Tokens of the window or chunk."""
    @property
    def sinks(self) -> int:
        """First tokens that a window keeps too (attention sinks)."""
    @property
    def ratio(self) -> int:
        """Tokens per entry."""
    @property
    def layers(self) -> list[int]:
        """Layers, in order."""
    @property
    def entry_bytes(self) -> int:
        """Bytes of an entry, over all layers."""
    @property
    def block_tokens(self) -> int | None:
        """Tokens of a block; None of a state."""
    @property
    def block_frames(self) -> int:
        """Frames of a block, or of a state: those of a state are consecutive."""
    @property
    def block_bytes(self) -> int:
        """Bytes of a block, or of a state, with padding."""
    @property
    def waste(self) -> float:
        """Share of a block that is padding, from 0 to 1."""
    @property
    def shares_blocks_of(self) -> int | None:
        """Earlier group in whose blocks these entries lie, if any. Such blocks are those of that
        group, and what is said of them here is said of both together.
        """
    @property
    def lists(self) -> list[int]:
        """Lists of blocks of a sequence that have these layers: one for each frame of a block;
        none of a state.
        """
    @property
    def state(self) -> int | None:
        """Number of the state that a sequence has here."""

@final
class LayerPlace(_Record):
    """Where a cache of a layer lies."""
    @property
    def group(self) -> int:
        """Number of the group."""
    @property
    def list(self) -> int | None:
        """Number of the list whose frames have the layer; None of a state."""
    @property
    def state(self) -> int | None:
        """Number of the state; None of a layer with entries in blocks."""
    @property
    def index(self) -> int:
        """Position among the layers of the group in a frame of that list, or in the state."""

@final
class LayerGroups:
    """The layers of a model in groups, for a pool of a model whose layers differ (`Pool.layered`).

    `LayerGroups(layers)` takes for each layer a `LayerCache`, a list of several, or None if it
    caches nothing. `dtype` is that of K, V and latent vectors; `step_tokens` the largest number of
    tokens by which a sequence grows in one step, for `frames_held` and `sequences_in`.

    Raises BuildError, which names the layer.
    """
    def __new__(
        cls, layers: Iterable[LayerCache | Items[LayerCache] | None], *, dtype: _Dtype = "bf16", step_tokens: int = 1
    ) -> Self: ...
    @staticmethod
    def from_config(config: _Config, *, dtype: _Dtype | None = None, step_tokens: int = 1) -> LayerGroups:
        """Groups the layers of a Hugging Face `config.json`: its path or that of its folder, a mapping
        with its keys, or its text. `dtype` is that of K and V, by default the configuration's.

        Layers that draft tokens are left out. Raises BuildError, with the field that is missing, or
        that hints at a kind of layer which is not known.
        """
    @property
    def groups(self) -> list[LayerGroup]:
        """The groups, in order of their numbers."""
    @property
    def layers(self) -> int:
        """Number of layers, with those that cache nothing."""
    @property
    def lists(self) -> int:
        """Number of lists of blocks that a sequence has."""
    @property
    def list_tokens(self) -> list[int]:
        """Tokens of a block in each list."""
    @property
    def states(self) -> int:
        """Number of states that a sequence has."""
    @property
    def dtype(self) -> _Dtype:
        """Name of the type of the elements of K, V and latent vectors."""
    @property
    def frame_bytes(self) -> int:
        """Bytes of a frame: blocks of all groups, and states, are frames of this size."""
    @property
    def hit_tokens(self) -> int:
        """Number of tokens of which a hit in the prefix cache is a multiple."""
    @property
    def bytes_per_token(self) -> float:
        """Bytes per token that a sequence keeps for as long as it grows."""
    @property
    def fixed_bytes(self) -> int:
        """Bytes of a long sequence that do not grow with it: states, and full windows."""
    @property
    def waste(self) -> float:
        """Largest share of a group's blocks that is padding, from 0 to 1."""
    def places(self, layer: int) -> list[LayerPlace]:
        """Returns where the caches of a layer lie: none if it caches nothing. A layer that follows
        another has that one's first place.
        """
    def frames_held(self, tokens: int) -> int:
        """Returns the largest number of frames that a sequence has held by the time that it has
        `tokens` tokens.
        """
    def sequences_in(self, memory: int, tokens: int) -> int:
        """Returns how many sequences of `tokens` tokens fit into `memory` bytes."""

@final
class GroupedSequence:
    """One request's tokens in every group of layers: a list of blocks for each frame of a block, all
    of one length, and a run of frames for each state. Closed when it is collected; also a context
    manager.

    Lists are numbered as in `LayerGroup.lists`, states as in `LayerGroup.state`. One thread at a
    time may use a sequence: another call meanwhile raises Busy.
    """
    @property
    def id(self) -> int:
        """Its id, unique among the open sequences of its pool."""
    @property
    def priority(self) -> _Priority:
        """Priority of its allocations."""
    @property
    def committed(self) -> int:
        """Number of final tokens: the length without drafted tokens."""
    @property
    def announced(self) -> int:
        """Number of tokens whose ids are known; 0 in a pool without a prefix cache."""
    @property
    def cached_prefix(self) -> int:
        """Number of tokens at admission whose blocks were cached in all groups. If the sequence began
        with fewer, no state was kept behind them.
        """
    @property
    def next_cut(self) -> int | None:
        """Length at which to end a chunk of the prompt, for a `Batch.checkpoint` that serves later
        prompts. None: there is none ahead, or the pool has no states or no prefix cache.
        """
    @property
    def lists(self) -> int:
        """Number of lists of blocks."""
    @property
    def states(self) -> list[range]:
        """The frames of each state, as ranges: the same until the sequence is closed. Kernels
        overwrite them in the order of the tokens. If an append begins at position 0, they hold
        nothing yet.
        """
    @property
    def versions(self) -> list[VersionRange]:
        """The versions of the weights with which its tokens were computed, in the order of their
        positions; empty without a prefix cache. Blocks that it fills after a batch of other
        versions than those of its hashes are not found.
        """
    @property
    def held_blocks(self) -> int:
        """Number of blocks that it holds, without those given up, in all lists and states."""
    @property
    def reserved_blocks(self) -> int:
        """Number of blocks reserved beyond its tokens, in all lists."""
    @property
    def closed(self) -> bool:
        """Whether the sequence was closed."""
    @property
    def state_tokens(self) -> int:
        """Number of tokens that its states hold: the final ones at the last append."""
    def blocks(self, list: int) -> list[int]:
        """Returns the ids of the blocks of a list, in order: 0, the null block, for each that was
        given up behind a window.
        """
    def blocks_given_up(self, list: int) -> int:
        """Returns the number of blocks of a list that were given up behind its window."""
    def announce(self, tokens: _Numbers) -> None:
        """Tells the ids of tokens that will be appended, so that the prefix cache can find them."""
    def extra_key(self, start: int, end: int, key: bytes) -> None:
        """Gives the tokens from `start` up to `end`, before the first of them is announced, a key that
        separates them from equal tokens: that of an image, for example.
        """
    def expect_return(self, seconds: float) -> None:
        """Tells that the next request of its session is expected in `seconds` seconds: when a tool
        that it calls returns, for example. Takes effect when the sequence is closed, with policies
        that use it and in `SessionInfo.returns_at_ms`; has no effect without a prefix cache.
        """
    def fork(self, id: int) -> GroupedSequence:
        """Opens another sequence that shares every block until one of the two writes. In a pool with
        states it raises InvalidSequenceArgument: they are not shared.
        """
    def commit(self, length: int) -> None:
        """Makes drafted tokens final, up to this length."""
    def accept(self, tokens: _Numbers) -> None:
        """Makes the drafted tokens with these ids final, and removes the other drafted ones."""
    def truncate(self, length: int) -> None:
        """Removes tokens from the end, down to this length.

        Raises SequenceError, and changes nothing: of the kind BehindWindow if a group has given up
        tokens that the next one would see; of the kind StateAhead if its states hold more tokens,
        unless none are left.
        """
    def reserve(self, tokens: int) -> None:
        """Reserves the blocks that the next `tokens` tokens need in all groups, or raises OutOfBlocks.
        Does not wait: see `Pool.reserve_grouped`.
        """
    def release_reservation(self) -> int:
        """Releases the reserved blocks, and returns their number."""
    def preempt(self) -> PreemptReport:
        """Closes the sequence to make room, and returns how many blocks became free or stay in the
        prefix cache, and how many tokens are still cached. Admit it again, with the same id.
        """
    def close(self) -> None:
        """Closes the sequence: its blocks are freed, or stay in the prefix cache, as do its states if
        it ends with a full block in every list. Does nothing if it is closed already.
        """
    def __len__(self) -> int: ...
    def __bool__(self) -> bool: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class GroupedAppend(_Record):
    """Result of an append to a grouped sequence."""
    @property
    def start(self) -> int:
        """Position of the first new token."""
    @property
    def stop(self) -> int:
        """Position behind the last new token."""
    @property
    def new_blocks(self) -> int:
        """Number of blocks taken in all lists, from reservations or allocated, including copies."""
    @property
    def copies(self) -> list[tuple[int, int, int]]:
        """The copies on write and, at the first append behind a cached prefix, those that restore
        the states. The engine makes them before its own writes: number of the list, or behind
        all lists of the state, and frames from and to.
        """
    @property
    def stepped(self) -> tuple[int, int]:
        """Positions of the tokens over which the batch steps the states, from and to: those
        between what they hold and the last final one. Drafts are among them once they are
        accepted, with the next append.
        """

@final
class Batch:
    """One step of an engine, under which tables are read and memory is used. A context manager.

    While it is in flight, no frame that it may have seen gets a new owner. When it ends, the full
    blocks that it filled are final: they can be shared, moved, and found in the prefix cache. If the
    `with` block raises, or the batch is dropped unfinished, the batch ends too, and what was
    written under it counts as not computed: each sequence is cut to where the batch's first write
    to it began. Its blocks stay reserved, so that the step can be tried again.

    A batch does not end normally while a writable view (`Pool.view`) exists of a block that becomes
    final: `finish`, and the end of the `with` block, raise Busy.
    """
    @property
    def ticket(self) -> int:
        """Its place in the order of batches."""
    @property
    def finished(self) -> bool:
        """Whether the batch has ended."""
    def append(self, sequence: Sequence, tokens: int) -> Append:
        """Appends final tokens: a prompt, a chunk of one, or decoded tokens. Their ids, if they were
        not announced, stay unknown.

        Raises OutOfBlocks; the sequence is then unchanged.
        """
    def append_tokens(self, sequence: Sequence, tokens: _Numbers) -> Append:
        """Appends final tokens with their ids, so that the prefix cache finds them."""
    def advance(self, sequence: Sequence, max: int | None = None) -> Append:
        """Appends the announced tokens that were not appended yet, at most `max` of them: a prompt
        behind its cached prefix, or a chunk of it. Only in a pool with a prefix cache.
        """
    def draft(self, sequence: Sequence, tokens: int) -> Append:
        """Appends speculative tokens: `Sequence.commit` makes some final, `Sequence.truncate` removes
        the rest.
        """
    def decode(self, sequences: Items[Sequence], tokens: _Numbers | None = None) -> DecodeStep:
        """Appends one token to each sequence, or to none: OutOfBlocks then names in `sequences` the
        sequences that lack blocks. `tokens` are their ids, if known.
        """
    def block_table(self, sequences: Items[Sequence], out: BlockTable | _Buffer) -> tuple[int, int]:
        """Fills a `BlockTable`, or writes into a `[rows, width]` int32 or int64 buffer. Returns the
        number of rows, and the number of columns that hold frames.

        Each row lists the frames of one sequence and is padded up to the width with the null block's
        frame, or -1 in a pool without one. Rows of the buffer behind the last sequence are left as
        they are.
        """
    def csr_table(self, sequences: Items[Sequence], indptr: _Buffer, indices: _Buffer, last_page_len: _Buffer) -> int:
        """Writes the table in compressed sparse rows, as FlashInfer expects it, into int32 or int64
        buffers: `indptr` of `[sequences + 1]`, `indices` of at least as many entries as there are
        blocks, `last_page_len` of `[sequences]`. Returns the number of blocks.
        """
    def slots(self, sequence: Sequence, start: int, stop: int) -> list[int]:
        """Returns the slots of tokens, where a kernel writes their K and V: `frame * block_tokens +
        offset`.
        """
    def slot_mapping(self, sequence: Sequence, start: int, stop: int, out: _Buffer, at: int = 0) -> int:
        """Writes the slots of tokens into a one-dimensional int32 or int64 buffer, from element `at`
        on. Returns their number.
        """
    def lengths(self, sequences: Items[Sequence]) -> list[int]:
        """Returns the number of tokens of each sequence, including drafted ones."""
    def store(
        self,
        sequence: Sequence,
        layer: int,
        start: int,
        stop: int,
        k: _Buffer,
        v: _Buffer | None = None,
        dtype: _Dtype | None = None,
    ) -> None:
        """Stores K and V of tokens in one layer: contiguous buffers `[tokens, kv_heads, head_dim]`, by
        default of the layout's dtype. `v` is None in a latent layout.

        numpy has no bf16: pass its bits as uint16. A quantised layout also takes "f32", "f16" and
        "bf16".
        """
    def load(
        self, sequence: Sequence, layer: int, start: int, stop: int, dtype: _Dtype | None = None
    ) -> tuple[bytes, bytes]:
        """Loads K and V of tokens in one layer, as `(k, v)` in bytes; the inverse of `store`."""
    def append_grouped(
        self, sequences: Items[GroupedSequence], tokens: Items[int | _Numbers]
    ) -> list[GroupedAppend]:
        """Appends tokens to each sequence. An entry of `tokens` is a number of tokens, those announced
        first, or the ids of tokens behind the announced ones.

        Raises OutOfBlocks if there are too few blocks: `sequences` are the ids of those that lack
        them. No sequence has grown then, and the others keep what they need as reservations, for
        the next try. An error about one sequence or its tokens has its position in `row`.
        """
    def draft_grouped(self, sequence: GroupedSequence, tokens: int) -> GroupedAppend:
        """Appends drafted tokens to a sequence: `accept` or `commit` makes some of them final. Its
        states stay as they are: the engine computes what follows the drafts from copies of its own.
        """
    def checkpoint(self, sequence: GroupedSequence) -> list[tuple[int, int, int]]:
        """Keeps the states of a sequence behind all of its tokens, so that later prompts with the same
        tokens can be hit here. Returns the copies that the engine makes, behind the batch's own
        work on the sequence: number of the state behind all lists, and frames from and to. None are
        needed if the states are cached already, or cannot be found later.

        Raises InvalidSequenceArgument unless the sequence ends with a full block in every list, as
        at `next_cut`; OutOfBlocks if there are no blocks for the copies.
        """
    def block_tables(
        self, sequences: Items[GroupedSequence], out: Iterable[BlockTable | _Buffer | None]
    ) -> list[int]:
        """Fills a table for each list, as `block_table` does: `out` has a `BlockTable`, a `[rows,
        width]` int32 or int64 buffer, or None for each list. Returns for each the number of columns
        that hold frames, 0 for None.

        The null block's frame stands in place of blocks that were given up behind a window. Nothing
        is written if a buffer is refused; `list` is its list.
        """
    def csr_table_grouped(
        self, sequences: Items[GroupedSequence], list: int, indptr: _Buffer, indices: _Buffer, last_page_len: _Buffer
    ) -> int:
        """Writes the table of one list in compressed sparse rows, as `csr_table` does. Returns the
        number of blocks.
        """
    def slot_mappings(
        self, sequences: Items[GroupedSequence], starts: _Numbers, stops: _Numbers, out: Iterable[_Buffer | None]
    ) -> int:
        """Writes the slots of tokens `starts[i]` to `stops[i]` of each sequence, one sequence behind
        the other, for each list: `frame * block_tokens + offset`, with the tokens of the list's
        blocks. `out` has a one-dimensional int32 or int64 buffer, or None, for each list. Returns
        their number.

        Nothing is written if a buffer is refused, with its `list`, or a token: SequenceError of the
        kind BehindWindow for one that was given up.
        """
    def entry_mapping(
        self,
        sequences: Items[GroupedSequence],
        starts: _Numbers,
        stops: _Numbers,
        list: int,
        ratio: int,
        out: _Buffer,
    ) -> int:
        """Writes the slots of the compressed entries in one list that tokens `starts[i]` to `stops[i]`
        of each sequence complete, one for each `ratio` tokens (`LayerGroup.ratio`): `frame *
        (block_tokens / ratio) + offset`, into a one-dimensional int32 or int64 buffer. Returns
        their number.
        """
    def finish(self) -> None:
        """Ends the batch. The work that uses its tables must have ended.

        A batch that was begun on a CUDA stream ends when the stream gets there.

        Raises Busy, with the block in `block`, if a writable view of a block exists that becomes
        final: full, of final tokens. The batch is then as before; delete the view, and call again.
        """
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        _value: BaseException | None = None,
        _traceback: TracebackType | None = None,
    ) -> None: ...

@final
class Tensor:
    """Memory of a pool as a tensor: of one block in one layer, or of all frames.

    Host memory is a buffer: `memoryview(t)` and `numpy.asarray(t)` make no copy. All memory, also of
    CUDA devices, has DLPack: `torch.from_dlpack(t)`. Elements of bf16 and fp8, which the buffer
    protocol has no codes for, are their bits there: uint16 and uint8.

    A view of a block keeps the block allocated and pinned while it, or any array made of it, exists.
    """
    @property
    def shape(self) -> tuple[int, ...]:
        """Extents: `[block_tokens, kv_heads, head_dim]` of a block, `[frames, block_tokens, kv_heads,
        head_dim]` of all frames. The last is 1 for scales.
        """
    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one index to the next, by dimension."""
    @property
    def dtype(self) -> _Dtype:
        """Name of the element type, as in `Layout.dtype`."""
    @property
    def device(self) -> str:
        """"host" or "cuda:N"."""
    @property
    def address(self) -> int:
        """Address of the first element."""
    @property
    def readonly(self) -> bool:
        """Whether the bytes are final."""
    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class PinnedPrefix:
    """A cached prefix that stays cached until it is closed, or collected. Also a context manager."""
    @property
    def tokens(self) -> int:
        """Number of tokens of the full blocks that are pinned."""
    @property
    def blocks(self) -> list[int]:
        """Ids of the blocks, in order."""
    def close(self) -> None:
        """Unpins the prefix. Does nothing if that was done already."""
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class PrefixCache:
    """The prefix cache of a pool. `Pool.prefix_cache` returns it."""
    @property
    def now_ms(self) -> int:
        """The time of the cache's clock in milliseconds, as in the answers of `Pool.hint` and in
        `SessionInfo`.
        """
    def stats(self) -> CacheStats:
        """Returns counts of lookups, hits and evictions."""
    def blocks(self) -> list[tuple[int, str]]:
        """Returns the cached blocks: pairs of block id and hash. Visits the whole pool."""
    def clear(self) -> None:
        """Makes every cached block unfindable, in the same time for any number. Blocks without an
        owner are evicted when their memory is needed, with LRU before those that are cached later;
        `evict` frees blocks at once.
        """
    def evict(self, keep: int = 0) -> int:
        """Evicts blocks without an owner until `keep` are left. Returns how many were evicted."""
    def begin_version(self, version: int, *, adapter: bytes | None = None) -> int:
        """Sets the version of the model's weights, or of an adapter's: requests that begin after the
        call find cached blocks of this version only, here, in tiers and on other nodes. Returns the
        version before; a new pool has version 0. Takes the same time for any number of blocks.

        Call it between the last batch that computes with the old weights and the first one that
        computes with the new ones. The number is the engine's, the same in all pools that exchange
        blocks, and never that of other weights. Blocks of an earlier version are found again after
        a return to it. Sequences go on: see `Sequence.versions`. Raises CacheError for an adapter
        without bytes.
        """
    def weights(self, adapter: bytes | None = None) -> tuple[int, int]:
        """Returns the current versions of the weights of the model, and of an adapter (0 without one)."""
    def uncache(self, hashes: list[str]) -> tuple[int, int]:
        """Makes all blocks of these hashes unfindable, because their contents are wrong; their owners
        keep them: also those that were written before and are registered later. Returns the number
        of blocks that became free, and of those that their owners keep.

        Blocks that were computed from them have other hashes: pass these too. Raises CacheError for
        a text that is no hash; nothing has changed.
        """
    def pin(
        self,
        tokens: _Numbers,
        *,
        salt: bytes | None = None,
        adapter: bytes | None = None,
        extra_keys: list[tuple[int, int, bytes]] | None = None,
    ) -> PinnedPrefix:
        """Keeps the cached prefix of these tokens from eviction until the result is closed.

        Raises CacheError if not even the first block is cached.
        """
    def events(self) -> Events:
        """Subscribes to the events of the cache, from now on."""

@final
class Events:
    """A subscription to the events of a prefix cache.

    `for event in events` blocks this thread without the GIL until there is one; `async for event in
    events` waits on asyncio. Both end with the pool: when it, its sequences and batches are closed.
    `drain` takes what is there. An `Events` is received from by one task at a time; others wait.
    """
    @property
    def lag(self) -> int | None:
        """Number of events that were not received yet; None while another task receives."""
    def drain(self, limit: int | None = None) -> list[Event]:
        """Returns the events that are there, without waiting; at most `limit`."""
    def __iter__(self) -> Self: ...
    def __next__(self) -> Event: ...
    def __aiter__(self) -> Self: ...
    def __anext__(self) -> Call[Event]: ...

@final
class Defragmenter:
    """A background task that compacts a pool whenever it is fragmented. It ends when this is stopped
    or collected, and with the pool. Also a context manager.
    """
    def totals(self) -> DefragmenterTotals:
        """Returns the totals so far."""
    def stop(self) -> Call[DefragmenterTotals]:
        """Stops the task, waits for its end, and returns the totals."""
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...

@final
class Admin:
    """The admin interface of a `FramePool`: page, metrics, statistics, owners, map, audit, and events
    of these, over HTTP. `await Admin.from_settings(pool, settings)` starts it.

    `kvpool stats`, `owners`, `top` and `audit` work on it. Questions about bytes, sequences and
    peers, and orders to move, resize and evict, are refused: the pool's engine has these.
    """
    @staticmethod
    def from_settings(pool: FramePool, settings: _Settings, *, number: int = 0) -> Call[Admin]:
        """Starts the admin interface of a pool of frames. `settings` are the path of a TOML file of
        `kvpool serve`, or a mapping with the same keys: `admin`, `admin_connections`, `name`,
        `token_file`, `read_token_file`, `tls_cert`, `tls_key`, `drain`. Others are refused by name.

        `number` tells apart pools with the same settings, such as those of an engine's ranks: it is
        added to the port, unless that is 0, and above 0 appended to the name.
        """
    def set_pool(self, pool: FramePool) -> None:
        """Serves another pool from now on, for an engine that makes its pool anew."""
    def report(self, engine: str, counters: Mapping[str, int]) -> None:
        """Adds counters of the engine to statistics and metrics, in place of those that it reported
        before.
        """
    def stats(self) -> Call[dict[str, Any]]:
        """Returns what `/stats` answers."""
    def reload(self, settings: _Settings | None = None) -> Call[str]:
        """Reads the settings again, or other ones, and applies certificates and tokens, completely or
        not at all. Returns the changes, and names those that need another start.
        """
    @property
    def address(self) -> str | None:
        """Its address, with the port that the system selected; None if the settings have none."""
    @property
    def name(self) -> str:
        """Its name."""
    def shutdown(self, patience: float | None = None) -> Call[None]:
        """Ends it when the requests in progress are answered, within `patience` seconds, by default
        those of `drain`. Then its port is free.
        """
    def close(self) -> None:
        """Ends it at once. Its port is free shortly afterwards."""

@final
class Node(AsyncIterator[tuple[Sequence | GroupedSequence, str]]):
    """A pool with links to the pools of other processes. `await Node.start(pool, ...)` makes one, and
    `await Node.from_settings(pool, settings)` one with the services of `kvpool serve`.

    While it is open, its peers are targets of `Pool.migrate` by their names. Sequences of peers
    arrive from `async for sequence, peer in node`: a GroupedSequence if it has several groups of
    layers or a state, else a Sequence.
    """
    @staticmethod
    def start(
        pool: Pool,
        name: str,
        *,
        listen: Items[str] = (),
        peers: Mapping[str, str] = {},
        token: bytes | None = None,
        tls: tuple[bytes, bytes, bytes] | None = None,
        restarts: Literal["proven", "by-name"] = "proven",
        doubt_limit: float | None = None,
    ) -> Call[Node]:
        """Starts a node of a pool with storage.

        Addresses are "host:port" or "unix:/path"; port 0 selects a free one. `peers` has the
        addresses of other nodes by name. Beyond the loopback, links need `tls`: certificates, key and
        authorities in PEM. `token` is a secret that both ends have.

        `restarts` tells when another process of a peer's name shows that the former one has ended:
        "proven", or "by-name" where at most one process of a name lives. After `doubt_limit`
        seconds without a link to its target, a sequence in doubt is this node's own again; if the
        target lives, both may run it.
        """
    @staticmethod
    def from_settings(pool: Pool, settings: _Settings) -> Call[Node]:
        """Starts the node of a pool with the services of `kvpool serve`: peers, admin interface with
        page and metrics, shared tier, membership, events of the cache, each as `settings` say. They
        are the path of its TOML file, or a mapping with the same keys; variables of the environment
        do not count.

        Settings of the pool, of traffic and of messages are refused: they are the engine's.
        Messages go to the logger `kvpool`.
        """
    @staticmethod
    def hash_key(settings: _Settings) -> bytes | None:
        """Returns the key of the hashes that these settings give, for `Pool(hash_key=...)`: nodes with
        the same secret exchange cached blocks. None without `hash_key_file` and `token_file`.
        """
    def reload(self, settings: _Settings | None = None) -> Call[str]:
        """Reads the settings again, or other ones, and applies peers, certificates and tokens,
        completely or not at all. Returns the changes, and names those that need another start.
        """
    def bring_back(
        self,
        tokens: _Numbers,
        *,
        salt: bytes | None = None,
        adapter: bytes | None = None,
        extra_keys: list[tuple[int, int, bytes]] | None = None,
        timeout: float | None = None,
    ) -> Call[int]:
        """Fetches the longest prefix of these tokens that the tier has, within `timeout` seconds, by
        default those of `tier_wait`. Returns the number of its blocks that are cached now. A
        failure is a miss.
        """
    def hint(self, envelope: _Envelope) -> Call[dict[str, Any]]:
        """Carries out hints as `Pool.hint` of the node's pool, and prefetches (kv.prefetch) by
        fetching the blocks from the node's tier in the background. As `POST /hints`. Raises
        InvalidArgument at once for an envelope that is refused as a whole.
        """
    def health(self) -> dict[str, Any]:
        """Returns what `/readyz` and `/healthz` of the admin interface answer: `ready`, whether it
        should get requests, the `reasons` if not, and the `state`: "ok", "draining" or
        "device_lost".
        """
    def services(self) -> Call[dict[str, Any]]:
        """Returns the counters of the services by group and name, with `failures` and `last_error`,
        and those of the node and its peers, as `/stats` of the admin interface does.
        """
    @property
    def admin_address(self) -> str | None:
        """Address of the admin interface, if there is one."""
    @property
    def event_addresses(self) -> list[str]:
        """Addresses of the events and of their replays, as far as they are published."""
    @property
    def name(self) -> str:
        """Its name."""
    @property
    def addresses(self) -> list[str]:
        """Addresses at which peers reach it, with the ports that the system selected."""
    def set_peers(self, peers: Mapping[str, str]) -> None:
        """Replaces the configured peers: addresses by name."""
    def stats(self) -> NodeStats:
        """Returns counts since it began."""
    def peers(self) -> Call[dict[str, bool]]:
        """Returns the peers, and whether a link to each is up."""
    def migrations(self) -> Call[list[MigrationState]]:
        """Returns the migrations under way and the latest that ended, the newest first."""
    def declare_ended(self, peer: str) -> Call[list[int]]:
        """Declares that the process of a peer has ended and will not come back, and returns the ids of
        the sequences that were in doubt and are this node's own again. If it lives, both may run
        them, and what it still writes by RDMA damages blocks of others. A peer with a link is
        refused.
        """
    def shutdown(self, patience: float | None = None) -> Call[bool]:
        """Ends the node in an orderly way: no migration begins, those under way finish, the tier and
        subscribers get the last blocks and events. All has `patience` seconds, by default those of
        `drain`, or 10. Returns whether no migration was left. Closes the node.
        """
    def close(self) -> None:
        """Ends the node at once: migrations under way fail, and their sequences stay. Its ports are
        free shortly afterwards; `shutdown`, also with `patience=0`, waits until they are.
        """
    def __aiter__(self) -> Self: ...
    def __anext__(self) -> Call[tuple[Sequence | GroupedSequence, str]]: ...

@final
class Map:
    """A picture of a pool, as an SVG document; notebooks show it."""
    @property
    def svg(self) -> str:
        """The SVG document."""
    def save(self, path: str | PathLike[str]) -> None:
        """Writes the document to a file."""
    def _repr_svg_(self) -> str: ...

@final
class Pool:
    """A pool of KV-cache blocks.

    `Pool(layout, blocks)` reserves host memory for `blocks` blocks, and one more for the null
    block.

    - `blocks_max`: size up to which `resize` can grow it.
    - `reserve`: blocks that only urgent requests get.
    - `prefix_cache`: True or the name of an eviction policy: "lru", "priority" or "sessions".
    - `events`: number of the cache's events that subscribers can receive late.
    - `hashing`: "fast" (default), or "keyed" for hostile tenants; `hash_key`: 32 bytes, the same in
      all processes whose caches exchange blocks; random by default. They and `events` are refused
      without a prefix cache.
    - `hints`: True to take hints about sessions and cached blocks (`hint`), or a mapping with
      limits: `pinned_bytes` at a time (default: a quarter of the pool), `session_bytes` of one
      session (the whole pool), `tenant_bytes` of the blocks of each tenant (no limit), and
      `longest`, the seconds of one hint (3,600). Needs a prefix cache.
    - `tenants`: a mapping from the number of each tenant to its limits, a mapping with `quota`, the
      bytes that it may hold, and `floor`, those below which no eviction for others takes it; each
      may be left out. `set_tenant` adds further ones. Needs a prefix cache.
    - `storage`: False for a pool that only manages frame numbers.
    - `device`: "host" (default), or "cuda:N" in a build with the feature `cuda`.
    - `null_block`: whether block 0 in frame 0 is set aside, to pad tables.
    - `threads`: number of threads expected to use it; sizes caches.
    - `zero_on_free`: wipe the bytes of freed blocks.

    `Pool.layered` builds one for a model whose layers differ.

    All methods are safe to call from any thread; short ones keep the GIL.
    """
    def __new__(
        cls,
        layout: Layout,
        blocks: int,
        *,
        blocks_max: int | None = None,
        reserve: int = 0,
        prefix_cache: bool | Literal["lru", "priority", "sessions"] | None = None,
        events: int | None = None,
        hashing: Literal["fast", "keyed"] | None = None,
        hash_key: bytes | None = None,
        hints: bool | _HintLimits | None = None,
        tenants: Mapping[int, _TenantLimits] | None = None,
        storage: bool = True,
        device: str | None = None,
        null_block: bool = True,
        threads: int | None = None,
        zero_on_free: bool = False,
    ) -> Self: ...
    @staticmethod
    def layered(
        groups: LayerGroups,
        *,
        memory: int | None = None,
        blocks: int | None = None,
        blocks_max: int | None = None,
        reserve: int = 0,
        prefix_cache: bool | Literal["lru", "priority", "sessions"] | None = None,
        events: int | None = None,
        hashing: Literal["fast", "keyed"] | None = None,
        hash_key: bytes | None = None,
        hints: bool | _HintLimits | None = None,
        tenants: Mapping[int, _TenantLimits] | None = None,
        threads: int | None = None,
        copier: Callable[[list[tuple[int, int]]], object] | None = None,
        storage: bool = False,
    ) -> Pool:
        """Builds a pool for a model whose layers differ: `memory` bytes, the null block among them, or
        `blocks` frames beside that one. The other arguments are those of `Pool`.

        The engine holds the bytes: the pool deals out frames of `groups.frame_bytes` bytes. With
        `storage`, the pool holds them in host memory (`plane(0)`) and makes all copies; then its
        sequences can be swapped (`preempt`, `resume`) and moved to other such pools (`migrate`).
        Its sequences are those of `admit_grouped`, with a list of blocks for each frame of a block
        of a group, and a run of frames for each state. Calls for other sequences are refused.

        Blocks can be moved if there is a `copier`: a function that takes pairs of frames, from and
        to, and returns when the engine has copied the bytes. It is called on another thread, while
        nothing writes the first and nothing else uses the second ones, and must not wait for other
        calls of this package, nor for the main thread, which may wait for it at the end of the
        interpreter for up to two seconds. An exception cancels the moves. An admission that finds
        no run for a state then waits while blocks are moved for it. The pool keeps the copier until
        it is closed: close it if the copier is a method of an object that has the pool.

        Raises BuildError, also for memory of less than two frames.
        """
    @property
    def groups(self) -> LayerGroups | None:
        """The groups of layers, of a pool for a model whose layers differ; otherwise None."""
    @property
    def layout(self) -> Layout:
        """Shape of the blocks; of a layered pool, the bytes of a frame as elements."""
    @property
    def total_blocks(self) -> int:
        """Number of blocks, without the null block."""
    @property
    def free_blocks(self) -> int:
        """Number of blocks that an allocation can get without evicting."""
    @property
    def available_blocks(self) -> int:
        """Number of blocks that an allocation can get, if necessary by evicting. Compare it with
        `blocks_needed`, which counts the evictable blocks of a cached prefix.
        """
    @property
    def sequence_count(self) -> int:
        """Number of open sequences."""
    @property
    def lost(self) -> bool:
        """Whether the pool's device failed."""
    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
    @property
    def prefix_cache(self) -> PrefixCache | None:
        """The prefix cache, or None in a pool without one."""
    def try_allocate(
        self,
        blocks: int,
        *,
        sequence: int | None = None,
        priority: _Priority = "normal",
        pinned: bool = False,
        contiguous: bool = False,
    ) -> Lease:
        """Allocates blocks that are free now, or raises OutOfBlocks. Never waits.

        `contiguous` asks for one run of consecutive frames; `pinned` blocks are not moved.
        """
    def allocate(
        self,
        blocks: int,
        *,
        sequence: int | None = None,
        priority: _Priority = "normal",
        pinned: bool = False,
        contiguous: bool = False,
        timeout: float | None = None,
    ) -> Call[Lease]:
        """Allocates blocks, and waits in the queue for them if necessary: `await pool.allocate(10)`.

        Urgent requests come first, then high, then normal ones, in order of arrival. For a
        `contiguous` request, blocks are moved out of the way. Raises Timeout after `timeout`
        seconds, with what was free. Cancelling passes the turn on.
        """
    def info(self, handle: Handle) -> BlockState:
        """Returns the state of a block."""
    def sequence(
        self,
        id: int,
        tokens: _Numbers | None = None,
        *,
        priority: _Priority = "normal",
        salt: bytes | None = None,
        adapter: bytes | None = None,
        extra_keys: list[tuple[int, int, bytes]] | None = None,
        reuse_tail: bool = False,
        session: int | None = None,
        tenant: int | None = None,
    ) -> Sequence:
        """Opens a sequence, with the cached prefix of `tokens` if they are given: its length is then
        the number of cached tokens, and the others must be appended.

        Only sequences with equal `salt` and `adapter` share blocks. `extra_keys` are
        start, end and key of ranges of tokens, such as images: from these on, keys must be equal
        too. `reuse_tail` also allows hits that fill a block in part. `session` is the number of the
        conversation that the request continues, `tenant` that of the tenant whose quota its new
        blocks count for.
        """
    def try_admit(
        self,
        id: int,
        prompt: _Numbers,
        *,
        headroom: int = 0,
        priority: _Priority = "normal",
        salt: bytes | None = None,
        adapter: bytes | None = None,
        extra_keys: list[tuple[int, int, bytes]] | None = None,
        reuse_tail: bool = False,
        contiguous: bool = False,
        leave: int = 0,
        session: int | None = None,
        tenant: int | None = None,
    ) -> Sequence:
        """Opens a sequence with the cached prefix of its prompt, and reserves the blocks for the rest
        of it and for `headroom` tokens, or raises OutOfBlocks. Never waits. Admits only if `leave`
        blocks stay available besides, for running sequences.
        """
    def admit(
        self,
        id: int,
        prompt: _Numbers,
        *,
        headroom: int = 0,
        priority: _Priority = "normal",
        salt: bytes | None = None,
        adapter: bytes | None = None,
        extra_keys: list[tuple[int, int, bytes]] | None = None,
        reuse_tail: bool = False,
        contiguous: bool = False,
        leave: int = 0,
        session: int | None = None,
        tenant: int | None = None,
        timeout: float | None = None,
    ) -> Call[Sequence]:
        """Opens a sequence with the cached prefix of its prompt, and reserves the blocks for the rest
        of it and for `headroom` tokens; waits in the queue if necessary. Appends within them cannot
        fail. Admits only if `leave` blocks stay available besides, for running sequences.
        """
    def try_admit_grouped(
        self,
        id: int,
        prompt: _Numbers,
        *,
        headroom: int = 0,
        priority: _Priority = "normal",
        salt: bytes | None = None,
        adapter: bytes | None = None,
        extra_keys: list[tuple[int, int, bytes]] | None = None,
        leave: int = 0,
        chunk: int | None = None,
        session: int | None = None,
        tenant: int | None = None,
    ) -> GroupedSequence:
        """Opens a sequence in every group of layers, with the longest prefix that is cached in all,
        and reserves the blocks for the rest of its prompt and for `headroom` tokens in all groups,
        or raises OutOfBlocks. Never waits.

        - `leave`: blocks that stay available besides, for running sequences.
        - `chunk`: largest number of tokens of an append. Of layers with a window, blocks for the
          window and one chunk are reserved, not those of the whole prompt; later appends allocate.
        - `session`: number of the conversation that the request continues. All but its last two
          checkpoints are then evicted before other cached blocks.
        - `tenant`: number of the tenant whose quota its new blocks count for, of all groups.
        """
    def admit_grouped(
        self,
        id: int,
        prompt: _Numbers,
        *,
        headroom: int = 0,
        priority: _Priority = "normal",
        salt: bytes | None = None,
        adapter: bytes | None = None,
        extra_keys: list[tuple[int, int, bytes]] | None = None,
        leave: int = 0,
        chunk: int | None = None,
        session: int | None = None,
        tenant: int | None = None,
        timeout: float | None = None,
    ) -> Call[GroupedSequence]:
        """As `try_admit_grouped`, but waits in the queue if necessary: in one place of it for the
        blocks of all groups. Raises Timeout after `timeout` seconds. Cancelling passes the turn on.
        """
    def reserve(self, sequence: Sequence, tokens: int, *, timeout: float | None = None) -> Call[None]:
        """Reserves the blocks that the next `tokens` tokens of a sequence need, and waits for them if
        necessary, before admissions of its priority.
        """
    def reserve_grouped(self, sequence: GroupedSequence, tokens: int, *, timeout: float | None = None) -> Call[None]:
        """As `reserve`, for a sequence in a pool of a model whose layers differ: the blocks of all its
        lists, or none.
        """
    def blocks_needed(
        self,
        prompt: _Numbers,
        *,
        headroom: int = 0,
        salt: bytes | None = None,
        adapter: bytes | None = None,
        extra_keys: list[tuple[int, int, bytes]] | None = None,
    ) -> int:
        """Returns the number of available blocks that an admission of this request would take now: the
        evictable ones of its cached prefix, and those for the rest of it and for `headroom` tokens.

        While no other call uses the pool, no batch is in flight and no request waits, it is
        admitted if and only if this is at most `available_blocks`; see the core's documentation for
        the exceptions.
        """
    def begin_batch(self, *, stream: int | None = None) -> Batch:
        """Begins a batch; with `stream`, the address of a CUDA stream, one whose copies and end are in
        order with the work on it.

        Raises KvPoolError, of the kind TooManyBatches, if 4,096 batches are in flight.
        """
    def view(self, owner: Lease | Sequence, place: int, layer: int, part: _Part = "k") -> Tensor:
        """Returns the bytes of one block in one layer, where they are stored: `[block_tokens,
        kv_heads, head_dim]`. `place` is the block's index in the lease or sequence; `part` is "k"
        or "v", or "k_scales" or "v_scales" of a layout with dynamic scales.

        Writable unless the block is sealed or shared. While the view, or an array made of it,
        exists, its block stays allocated and pinned: it is neither moved nor evicted, and its lease
        or sequence cannot be closed, truncated, split, forked or moved to another pool. While a
        writable one exists, its block does not become final: the batch that filled it does not end
        without an exception, and `commit` and `seal` are refused.
        """
    def plane(self, layer: int, part: _Part = "k") -> Tensor:
        """Returns the memory of all frames of one layer: `[frames, block_tokens, kv_heads, head_dim]`,
        as attention kernels take it. Index it by the frames of a block table.

        Only frames that a batch in flight lists may be accessed, and only blocks written that their
        sequence or lease alone owns: the pool does not check it. Memory of frames that a shrink
        removes has unspecified bytes on the host, and is gone on a device.
        """
    def stats(self) -> Stats:
        """Returns the pool's occupancy."""
    def fragmentation(self) -> FragmentationState:
        """Returns the fragmentation of the free frames. Scans the bitmaps."""
    def sequence_runs(self) -> RunsPerSequence:
        """Returns the runs of adjacent frames in the block tables of the open sequences. Reads the
        word of each of their blocks.
        """
    @property
    def compaction_state(self) -> str | None:
        """What the background defragmenter does, or why it rests: "moving", "contiguous", "batches",
        "no_gain" or "share". None without one.
        """
    def victims(self) -> list[Candidate]:
        """Returns the open sequences in the order in which to preempt them: lowest priority first."""
    def audit(self) -> Audit:
        """Recounts every frame, and the references by their owners, while no thread uses the pool.
        Raises AuditError if anything is wrong.

        It tries again for a tenth of a second: `Thread.join` may return before the thread has given
        back what it cached of the pool.
        """
    def hint(self, envelope: _Envelope) -> dict[str, Any]:
        """Carries out the hints in an envelope about the future use of cached blocks, in order, and
        returns what became of them: `{"message_id": ..., "outcomes": [{"action_id": ...,
        "outcome": "accepted", "blocks": 25}, ...]}`. Releases the GIL.

        The envelope is that of vLLM and Dynamo: a mapping, an object with its attributes (vLLM's
        `KvHintsEnvelope`), or MessagePack in a bytes-like object. It has `protocol_version`,
        `message_id` and `actions` of `action_id`, `action_type`, `action_version` and `payload`.
        The payload names the blocks by `session_id`, by `block_hashes`, or by `sequence_id` with
        `start` and `end`; types are kv.retain (`priority`, `ttl_seconds`), kv.pin (`ttl_seconds`),
        kv.demote, kv.evict, kv.prefetch and kv.release. A prefetch is for `Node.hint`, of a node
        with a tier; here it is rejected.

        The outcome is "accepted", "clipped" (granted in part, `until` a time of the cache's clock),
        "deferred" (until owners release the blocks), "missing", or "rejected", with `reason` and
        `detail`: also for an action that is not understood, and for all in a pool without hints.
        Raises InvalidArgument for an envelope that is refused as a whole.
        """
    def sessions(self) -> list[SessionInfo]:
        """Returns the sessions of a pool with hints, those used last first; 65,536 of them are
        remembered. Looks all of their blocks up: for diagnosis, not for every step.
        """
    def set_tenant(self, tenant: int, *, quota: int | None = None, floor: int = 0) -> None:
        """Sets the limits of a tenant in bytes, and adds it if the pool does not know it: up to 64.
        A quota below what the tenant holds evicts nothing by itself.

        Raises InvalidArgument if the pool was built without `tenants`, for a quota below the floor,
        and for floors that exceed the pool together.
        """
    def tenants(self) -> list[TenantInfo]:
        """Returns what the tenants of the pool hold, in the order in which they were added."""
    def trim(self) -> None:
        """Gives the free blocks in threads' caches back to all."""
    def map(self, title: str = "kvpool") -> Map:
        """Returns a picture of all frames: which are free, owned, cached or fixed. The groups of a
        layered pool have a shade each.
        """
    def defragment(self, *, order: int | None = None, budget_bytes: int | None = None) -> Call[DefragmentReport]:
        """Compacts the pool: moves sealed blocks together, while others are allocated and freed.
        Evictable blocks in their way are dropped.

        `order` is log2 of the length of the runs of free and evictable frames to gain,
        `budget_bytes` a bound on what is moved. Cancelling ends it after the moves under way.
        """
    def start_defragmenter(
        self, *, threshold: float = 0.02, interval: float = 0.002, share: float = 0.02
    ) -> Defragmenter:
        """Starts a task, on a thread of the package, that compacts the pool while its fragmentation
        rate is above `threshold` (0 to 1), and looks every `interval` seconds. In a pool full of
        evictable blocks: above 0.25, and at most a `share` (0 to 1) of the allocated blocks.
        """
    def resize(self, blocks: int, *, patience: float | None = None) -> Call[Resized]:
        """Changes the number of blocks while the pool serves. A shrink moves blocks in use below the
        new end, and returns memory to the system.

        It gives up after `patience` seconds without progress (0.2 by default): ResizeError then
        names the blocks that cannot move, and the pool keeps its size, as it does when cancelled.
        """
    def migrate(
        self, sequence: _S, target: Pool | str, *, timeout: float | None = None
    ) -> Call[tuple[_S | None, Migrated]]:
        """Moves a sequence to another pool, or to the node of this name, when the batches that write
        it have ended. It is closed here, and continues there with the same id, tokens and bytes.
        Does not wait for room there.

        Returns the sequence in the other pool (None for a node) and a report. If it fails, the
        sequence is as before. Cancelling a move to a pool leaves the sequence here, and frees the
        blocks there after the piece that is being copied (64 MiB at most); a move to a node goes
        on, and the sequence is Busy until its outcome is known.

        A GroupedSequence goes with all its lists and states to a layered pool of the same groups
        with storage, here or of a node.
        """
    def preempt(
        self, sequence: _S, *, swap: Pool | None = None, timeout: float | None = None
    ) -> Call[tuple[PreemptReport, _S | None]]:
        """Takes the blocks of a running sequence: closes it, or with `swap` moves it to another pool,
        when the batches that write it have ended. Returns a report, and the sequence there.

        If it fails or is cancelled, the sequence is as before. A cancelled swap frees the blocks
        there after the piece that is being copied (64 MiB at most). A GroupedSequence is swapped
        with all its lists and states, as by `migrate`.
        """
    def resume(
        self, sequence: _S, *, headroom: int = 0, leave: int = 0, timeout: float | None = None
    ) -> Call[tuple[_S, Migrated]]:
        """Moves a swapped sequence back to this pool, with blocks for `headroom` tokens, if `leave`
        blocks stay available besides; waits for them in its turn among the admissions. Returns the
        sequence here and a report.

        If it fails or is cancelled, the sequence is as before. A cancelled one frees the blocks
        here after the piece that is being copied (64 MiB at most).
        """
    def settled(self, ticket: int, *, timeout: float | None = None) -> Call[None]:
        """Waits until every batch up to the one of this number has ended."""
    def close(self) -> None:
        """Closes the pool: later calls on this object raise Closed, and streams of events end. Memory
        is returned when its leases, sequences, batches and views are gone too.
        """
    def __enter__(self) -> Self: ...
    def __exit__(self, *_exception: object) -> None: ...
    def _repr_html_(self) -> str: ...

@final
class BlockState(_Record):
    """A snapshot of a block."""
    @property
    def block(self) -> int:
        """Id of the block."""
    @property
    def frame(self) -> int:
        """Frame with its bytes."""
    @property
    def references(self) -> int:
        """Number of references."""
    @property
    def pins(self) -> int:
        """Number of pins: while above 0, it is neither evicted nor moved."""
    @property
    def sealed(self) -> bool:
        """Whether its bytes are final."""
    @property
    def sequence(self) -> int | None:
        """Sequence that it was allocated for."""
    @property
    def priority(self) -> str:
        """Priority of the request that it was allocated for."""
    @property
    def generation(self) -> int:
        """Number of times that it has been freed."""

@final
class Append(_Record):
    """Result of an append."""
    @property
    def start(self) -> int:
        """Position of the first new token."""
    @property
    def stop(self) -> int:
        """Position behind the last new token."""
    @property
    def new_blocks(self) -> int:
        """Number of blocks taken, including a copy."""
    @property
    def copied(self) -> tuple[int, int] | None:
        """The copy on write, as frames (from, to). A pool with storage has copied the bytes;
        without storage the engine must, before its own writes.
        """

@final
class DecodeStep(_Record):
    """Result of a decode step."""
    @property
    def new_blocks(self) -> int:
        """Number of blocks taken, from reservations or allocated, including copies."""
    @property
    def copied(self) -> list[tuple[int, int, int]]:
        """The copies on write: the index of the sequence in the step, and frames from and to."""

@final
class Stats(_Record):
    """Occupancy of a pool, in blocks.

    `free + reserved + retired + held + evictable + used == total`, while no thread is inside a
    call.
    """
    def _repr_html_(self) -> str:
        """A table and a bar, for notebooks."""
    @property
    def total(self) -> int:
        """Blocks in the pool, without the null block."""
    @property
    def used(self) -> int:
        """Owned blocks."""
    @property
    def free(self) -> int:
        """Blocks that any allocation can get without evicting."""
    @property
    def available(self) -> int:
        """Free and evictable blocks."""
    @property
    def evictable(self) -> int:
        """Blocks without an owner that the prefix cache keeps until their frames are needed."""
    @property
    def retired(self) -> int:
        """Freed blocks that a batch in flight may still read."""
    @property
    def reserved(self) -> int:
        """Free blocks reserved for urgent requests."""
    @property
    def held(self) -> int:
        """Free blocks kept by moves or by a shrink in progress."""
    @property
    def in_magazines(self) -> int:
        """The part of the free blocks that is in threads' caches."""
    @property
    def waiting(self) -> int:
        """Requests that wait in the queue."""
    @property
    def waiting_by_priority(self) -> list[int]:
        """The same by priority: normal, high, urgent."""
    @property
    def utilization(self) -> float:
        """`used / total`, 0 to 1."""
    @property
    def pressure(self) -> str:
        """"low", "medium", "high" or "critical"."""
    @property
    def batches_in_flight(self) -> int:
        """Batches in flight."""
    @property
    def batches_abandoned(self) -> int:
        """Batches that wrote to a sequence and did not finish."""
    @property
    def closing(self) -> int:
        """Closed sequences whose blocks, counted as used, are cached once batches in flight
        finish.
        """
    @property
    def oldest_batch(self) -> int | None:
        """Ticket of the oldest batch in flight."""
    @property
    def oldest_batch_seconds(self) -> float | None:
        """Lower bound of its age in seconds."""
    @property
    def turn(self) -> str | None:
        """The task whose turn it is to move blocks, with its age."""
    @property
    def in_transfer(self) -> int:
        """Owned blocks whose bytes are being transferred."""
    @property
    def quarantined(self) -> int:
        """Owned blocks of transfers that were given up."""
    @property
    def allocation_ns_p50(self) -> int:
        """Median of the sampled latencies of allocations, in nanoseconds."""
    @property
    def allocation_ns_p99(self) -> int:
        """Their 99th percentile, in nanoseconds."""

@final
class FragmentationState(_Record):
    """Fragmentation of the free frames."""
    @property
    def order(self) -> int:
        """log2 of the length of the runs that count."""
    @property
    def rate(self) -> float:
        """Share of the possible free runs of that length that do not exist, 0 to 1."""
    @property
    def unusable(self) -> float:
        """Share of the free frames outside of such runs, 0 to 1."""
    @property
    def free_by_order(self) -> list[int]:
        """Number of free aligned runs of each order."""
    @property
    def longest_run(self) -> int:
        """Length of the longest free run in frames."""
    @property
    def mean_run(self) -> float:
        """Mean length of the free runs in frames."""

@final
class RunsPerSequence(_Record):
    """Runs of adjacent frames in the block tables of the open sequences. 0 without any."""
    @property
    def sequences(self) -> int:
        """Open sequences with blocks."""
    @property
    def mean(self) -> float:
        """Mean number of runs of a sequence."""
    @property
    def p50(self) -> int:
        """Its median."""
    @property
    def p99(self) -> int:
        """Its 99th percentile."""
    @property
    def mean_run(self) -> float:
        """Mean length of the runs in blocks."""

@final
class DefragmentReport(_Record):
    """Result of a compaction."""
    @property
    def moved_blocks(self) -> int:
        """Blocks that were moved to another frame."""
    @property
    def moved_bytes(self) -> int:
        """Their bytes."""
    @property
    def dropped_blocks(self) -> int:
        """Evictable blocks that were dropped from the frames to which blocks moved."""
    @property
    def given_up(self) -> int:
        """Planned moves that did not take place."""
    @property
    def waves(self) -> int:
        """Groups of moves that were copied together."""
    @property
    def seconds(self) -> float:
        """Time without the wait for other runs."""
    @property
    def fragmentation_before(self) -> float:
        """Fragmentation rate before, 0 to 1."""
    @property
    def fragmentation_after(self) -> float:
        """Fragmentation rate after, 0 to 1."""
    @property
    def available_fragmentation_before(self) -> float:
        """Fragmentation rate of free and evictable frames before, 0 to 1."""
    @property
    def available_fragmentation_after(self) -> float:
        """Fragmentation rate of free and evictable frames after, 0 to 1."""
    @property
    def runs_gained(self) -> int:
        """Increase in the number of runs of free and evictable frames; negative if other threads
        took more.
        """
    @property
    def fixed_blocks(self) -> int:
        """Blocks that could not move: unsealed, pinned, or moving."""
    @property
    def is_worse(self) -> bool:
        """Whether blocks were moved and fewer runs are left, because of what others did meanwhile."""

@final
class DefragmenterTotals(_Record):
    """Totals of a background defragmenter."""
    @property
    def runs(self) -> int:
        """Runs that moved at least one block."""
    @property
    def failed(self) -> int:
        """Runs that ended because a copy failed."""
    @property
    def looks(self) -> int:
        """Inspections of the pool."""
    @property
    def moved_blocks(self) -> int:
        """Blocks that were moved."""
    @property
    def moved_bytes(self) -> int:
        """Their bytes."""
    @property
    def dropped_blocks(self) -> int:
        """Evictable blocks that were dropped from the frames to which blocks moved."""
    @property
    def given_up(self) -> int:
        """Planned moves that did not take place."""
    @property
    def seconds(self) -> float:
        """Time spent in runs."""

@final
class Resized(_Record):
    """Result of a resize."""
    @property
    def before(self) -> int:
        """Number of blocks before."""
    @property
    def after(self) -> int:
        """Number of blocks after."""
    @property
    def moved_blocks(self) -> int:
        """Blocks that were moved out of the way."""
    @property
    def seconds(self) -> float:
        """Total time, including waits."""

@final
class Migrated(_Record):
    """Result of a migration."""
    @property
    def tokens(self) -> int:
        """Tokens of the sequence."""
    @property
    def shared_blocks(self) -> int:
        """Blocks that the target had cached already."""
    @property
    def copied_blocks(self) -> int:
        """Blocks that were copied."""
    @property
    def copied_bytes(self) -> int:
        """Bytes that were copied."""
    @property
    def runs(self) -> int:
        """Runs of frames that were copied: one descriptor each."""
    @property
    def seconds(self) -> float:
        """Time of the copies."""

@final
class Candidate(_Record):
    """An open sequence, and what its end would give back."""
    @property
    def id(self) -> int:
        """Id of the sequence."""
    @property
    def priority(self) -> str:
        """Its priority."""
    @property
    def tokens(self) -> int:
        """Its tokens."""
    @property
    def blocks(self) -> int:
        """Its blocks, reserved ones included."""
    @property
    def freed_blocks(self) -> int:
        """Blocks that would be free."""
    @property
    def cached_blocks(self) -> int:
        """Blocks that would stay in the prefix cache, evictable."""
    @property
    def shared_blocks(self) -> int:
        """Blocks that others share."""

@final
class PreemptReport(_Record):
    """Result of a preemption."""
    @property
    def id(self) -> int:
        """Id of the sequence."""
    @property
    def freed_blocks(self) -> int:
        """Blocks that became free."""
    @property
    def cached_blocks(self) -> int:
        """Blocks that stay in the prefix cache."""
    @property
    def shared_blocks(self) -> int:
        """Blocks that others share."""
    @property
    def tokens_kept(self) -> int:
        """Tokens that need not be computed again."""
    @property
    def tokens_lost(self) -> int:
        """Tokens that must be computed again."""

@final
class Audit(_Record):
    """What an audit counted, in frames."""
    @property
    def total(self) -> int:
        """All frames, including the null block's."""
    @property
    def in_bitmap(self) -> int:
        """Frames that are free in the bitmaps."""
    @property
    def in_magazines(self) -> int:
        """Frames that are free in threads' caches."""
    @property
    def retired(self) -> int:
        """Retired frames."""
    @property
    def held(self) -> int:
        """Held frames."""
    @property
    def unwiped(self) -> int:
        """The part of `held` that is held for good, because it could not be wiped."""
    @property
    def reserved(self) -> int:
        """Free frames reserved for urgent requests."""
    @property
    def evictable(self) -> int:
        """Frames of evictable blocks."""
    @property
    def owned(self) -> int:
        """Frames of owned blocks."""
    @property
    def references(self) -> int:
        """References on owned blocks."""

@final
class VersionRange(_Record):
    """Tokens of a sequence that were computed with the same versions of the weights. They end
    where the next range begins, or the sequence ends.
    """
    @property
    def start(self) -> int:
        """Position of the first of them."""
    @property
    def model(self) -> int:
        """Version of the model."""
    @property
    def adapter(self) -> int | None:
        """Version of the adapter, 0 without one; None if it changed after the batch had begun."""

@final
class SessionInfo(_Record):
    """A session, as a pool with hints knows it. Times are milliseconds of the cache's clock, which
    `PrefixCache.now_ms` reads.
    """
    @property
    def id(self) -> int:
        """Its number."""
    @property
    def requests(self) -> int:
        """Number of its requests that were closed."""
    @property
    def cached_blocks(self) -> int:
        """Blocks of its last closed request that are cached, in all groups of layers."""
    @property
    def cached_bytes(self) -> int:
        """Bytes of these blocks; a block that several sessions share counts for each."""
    @property
    def last_use_ms(self) -> int:
        """When its last request was closed."""
    @property
    def returns_at_ms(self) -> int | None:
        """When its next request is expected."""
    @property
    def retained_until_ms(self) -> int | None:
        """Until when its blocks are retained or pinned."""
    @property
    def pinned_bytes(self) -> int:
        """Bytes that it has pinned until then."""

@final
class TenantInfo(_Record):
    """What a tenant of a pool holds, and its limits. Counters are since the pool was built."""
    @property
    def id(self) -> int:
        """Its number."""
    @property
    def quota_bytes(self) -> int | None:
        """Bytes that it may hold."""
    @property
    def floor_bytes(self) -> int:
        """Bytes below which no eviction for others takes it."""
    @property
    def held_bytes(self) -> int:
        """Bytes that it holds, owned and cached."""
    @property
    def owned_bytes(self) -> int:
        """Bytes of its blocks that have owners, perhaps of other tenants."""
    @property
    def cached_bytes(self) -> int:
        """Bytes of its cached blocks without owners."""
    @property
    def kept_bytes(self) -> int:
        """Bytes of its blocks that hints retain or pin, in a pool with `tenant_bytes` in `hints=`."""
    @property
    def lookup_blocks(self) -> int:
        """Full blocks of its prompts that were looked up."""
    @property
    def hit_blocks(self) -> int:
        """Those of them that were cached."""
    @property
    def hit_tokens(self) -> int:
        """Tokens of these blocks."""
    @property
    def evicted_blocks(self) -> int:
        """Its blocks that were evicted, for itself or for others."""
    @property
    def protected_evictions(self) -> int:
        """Evictions that passed over its cached blocks because of its floor."""
    @property
    def refused_requests(self) -> int:
        """Requests that were refused because of its quota."""

@final
class CacheStats(_Record):
    """Counts of the prefix cache since the pool was built."""
    @property
    def lookups(self) -> int:
        """Prompts that were looked up. A request counts once, at its first append, and not if it
        came back after a preemption.
        """
    @property
    def lookup_blocks(self) -> int:
        """Full blocks of those prompts."""
    @property
    def hit_blocks(self) -> int:
        """Leading blocks that were cached."""
    @property
    def resumed_lookups(self) -> int:
        """Prompts of requests that came back after a preemption, which find what they have
        computed.
        """
    @property
    def resumed_lookup_blocks(self) -> int:
        """Full blocks of those prompts."""
    @property
    def resumed_hit_blocks(self) -> int:
        """Leading blocks of those prompts that were cached."""
    @property
    def registered_blocks(self) -> int:
        """Blocks that were registered."""
    @property
    def evicted_blocks(self) -> int:
        """Blocks that were evicted."""
    @property
    def uncached_blocks(self) -> int:
        """Blocks that `uncache` has taken out of the cache."""
    @property
    def hit_rate(self) -> float:
        """`hit_blocks / lookup_blocks`, 0 before the first lookup."""

@final
class Event(_Record):
    """A change of a prefix cache."""
    @property
    def kind(self) -> str:
        """"stored", "removed", "cleared" or "resync". After a resync, events were lost because they
        were received too slowly: list the cached blocks again.
        """
    @property
    def number(self) -> int:
        """Number of events before it, since the subscription."""
    @property
    def block(self) -> int | None:
        """The block that was stored or removed."""
    @property
    def hash(self) -> str | None:
        """The hash by which it is, or was, found."""
    @property
    def parent(self) -> str | None:
        """Hash of the block before a stored one."""
    @property
    def tokens(self) -> list[int]:
        """Token ids of a stored block; empty if unknown."""
    @property
    def block_tokens(self) -> int | None:
        """Tokens per block."""
    @property
    def group(self) -> int | None:
        """The group of layers of the block: a list of a sequence, or behind them a state."""
    @property
    def extra_keys(self) -> list[tuple[int, bytes]]:
        """Position relative to the block's first token, and key, of each extra key of a stored
        block.
        """
    @property
    def lost(self) -> int:
        """Number of lost events."""

@final
class MigrationState(_Record):
    """A migration, as one of its nodes sees it."""
    @property
    def id(self) -> str:
        """Id, the same on both nodes."""
    @property
    def peer(self) -> str:
        """Name of the other node."""
    @property
    def sequence(self) -> int | None:
        """Id of the sequence; None for cached blocks."""
    @property
    def state(self) -> str:
        """State."""
    @property
    def blocks(self) -> int:
        """Blocks of the migration."""
    @property
    def bytes(self) -> int:
        """Bytes that were transferred so far."""
    @property
    def time_ms(self) -> int:
        """Milliseconds since the beginning, or from the beginning to the end."""
    @property
    def reason(self) -> str | None:
        """Why it failed, if it did."""

@final
class NodeStats(_Record):
    """Counts since a node began."""
    @property
    def sent(self) -> int:
        """Migrations, offloads and fetches that it sent, and that arrived."""
    @property
    def received(self) -> int:
        """Those that it received."""
    @property
    def refused(self) -> int:
        """Those that a target refused."""
    @property
    def failed(self) -> int:
        """Those that failed otherwise."""
    @property
    def bad_blocks(self) -> int:
        """Blocks that arrived with wrong checksums."""
    @property
    def damaged_blocks(self) -> int:
        """Cached blocks that were dropped when a peer asked for them, because the memory had
        damaged them.
        """
    @property
    def in_doubt(self) -> int:
        """Times that the owner of a sequence was in doubt."""
    @property
    def sent_bytes(self) -> int:
        """Bytes that it wrote to peers."""

_Frames = Iterable[int] | _Buffer

@final
class FrameKeys:
    """Keys of a pool, made by `FramePool.keys`. They are accepted wherever hashes are."""
    def __len__(self) -> int: ...

_Hashes = FrameKeys | Iterable[bytes]

@final
class FrameMoves:
    """Moves that `FramePool.propose_moves` proposes: the engine copies each pair, and commits.

    Until then the destinations are held, and the sources are not evicted. An object that is dropped
    cancels its moves.
    """
    def pairs(self) -> list[tuple[int, int]]:
        """The copies to make: pairs of source and destination frame. No frame occurs twice."""
    def commit(self) -> tuple[list[tuple[int, int]], list[tuple[int, str]]]:
        """Makes the copied moves take effect. Returns the pairs that moved, and the frames that stayed
        with the reason: they got references, or lost their keys.
        """
    def cancel(self) -> None:
        """Cancels all moves. Does nothing if they were committed or cancelled."""
    def __len__(self) -> int: ...

@final
class FrameBatch:
    """A batch in flight: frames that are freed meanwhile are not reused before it ends."""
    def end(self) -> None:
        """Ends the batch. Does nothing if it has ended."""
    def __enter__(self) -> Self: ...
    def __exit__(self, _kind: object, _error: object, _trace: object) -> None: ...

@final
class FramePool:
    """A pool whose ids are frames, for engines with ids, hashes and schedulers of their own.

    Frames are given as lists of integers or as buffers of u32, such as `array("I")` and numpy
    arrays. A list is checked as a whole: it is refused with the position of the first wrong entry,
    and changes nothing. A frame that is freed twice is refused by name. All methods may be called
    from several threads at once.

    `frames` is the number of frames beside the null block's, which is frame 0 unless
    `null_block` is false.
    """
    def __new__(
        cls,
        frames: int,
        *,
        frames_max: int | None = None,
        segment_frames: int | None = None,
        magazine_frames: int | None = None,
        threads: int | None = None,
        null_block: bool = True,
        fragmentation_order: int | None = None,
        hash_key: bytes | None = None,
    ) -> Self: ...
    @property
    def frames(self) -> int:
        """The number of frames, with the null block's: all frame numbers are below it."""
    @property
    def available(self) -> int:
        """The number of frames that an allocation can get: free, or cached without references."""
    @property
    def used(self) -> int:
        """The number of frames with references. O(threads)."""
    def allocate(
        self, blocks: int, *, runs: bool = False, ahead: int = 0, sequence: int | None = None
    ) -> list[int]:
        """Allocates `blocks` frames, each with one reference.

        Free frames come first, then cached ones without references are evicted, in the order in
        which they were freed. With `runs`, the frames lie in few runs, in ascending order.
        `ahead` is the number of frames to keep free beyond the request, by eviction: more to
        choose from makes longer runs. `sequence` is noted for `owners`.
        """
    def allocate_into(
        self, frames: _Buffer, *, runs: bool = False, ahead: int = 0, sequence: int | None = None
    ) -> None:
        """Fills a buffer of u32 with newly allocated frames, as `allocate` does."""
    def allocate_runs(self, blocks: int, *, ahead: int = 0, sequence: int | None = None) -> list[tuple[int, int]]:
        """Allocates `blocks` frames in few runs: pairs of first frame and length."""
    def allocate_run(self, blocks: int, *, sequence: int | None = None) -> int:
        """Allocates `blocks` consecutive frames, and returns the first. Raises `NoRun` if there
        is no such run.
        """
    def allocate_equal_runs(self, blocks: int, count: int, *, sequence: int | None = None) -> list[int]:
        """Allocates `count` runs of `blocks` consecutive frames each, or none, and returns their first
        frames.
        """
    def claim(self, frames: _Frames) -> None:
        """Allocates the named frames, each with one reference. They must have no references; cached
        ones are evicted.
        """
    def free(self, frames: _Frames) -> None:
        """Drops one reference on each frame. Frames without further references become free, or are
        cached if they have hashes: to be evicted in this order.
        """
    def free_run(self, first: int, blocks: int) -> None:
        """Drops one reference on each of `blocks` consecutive frames."""
    def free_evict_first(self, frames: _Frames) -> None:
        """Frees frames like `free`, to be evicted before all that were freed in that way."""
    def share(self, frames: _Frames) -> None:
        """Adds one reference to each frame, which must be referenced or cached."""
    def keep(self, frames: _Frames) -> None:
        """Drops one reference on each frame, and caches those without further references: for engines
        that look up hashes themselves. The pool needs to know that contents are worth keeping, and
        not by which hash. They are evicted in this order; `take` gets them back.
        """
    def discard(self, frames: _Frames) -> None:
        """Drops one reference on each frame, and forgets what it was cached by: the frame becomes free."""
    def take(self, frames: _Frames) -> None:
        """Takes a reference on each frame, with its contents: of those that are in use or cached, and
        of those that were evicted since and not allocated again.

        For engines that know themselves which contents a frame still has: a frame keeps them until
        it is allocated.
        """
    def references(self, frames: _Frames) -> list[int]:
        """The number of references of each frame."""
    def available_after(self, frames: int, cursor: int | None = None) -> list[int]:
        """Returns up to `frames` frames without references, in the order in which allocations use
        them, those after frame `cursor`, or the first ones: free frames, ascending, then cached
        ones in the order of eviction. To read on, pass the last frame as `cursor`.

        The list is no reservation: a frame whose state another thread changes meanwhile may be
        missing or appear twice. A cursor with references is refused. The first call visits every
        frame; later ones take time in proportion to the frames that they return, and to those that
        were listed, freed or evicted since.
        """
    def is_writable(self, frame: int) -> bool:
        """Whether the engine may write to a frame: it has one reference and no hash."""
    def owners(self) -> list[tuple[int, int, int | None]]:
        """The frames with references, in ascending order: `(frame, references, sequence)`, with the
        sequence that the frame was allocated for, or None.
        """
    def keys(self, hashes: Iterable[bytes], group: int = 0) -> FrameKeys:
        """Derives the keys of hashes in a group of layers, for several calls."""
    def register(self, frames: _Frames, hashes: _Hashes, group: int = 0) -> None:
        """Makes frames known by hashes: one each. Their contents must be final, and the caller has a
        reference on each.
        """
    def lookup(self, hashes: _Hashes, group: int = 0) -> list[int]:
        """A frame for each of the leading hashes that are known, without references on them."""
    def hit(self, hashes: _Hashes, group: int = 0) -> list[int]:
        """A frame for each of the leading hashes that are known, with one reference taken on each."""
    def hit_groups(
        self, groups: Items[tuple[_Hashes, int, int | None]], block_units: Items[int] | None = None
    ) -> tuple[int, list[list[int]]]:
        """Takes one reference on each frame that the groups of layers need at the longest boundary at
        which all of them have it. Returns the boundary and the frames of each group.

        Each of `groups` is `(hashes, group, last)`: the hashes of all blocks of a prompt, and the
        number of last blocks before a boundary that the layers need: None for all, the blocks of a
        window, 1 for a state. With 0 the group has no say. `block_units`: the number of units in
        a block of each group, 1 by default; the boundary is in units, and ends a block of each.
        """
    def unregister(self, hash: bytes, group: int = 0) -> int:
        """Takes a hash away from all frames that are known by it. Returns their number."""
    def uncache(self, frames: _Frames) -> int:
        """Takes all hashes of these frames away. Those without references become free. Returns the
        number of frames that had any.
        """
    def move_keys(self, source: int, target: int) -> int:
        """Moves all hashes of a frame to another one. The caller has a reference on both."""
    def evict(self, frames: int) -> int:
        """Evicts up to `frames` cached frames without references, the oldest first. Returns their
        number.
        """
    def clear(self) -> int:
        """Clears the cache if no frame has references, and returns the number of frames evicted. Raises
        `FrameRefused` otherwise.
        """
    def reset(self) -> bool:
        """Clears the cache if no frame has references. Returns whether it did."""
    def propose_moves(
        self, moves_max: int, *, order: int | None = None, run: int | None = None, fragmentation_penalty: int | None = None
    ) -> FrameMoves:
        """Proposes at most `moves_max` moves of cached frames without references: towards free runs of
        `2**order` frames (16 by default), or towards one run of `run` frames.

        `fragmentation_penalty`: free runs that moves must gain for each two neighbouring cached
        frames that they separate (2 by default). At 0, all runs are gained that the free frames can
        form.
        """
    def begin_batch(self) -> FrameBatch:
        """Begins a batch: frames that are freed before it ends are not reused before it ends. A context
        manager. Raises `KvPoolError`, of the kind `TooManyBatches`, if 4,096 batches are in flight.
        """
    def grow(self, frames: int) -> None:
        """Adds `frames` frames while the pool serves, up to `frames_max`."""
    def shrink(self, frames: int) -> None:
        """Shrinks the pool to `frames` frames. Raises `ResizeError`, with the frames in use."""
    def trim(self) -> None:
        """Returns free frames cached by threads to the bitmaps, where they join into runs."""
    def fragmentation(self) -> float:
        """The share of possible free runs of `2**fragmentation_order` frames that does not exist."""
    def stats(self) -> dict[str, int]:
        """The number of frames in each state, and counts of the cache since the pool was built."""
    def audit(self) -> dict[str, int]:
        """Recounts every frame, and returns the counts. Raises `AuditError` at the first
        contradiction. To be called while no other thread uses the pool.
        """

@final
class Tier:
    """Values of one size by key, in a store that several processes share, a kvpool node, or in one of
    this process: its memory, or a directory on a local drive, which survives a restart
    (`Tier.from_settings({"tier": "file:///var/cache/kvpool?size=200GiB", ...})`).

    Keys are bytes. Values are contiguous buffers of `value_bytes` bytes. `namespace` names what the
    keys do not: the model, and the revision of its weights. Tiers with the same size and namespace
    share values.

    Calls return one word per key, in order, by their deadline:

    - "stored": the store has confirmed the value;
    - "hit": the value was verified, and is in its buffer (of `exists`: a get is worth a try);
    - "miss": the store does not have it;
    - "late": the deadline passed;
    - "busy": too many values wait to be stored, or too many keys to be looked up, and this one was dropped;
    - "declined": the store did not take the value, by its settings: a local drive that is full
      takes a new key when it is put for the second time;
    - "failed": the store failed, or what it has is not the value. `stats().last_failure` has the reason.

    The store is not trusted, and no failure of it raises. When a call has returned, or was cancelled,
    no byte of its buffers is written any more. The buffer of a key without a hit is as before, but for
    "late": its value may have come just then.
    All methods are safe to call from any thread, and release the GIL.
    """
    @staticmethod
    def peer(
        peer: str,
        address: str,
        *,
        value_bytes: int,
        namespace: str,
        name: str | None = None,
        token: bytes | None = None,
        tls: tuple[bytes, bytes, bytes] | None = None,
        window: int = 64,
        threads: int = 2,
        puts: int = 64,
        patience: float = 1.0,
        rest: float = 5.0,
    ) -> Tier:
        """Shares values through a kvpool node, which has the name `peer` at this address.

        The node's pool is `Tier.pool(value_bytes=..., values=...)`. It need not be there yet, and
        may restart: the first calls wait for the link, the later ones fail while there is none.
        Addresses are "host:port" or "unix:/path"; `token` and `tls` are as those of `Node`. `name`
        is the name of this end, by default a random one.

        Values pass through memory for `window` values here, in `threads` calls at a time. At most
        `puts` values wait to be stored. A call of the node that takes longer than `patience`
        seconds fails; after a few failures in a row the node is not asked for `rest` seconds, and a
        key that failed is not asked for that long either.
        """
    @staticmethod
    def from_settings(
        settings: _Settings,
        *,
        value_bytes: int,
        namespace: str,
        window: int = 64,
        threads: int = 2,
        puts: int = 64,
        patience: float = 1.0,
        rest: float = 5.0,
    ) -> Tier:
        """Shares values through the store that `settings` of `kvpool serve` name, a file or a mapping:
        that of `tier`, or else the one node of `peers`. An admin interface in them reports this
        tier.

        The other arguments are those of `peer`; of a store, `tier_threads` and `tier_patience` are
        the settings', and `tier_namespace` is added to `namespace`. By default, the name of this
        end is a random one, and it has no admin interface.
        """
    @staticmethod
    def in_process(bytes_max: int, *, value_bytes: int, namespace: str) -> Tier:
        """Keeps values in the memory of this process, of at most `bytes_max` bytes; the oldest are
        forgotten. Each tier that this makes has values of its own.
        """
    @staticmethod
    def pool(*, value_bytes: int, values: int) -> Pool:
        """Builds the pool of a node that holds values: `values` of them, of `value_bytes` bytes each. The
        least recently used are evicted.
        """
    @property
    def value_bytes(self) -> int:
        """Size of each value."""
    def exists(self, keys: Iterable[bytes], *, timeout: float = 1.0) -> Call[list[_TierWord]]:
        """Asks for each key whether a get is worth a try: "hit" or "miss". No value is read."""
    def put(self, keys: Iterable[bytes], buffers: Iterable[_Buffer], *, timeout: float = 1.0) -> Call[list[_TierWord]]:
        """Stores the values in these buffers: "stored", or why not. The bytes are copied first, as many as
        can be by the deadline; they must not change before the call returns.
        """
    def get(self, keys: Iterable[bytes], buffers: Iterable[_Buffer], *, timeout: float = 1.0) -> Call[list[_TierWord]]:
        """Reads values into these writable buffers, which do not overlap: "hit", or why not. Buffers of
        keys without a hit are as before, but those of "late" keys may have got their values.
        """
    def stats(self) -> TierStats:
        """Returns counts since it began, and its state."""
    def close(self) -> None:
        """Ends it: calls under way fail for the keys that were not asked for yet, and its link ends."""

@final
class TierStats(_Record):
    """Counts since a tier began, and its state."""
    @property
    def stored(self) -> int:
        """Values that the store confirmed."""
    @property
    def hits(self) -> int:
        """Values that were read and verified."""
    @property
    def misses(self) -> int:
        """Keys to be read that the store did not have, or found damaged."""
    @property
    def failed(self) -> int:
        """Keys whose operation failed, for any reason."""
    @property
    def bad_values(self) -> int:
        """Values that were not what their keys say: found here, and failed, or found damaged by
        the node, which dropped them, and missed.
        """
    @property
    def overdue(self) -> int:
        """Keys that had no answer by the deadline of their call."""
    @property
    def declined(self) -> int:
        """Values that the store declined by its settings."""
    @property
    def dropped_puts(self) -> int:
        """Values that were dropped because too many waited."""
    @property
    def lookups(self) -> int:
        """Keys that were looked up without being read."""
    @property
    def read_bytes(self) -> int:
        """Bytes that were read, with headers."""
    @property
    def written_bytes(self) -> int:
        """Bytes that were stored, with headers."""
    @property
    def breaker_opened(self) -> int:
        """Times that the circuit breaker opened."""
    @property
    def is_open(self) -> bool:
        """Whether the store failed several times in a row, and is not asked for a while."""
    @property
    def last_failure(self) -> str | None:
        """The latest failure, as text."""

@final
class EvictionOrder:
    """The order in which the blocks of a cache are evicted, by one of kvpool's policies.

    A cache that finds its blocks by keys of bytes reports each of its blocks here, and asks which
    ones to evict. `policy` is "lru" or "priority"; `blocks_max` is the cache's size.

    A block is *held* or evictable. Requests that have not ended order their blocks by use: `use`,
    with the number of the request from `begin`, and the last position first. The end of a request,
    `finish`, shows the policy the whole request: hits, length, and what it continued. From then on
    those of its blocks that no other request uses are the policy's to order; blocks of requests
    that have not ended are evicted behind those.

    All methods are safe to call from any thread, and keep the GIL.
    """
    def __new__(cls, blocks_max: int, policy: Literal["lru", "priority"] = "lru") -> Self: ...
    @property
    def policy(self) -> str:
        """Name of the policy."""
    @property
    def evictable(self) -> int:
        """Number of evictable blocks."""
    def begin(self) -> int:
        """Returns the number of a request that begins: greater than those before. It is kept until
        `finish`.
        """
    def insert(self, key: bytes, request: int | None = None, position: int = 0, *, evictable: bool = False) -> None:
        """Adds a block that the cache has got, for this request and at this position in it; for none
        if the number is None. It is held unless `evictable`. A block that is there already is
        replaced.
        """
    def remove(self, key: bytes) -> None:
        """Forgets a block that the cache has dropped by itself."""
    def hold(self, key: bytes) -> None:
        """Has a block not be evicted."""
    def release(self, key: bytes) -> None:
        """Has a block be evicted when its turn comes, which its latest use decides."""
    def use(self, keys: Items[tuple[bytes, int]], request: int) -> None:
        """Notes that a request, which has not ended, uses these blocks at these positions. Unknown
        keys, and blocks with a later use, are skipped.
        """
    def touch(self, keys: Items[bytes]) -> None:
        """Has these blocks be the latest that were used, the first one the latest of all. Unknown keys
        are skipped.
        """
    def finish(self, keys: Items[bytes], reused: set[bytes], request: int | None = None) -> None:
        """Ends a request: `keys` are its blocks, first to last, and `reused` those of them that it had
        found in the cache. Blocks that the cache does not have any more are named too. `request` is
        its number, if it has one. Blocks that other requests use stay theirs.
        """
    def evict(self, count: int, protected: Iterable[bytes] | None = None) -> list[bytes] | None:
        """Takes `count` evictable blocks that are not in `protected`, in the order of their eviction,
        and returns their keys. None, and nothing is taken, if there are fewer.
        """
    def clear(self) -> None:
        """Forgets all blocks. Requests that have not ended keep their numbers."""
    def __len__(self) -> int: ...
    def __contains__(self, key: bytes, /) -> bool: ...
