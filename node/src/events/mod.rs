//! Events of the prefix cache for request routers, over ZeroMQ in the format of vLLM.
//!
//! Routers that follow vLLM's events can follow a pool's: blocks become findable, or stop being so.
//!
//! ```text
//! pool --- KvEvents ---> publisher task: CacheView ---> History (bounded) ---> PUB connections, a cursor each
//!                             ^  a listing of the pool      |
//!                             |                             +----------------> ROUTER connections: replay
//!                             +--- snapshots for replays that begin before the history
//! ```
//!
//! # Format
//!
//! A batch is a message of three frames: the topic, a sequence number (8 bytes, big-endian), and
//! MessagePack `[timestamp, [event, ...], rank]`. The first number is the start time in
//! microseconds, so that a restarted node continues above its former numbers, and subscribers see a
//! gap. An event is a map:
//!
//! | `type` | keys |
//! |---|---|
//! | `BlockStored` | `block_hashes`, `parent_block_hash` or nil, `token_ids`, `block_size`, `lora_id` (nil), `medium`, `lora_name` (nil), `group_idx`, `kv_cache_spec_kind`, `kv_cache_spec_sliding_window` |
//! | `BlockRemoved` | `block_hashes`, `medium`, `group_idx` |
//! | `AllBlocksCleared` | |
//!
//! As in vLLM, keys with their default value are omitted. Consecutive blocks of a chain are one
//! `BlockStored`: each hash is the parent of the next one, and `token_ids` has all their tokens. A
//! block whose sequence was opened before the publisher started has no `token_ids` and no parent.
//! Of a model whose layers differ, `group_idx` numbers the groups as
//! [`Pool::cache_groups`](kvpool::Pool::cache_groups) does, and the kind is `full_attention`,
//! `sliding_window` with the window's tokens, or `mamba`: a checkpoint of a state, without
//! `token_ids`, whose parent is the last block of group 0 before it. A chunk is a window of its
//! length. A prefix is a hit where all groups have it, and of a state all blocks of a checkpoint.
//! Hashes are the lower 64 bits of the key as an integer, or all 24 bytes: see [`HashForm`].
//!
//! To request a replay, a subscriber sends an empty frame and the first missing sequence number. It
//! receives messages of an empty frame, sequence number and payload; the last one has the number -1
//! and an empty payload.
//!
//! # Guarantees
//!
//! - A subscriber that applies all batches in order, each once, has exactly the set of hashes by
//!   which the pool finds blocks, up to events in flight. A hash is stored with its first block and
//!   removed with its last, so a set suffices.
//! - The first batch lists the pool: `AllBlocksCleared`, and then all cached blocks. So does a
//!   batch after the publisher itself has lost events
//!   ([`KvEvent::Resync`](kvpool::prefix::KvEvent::Resync)).
//! - A replay that begins before the history, for example after a restart, is a single batch that
//!   lists the whole cache at the newest number.
//! - A slow subscriber costs a socket and the batch being written, since all connections read the
//!   shared history at their own pace. It skips batches that leave the history unread, sees a gap
//!   in the numbers, and requests a replay. A connection whose peer reads nothing for a minute is
//!   closed: otherwise a few such peers would take all places.
//! - The pool never waits for the publisher: see [`kvpool::prefix::KvEvents`].
//!
//! # The protocol below
//!
//! The module `zmtp` implements the part of ZMTP 3.0 that listening PUB and ROUTER sockets need:
//! greeting, `READY`, subscriptions, frames. No library fits: the `zeromq` crate for this
//! workspace's compiler (0.6) sends to subscribers in turn, so one that does not read blocks all;
//! 0.7 buffers up to 100,000 messages of any size for each; both accept unbounded frames from
//! unauthenticated peers. The bindings of libzmq have had no release since 2022.
//!
//! As in vLLM, there is no authentication or encryption, and events contain the tokens of prompts:
//! bind to the loopback, or to a private network of the cluster.

mod changes;
mod history;
mod payload;
mod publisher;
mod reporter;
mod server;
mod settings;
mod view;
mod zmtp;

pub use publisher::{KvEventCounters, KvEventPublisher};
pub use reporter::KvEventReporter;
pub use settings::{HashForm, KvEventError, KvEventSettings};
