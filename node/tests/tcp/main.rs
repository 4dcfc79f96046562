//! Links and the transport of frames, over real sockets.

mod conformance;
mod control;
mod cuts;
mod faults;
mod frames;
mod handshake;
#[path = "../hooked/mod.rs"]
mod hooked;
mod places;
mod releases;
mod support;
