//! Runs operations from the fuzzer's bytes on a pool and on the naive model, and compares every
//! result.
#![no_main]

use kvpool_testkit::model::{Operation, Setup, run};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|operations: Vec<Operation>| {
    if let Err(mismatch) = run(Setup::default(), &operations) {
        panic!("{mismatch}");
    }
});
