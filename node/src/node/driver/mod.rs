//! The task that owns all migrations of a node.
//!
//! `input` what happens to it · `driver` its state, and the loop · `links` peers that come and go ·
//! `questions` what is cached at peers · `requests` what the pool asks for · `tasks` the work that
//! machines want · `results` what it returned · `endings` reports, and where blocks go at the end ·
//! `stakes` what depends on whether a peer's process has ended

#[expect(clippy::module_inception, reason = "the room is named after its main type")]
mod driver;
mod endings;
mod input;
mod links;
mod questions;
mod requests;
mod results;
mod stakes;
mod tasks;

pub(super) use driver::{Driver, Setup};
pub(super) use input::{INPUTS, Input};
