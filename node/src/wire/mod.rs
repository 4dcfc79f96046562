//! The bytes that nodes exchange: fixed headers, and messages in bounded frames.
//!
//! Nothing here does I/O. Every decoder takes untrusted bytes, checks a length against [`Limits`]
//! before it allocates, and returns a [`WireError`] for anything that no encoder of this version
//! produces.
//!
//! # One connection
//!
//! ```text
//! connector                                        acceptor
//!                    <------------------------------  Header (64 bytes)
//! Header (64 bytes)  ------------------------------>
//! Proof  (32 bytes)  ------------------------------>
//!                    <------------------------------  verdict (1 byte), Proof (32 bytes)
//! Hello  (frame)     ------------------------------>
//!                    <------------------------------  Welcome (frame)
//! control stream: frames      |      data stream: item heads, bytes of frames, acknowledgements
//! ```
//!
//! Up to the verdict all parts have fixed sizes: an acceptor parses no length of an unauthenticated
//! peer. Both sides send their header even if they do not support the other's version, so that both
//! can report both versions. Under TLS the acceptor begins, which tells a connector that its
//! certificate was accepted. In plain text both begin; a side that expects TLS answers a plain
//! header with an alert, by which it is recognized.
//!
//! # Releases
//!
//! From the headers, both sides know the [versions](Versions) of the messages of both:
//!
//! | the peer's header | version of the link | bytes left over after `Hello`, `Welcome`, a message |
//! |---|---|---|
//! | states versions | the greatest that both speak | skipped: later releases append fields |
//! | states none | 4, as that of all releases before | an error |
//!
//! Without a common version, the connector's `Hello` states its last one, the acceptor denies it,
//! and both report both versions. `messages` of `Hello` and `Welcome` is the version of the link. A
//! release that removes or changes a field, adds a message or a variant, or appends a required
//! field, increments the last version, and uses the former messages with peers of a former version.

mod codec;
mod error;
mod header;
mod hello;
mod item;
mod limits;

pub use codec::{FRAME_HEAD, FrameHead, FrameKind, decode, decode_of, encode};
pub use error::WireError;
pub use header::{HEADER, Header, PROOF, Proof, Role, Secret, Verdict, Versions, WIRE_VERSION};
pub use hello::{Denial, Hello, NAME_MAX, Statement, StreamPlace, Welcome, check_name};
pub use item::{Ack, Form, ITEM_HEAD, ItemHead, ItemStatus, StreamHead};
pub use limits::Limits;

#[cfg(test)]
mod tests;
