//! Mooncake Store as the store of a tier, through its C interface, found at run time.
//!
//! No package of Mooncake contains the library with this interface: `libmooncake_store.so` is built from
//! its source with the option `WITH_STORE_C_SHARED`. [`MooncakeSettings::library`] or the variable
//! [`LOCATION`] says where it is. **The tests of this crate run against a library of their own, which
//! implements the 19 functions in memory, and not against Mooncake**; `docs/tier.md` says what was
//! tried by hand.
//!
//! # Rules that follow from what Mooncake does
//!
//! | it | so |
//! |---|---|
//! | has no version function, and refuses no peer of another version | [`Mooncake::connect`] puts a probe and reads it back |
//! | confirms puts that it does not store, for example behind a writer that died | a put counts once the key exists |
//! | may have written memory of a get that failed | that memory is set aside (`staging`), and used again after a minute |
//! | blocks for 30 seconds where a host stands still | each call has a thread of its own |
//! | waits for ever for a dead master at its end | it is ended on a thread of its own |
//!
//! `api` the table of functions · `handle` one client, and the probe · `staging` memory for values ·
//! `session` the calls

mod api;
mod handle;
mod session;
mod staging;
mod store;

pub use api::LOCATION;
pub use handle::MooncakeSettings;
pub use store::Mooncake;
