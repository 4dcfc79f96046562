//! Gives a pool hints from the fuzzer's bytes, and compares outcomes and evictions with the naive
//! model.
#![no_main]

use kvpool_testkit::hints::{HintOperation, run};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|operations: Vec<HintOperation>| {
    if let Err(mismatch) = run([0, 3, 9, 64][operations.len() % 4], &operations) {
        panic!("{mismatch}");
    }
});
