//! The services that [settings](crate::settings) name, over a pool: peers, a shared tier, events,
//! membership, and the admin interface.
//!
//! ```text
//! Prepared      certificates read, admin address bound, store of the tier connected
//!    | start    with the pool: tier, events
//! Services
//!    | serve    node, admin interface, membership
//! Served        reloads, and reports what runs
//!    | leave    membership left, transfers finished or handed back, requests answered
//!    | end      tier given the last blocks, subscribers sent the last events
//! ```
//!
//! The address is bound first, so that a second node on the same port fails before it takes memory.
//! The tier and the events begin before and end after an engine's requests, so that they get all
//! blocks. A node is a member only while it serves.
//!
//! A pool of frames has an admin interface alone: [`Prepared::serve_frames`].

mod credentials;
mod error;
mod frames;
mod membership;
mod prepared;
mod reload;
mod served;

pub use credentials::authorities;
pub use error::ServiceError;
pub use frames::ServedFrames;
pub use prepared::{Prepared, Services};
pub use reload::Reread;
pub use served::Served;
