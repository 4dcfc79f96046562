//! Links to peers over TCP and Unix sockets, and the transport of frames over them.
//!
//! A *link* is one control stream for messages and heartbeats, and several data streams. Each of
//! these connections authenticates separately:
//!
//! | address | encryption | authentication of the peer |
//! |---|---|---|
//! | TCP, any | TLS 1.3 | certificates of both sides; or a certificate of the acceptor and a token |
//! | TCP, loopback | none | a token, if set |
//! | Unix socket | none | same user, by the kernel; a token, if set |
//!
//! Any other combination is refused when it is configured, before a byte is sent.
//!
//! # Frames of a peer's transfers
//!
//! Bytes move between a socket and frames only in non-blocking system calls, and in copies on
//! blocking threads. Each call holds a strong reference to the grant, or to the local frames of the
//! transfer; between calls a stream has only a weak one.
//!
//! ```text
//! the hold is dropped  ==  the table's reference was dropped, and no call is running
//! ```
//!
//! A revoked grant, a cancelled transfer and a lost link drop the table's reference. Later bytes
//! for a revoked grant are discarded, and the rest of an item of a cancelled transfer is filled
//! with zeros, so that the stream stays usable.

mod address;
mod control;
mod endpoint;
mod error;
mod frames;
mod grants;
mod handshake;
mod inner;
mod link;
mod link_state;
mod listener;
mod pending;
mod random;
mod receive;
mod region;
mod resolve;
mod send;
mod settings;
mod socket;
mod stream;
mod table;
mod tls;
mod transfers;

pub use address::Address;
pub use endpoint::Endpoint;
pub(crate) use endpoint::Refused;
pub use error::{CertificateProblem, LinkError, Side};
pub use frames::TcpTransport;
pub use link::Link;
pub(crate) use link_state::Held;
pub use link_state::Peer;
pub(crate) use listener::{Accepted, Listener, SocketFile, bind_unix};
pub(crate) use pending::{Pending, Source};
pub use resolve::{Resolve, Resolved};
pub use settings::{Identity, ListenSettings, PeerSettings, TOKEN_MIN, Token};
pub(crate) use socket::Socket;
pub use socket::SocketKind;
pub use tls::Tls;
pub(crate) use tls::{accept, connect};
