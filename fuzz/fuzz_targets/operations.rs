//! Runs operations from the fuzzer's bytes on a pool and on the naive model, and compares every
//! result.
#![no_main]

use kvpool_testkit::model::{BLOCK_TOKENS, Operation, Setup, run};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|operations: Vec<Operation>| {
    let block_tokens = BLOCK_TOKENS[operations.len() % BLOCK_TOKENS.len()];
    if let Err(mismatch) = run(Setup { block_tokens, ..Setup::default() }, &operations) {
        panic!("{mismatch}");
    }
});
