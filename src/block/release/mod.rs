//! Release: references given up by their owner or by handle, and the frames that become free.

mod handles;
mod references;

pub(in crate::block) use handles::By;
