//! Events of the prefix cache for request routers, over ZeroMQ in the format of vLLM.
//!
//! A router that follows vLLM's events follows a pool's: blocks that can be found, and blocks that
//! cannot be found any more.
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
//! MessagePack `[timestamp, [event, ...], rank]`. The first number is the time of the start in
//! microseconds, so that a restarted node continues above the numbers of the former process, and
//! its subscribers see a gap. An event is a map:
//!
//! | `type` | keys |
//! |---|---|
//! | `BlockStored` | `block_hashes`, `parent_block_hash` or nil, `token_ids`, `block_size`, `lora_id` (nil), `medium`, `lora_name` (nil) |
//! | `BlockRemoved` | `block_hashes`, `medium` |
//! | `AllBlocksCleared` | |
//!
//! Keys that have a default in vLLM are left out, as vLLM does. Consecutive blocks of a chain are
//! one `BlockStored`: each hash is the parent of the next one, and `token_ids` has the tokens of
//! all. A block whose sequence was opened before the publisher started has no `token_ids` and no
//! parent. Hashes are the lower 64 bits of the key as an integer, or all 24 bytes: see
//! [`HashForm`].
//!
//! A subscriber that asks for a replay sends an empty frame and the first sequence number that it
//! lacks. It receives messages of an empty frame, sequence number and payload, the last one with
//! the number -1 and an empty payload.
//!
//! # Guarantees
//!
//! - A subscriber that applies all batches in the order of their numbers, each once, has exactly
//!   the set of hashes by which the pool finds blocks, up to events under way. A hash is stored
//!   when its first block is, and removed when its last block is, so that a set suffices.
//! - The first batch lists the pool: `AllBlocksCleared`, and then all cached blocks. So does a
//!   batch after the publisher itself has lost events
//!   ([`KvEvent::Resync`](kvpool::prefix::KvEvent::Resync)).
//! - A replay that begins before the history, also because the node was restarted, answers with one
//!   batch that lists the whole cache at the newest number, and is complete by itself.
//! - A subscriber that reads slowly, or never, costs a socket and the batch that is being written:
//!   connections read the common history at their own pace. What leaves the history before a
//!   subscriber read it is skipped; it sees a gap in the numbers, and asks for a replay. A
//!   connection whose peer takes nothing for a minute is closed: otherwise a few such peers would
//!   take all places.
//! - The pool never waits for the publisher: see [`kvpool::prefix::KvEvents`].
//!
//! # The protocol below
//!
//! The module `zmtp` has the part of ZMTP 3.0 that a PUB and a ROUTER socket need that listen on
//! TCP: greeting, `READY`, subscriptions, frames. It is written here because no library fits: the
//! `zeromq` crate in the newest version for this workspace's compiler (0.6) waits for each
//! subscriber in turn, so that one that does not read stops all; the next one (0.7) holds up to
//! 100,000 messages for each subscriber, whatever their size; both accept frames of any length from
//! a stranger. The bindings of libzmq have had no release since 2022.
//!
//! ZeroMQ neither authenticates nor encrypts here, as in vLLM, and events contain the tokens of
//! prompts: bind to the loopback, or to a network of the cluster's own.

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
