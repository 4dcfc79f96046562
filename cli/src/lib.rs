//! The parts of the `kvpool` program, as a library so that tests and fuzzers reach them.
