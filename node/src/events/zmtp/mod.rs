//! The part of ZMTP 3.0 that listening PUB and ROUTER sockets need: [RFC
//! 23](https://rfc.zeromq.org/spec/23/).
//!
//! ```text
//! greeting (64 bytes)  -->  <--  greeting
//! READY Socket-Type    -->  <--  READY Socket-Type
//! messages of frames   -->  <--  subscriptions (PUB), requests (ROUTER)
//! ```
//!
//! A frame is a byte of flags, a length of 1 or 8 bytes, and the body. Received data is bounded
//! before it is read: see [`frame::BODY_MAX`] and [`frame::FRAMES_MAX`].

mod frame;
mod greeting;

pub(super) use frame::{Inbound, ZmtpError, multipart, read, write_all, write_pong};
pub(super) use greeting::{SocketType, handshake};
