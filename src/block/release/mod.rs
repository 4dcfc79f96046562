//! Release: references dropped by their owners, and the path of freed frames. Read `pass` first.

mod give_back;
mod handles;
mod in_place;
mod pass;
mod reference;

pub(in crate::block) use in_place::repeats;
pub(crate) use pass::Exposure;
