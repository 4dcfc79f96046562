//! Runs prompts from the fuzzer's bytes on a pool with a prefix cache and on the naive model, and
//! compares every result.
#![no_main]

use kvpool_testkit::model::BLOCK_TOKENS;
use kvpool_testkit::prefix::{PrefixOperation, run};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|operations: Vec<PrefixOperation>| {
    if let Err(mismatch) = run(60, BLOCK_TOKENS[operations.len() % BLOCK_TOKENS.len()], &operations) {
        panic!("{mismatch}");
    }
});
