//! Runs operations from the fuzzer's bytes on a pool and on the naive model, and compares every
//! result.
#![no_main]

use kvpool::Window;
use kvpool_testkit::model::{BLOCK_TOKENS, Operation, Setup, run};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|operations: Vec<Operation>| {
    let block_tokens = BLOCK_TOKENS[operations.len() % BLOCK_TOKENS.len()];
    // Without a window, with one of a few blocks at most, and with one of some blocks and sinks.
    let window = |tokens| Window::new(tokens).expect("a valid window");
    let window = [None, Some(window(5)), Some(window(37).sinks(3))][operations.len() / BLOCK_TOKENS.len() % 3];
    if let Err(mismatch) = run(Setup { block_tokens, window, ..Setup::default() }, &operations) {
        panic!("{mismatch}");
    }
});
