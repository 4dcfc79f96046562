//! `kvpool top`: a node on the terminal.
//!
//! ```text
//! /events   --+
//! /stats      +--> Input --> State::update --> Effect: compact, quit
//! /owners     |                 |
//! keys, time--+                 v
//!                            view::draw --> Screen
//! ```
//!
//! `state` and everything that it and `view` use is pure: tests drive it without a node or a
//! terminal. Colour is never the only distinction.

mod cells;
mod figures;
mod panels;
mod run;
mod screen;
mod services;
mod sort;
mod state;
#[cfg(test)]
mod tests;
mod view;

pub use run::run;
pub use screen::Screen;
