//! For any bytes, the decoders of a connection between nodes return what was encoded, or an error.
#![no_main]

#[path = "../../node/tests/decoders/mod.rs"]
mod decoders;

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| decoders::decode_all(bytes));
