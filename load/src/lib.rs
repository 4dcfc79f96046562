//! Synthetic requests for the pools of [`kvpool`], and the bytes of their tokens: written through
//! the slots of a pool, and compared when they are read back.
//!
//! | file | content |
//! |---|---|
//! | `request` | a request: its arrival, its tokens, the ids of its prefixes, its place in a session |
//! | `conversations` | generated requests: by arrival, or each by number |
//! | `agents` | generated sessions of agents with subagents, by arrival |
//! | `draw` | the lengths, times and texts of both |
//! | `text` | the ids of tokens, which determine common prefixes |
//! | `content`, `transfer`, `rows` | the bytes of a token, written to the storage and read back |
//! | `traffic` | threads that serve requests on a node's pool in real time, with the feature `traffic` |

mod agents;
mod content;
mod conversations;
mod draw;
mod request;
mod rows;
mod text;
#[cfg(feature = "traffic")]
pub mod traffic;
mod transfer;

pub use agents::Agents;
pub use content::{Content, Shape};
pub use conversations::{Conversations, turn};
pub use request::{ANSWER_TOKEN, HASH_BLOCK_TOKENS, Request, Turn};
pub use rows::{Rows, full};
pub use text::{Text, Texts};
pub use transfer::{Access, Corrupt, Transfer, slots};
