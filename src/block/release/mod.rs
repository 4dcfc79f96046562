//! Release: references dropped by their owners, and the frames that become free.
//!
//! | file | contents |
//! |---|---|
//! | `references` | releases by id, for leases and sequences, and the way of freed frames. Read it first |
//! | `in_place` | operations by frame number, for engines whose ids are frames |
//! | `handles` | shares by id; operations by handle: pins, seals, inspection, with their checks |
//!
//! Releases end in `give_back`: a freed frame goes to the thread's magazines or the bitmaps, or
//! into limbo while a batch is in flight. The fast path for few blocks is in `fast_path`.

mod handles;
mod in_place;
mod references;

pub(in crate::block) use in_place::repeats;
pub(crate) use references::Exposure;
