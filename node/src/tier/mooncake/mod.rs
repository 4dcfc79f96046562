//! Mooncake Store as the store of a tier, through its C interface, loaded at run time.
//!
//! No package of Mooncake contains the library with this interface: `libmooncake_store.so` is built
//! from source with the option `WITH_STORE_C_SHARED`. [`MooncakeSettings::library`] or the variable
//! [`LOCATION`] names it. **The tests of this crate run against a library of their own, which
//! implements the 19 functions in memory, and not against Mooncake**; `docs/tier.md` lists what was
//! tried by hand.
//!
//! # Rules that follow from Mooncake's behaviour
//!
//! | Mooncake | therefore |
//! |---|---|
//! | has no version function, and refuses no peer of another version | [`Mooncake::connect`] puts a probe and reads it back |
//! | confirms puts that it does not store, for example after a writer died | a put counts once the key exists |
//! | may still write memory of a failed get | that memory is set aside (`staging`), and reused after a minute |
//! | blocks for 30 seconds when a host hangs | each call has its own thread |
//! | waits forever for a dead master when a client is destroyed | it is destroyed on its own thread |

mod api;
mod handle;
mod session;
mod staging;
mod store;

pub use api::LOCATION;
pub use handle::MooncakeSettings;
pub use store::Mooncake;
