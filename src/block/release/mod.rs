//! Release: references dropped by their owners, and the frames that become free.
//!
//! | file | contents |
//! |---|---|
//! | `reference` | the release of one reference: a transition of its block's word |
//! | `pass` | one call that releases any number of references: the pipeline. Read it first |
//! | `give_back` | the way of freed frames |
//! | `in_place` | the same by frame number, for engines whose ids are frames |
//! | `handles` | shares by id; operations by handle: pins, seals, inspection, with their checks |

mod give_back;
mod handles;
mod in_place;
mod pass;
mod reference;

pub(in crate::block) use in_place::repeats;
pub(crate) use pass::Exposure;
