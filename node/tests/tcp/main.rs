//! Links and the transport of frames, over real sockets.

mod conformance;
mod control;
mod cuts;
mod faults;
mod frames;
mod handshake;
mod places;
mod releases;
mod support;
