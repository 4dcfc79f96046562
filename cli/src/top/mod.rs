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
//! `state` and everything that it and `view` use is pure: tests drive it without a node and without
//! a terminal. Nothing is told by colour alone: each class of frames has a character of its own.
//!
//! | file | content |
//! |---|---|
//! | `figures` | what the node said |
//! | `services` | peers, tiers and directories, from the statistics |
//! | `sort` | orders of the owners |
//! | `state` | the state of the program, and what changes it |
//! | `cells` | the memory map as characters |
//! | `panels` | the parts of the screen as lines of text |
//! | `view` | places and styles |
//! | `screen` | the terminal, which is restored however the program ends |
//! | `run` | the loop over events, keys and signals |

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
