//! Operations out of the fuzzer's bytes, on a pool and on the naive model: every answer is the model's.
#![no_main]

use kvpool_testkit::model::{Operation, Setup, run};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|operations: Vec<Operation>| {
    if let Err(mismatch) = run(Setup::default(), &operations) {
        panic!("{mismatch}");
    }
});
