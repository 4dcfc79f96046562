//! Prompts out of the fuzzer's bytes, on a pool that caches and on the naive model: every answer is the model's.
#![no_main]

use kvpool_testkit::prefix::{PrefixOperation, run};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|operations: Vec<PrefixOperation>| {
    if let Err(mismatch) = run(60, &operations) {
        panic!("{mismatch}");
    }
});
