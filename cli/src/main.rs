//! The `kvpool` program.

fn main() {}
