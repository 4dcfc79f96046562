//! Random operations on a pool and on the naive model: every answer must be the model's.
#![cfg(not(kvpool_loom))]

use kvpool::Window;
use kvpool_testkit::hints::{self, HintOperation};
use kvpool_testkit::model::{BLOCK_TOKENS, Operation, Setup, run};
use kvpool_testkit::prefix::{self, PrefixOperation};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::FileFailurePersistence;

/// Long enough to fill a pool, empty it and fill it again.
const OPERATIONS_MAX: usize = if cfg!(miri) { 40 } else { 300 };

fn config(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases: if cfg!(miri) { 2 } else { cases },
        max_shrink_iters: 10_000,
        // A failure is stored beside this file, and run first from then on. Miri cannot access
        // files.
        failure_persistence: (!cfg!(miri))
            .then(|| Box::new(FileFailurePersistence::WithSource("regressions")) as _),
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(config(128))]

    /// A pool of two segments and a part of a third.
    #[test]
    fn a_pool_answers_as_the_model_does(
        block_tokens in select(&BLOCK_TOKENS[..]),
        operations in vec(any::<Operation>(), 1..OPERATIONS_MAX),
    ) {
        check(Setup { block_tokens, ..Setup::default() }, &operations)?;
    }

    /// The same with a window, and with sinks or without.
    #[test]
    fn a_pool_with_a_window_answers_as_the_model_does(
        block_tokens in select(&BLOCK_TOKENS[..]),
        (tokens, sinks) in (1..60_usize, prop_oneof![Just(0), 1..20_u32]),
        operations in vec(any::<Operation>(), 1..OPERATIONS_MAX),
    ) {
        let window = Some(Window::new(tokens).unwrap().sinks(sinks));
        check(Setup { block_tokens, window, ..Setup::default() }, &operations)?;
    }

    /// Too small for a unit level, with bypassed magazines: nearly every allocation is an edge
    /// case.
    #[test]
    fn a_tiny_pool_answers_as_the_model_does(
        block_tokens in select(&BLOCK_TOKENS[..]),
        operations in vec(any::<Operation>(), 1..OPERATIONS_MAX),
    ) {
        check(Setup { blocks: 7, blocks_max: 80, segment_blocks: 64, block_tokens, window: None }, &operations)?;
    }
}

proptest! {
    #![proptest_config(config(16))]

    /// Larger than the magazines' capacity, with segments of several units.
    #[test]
    fn a_large_pool_answers_as_the_model_does(
        block_tokens in select(&BLOCK_TOKENS[..]),
        operations in vec(any::<Operation>(), 1..OPERATIONS_MAX),
    ) {
        check(Setup { blocks: 2500, blocks_max: 9000, segment_blocks: 1024, block_tokens, window: None }, &operations)?;
    }
}

proptest! {
    #![proptest_config(config(128))]

    /// Exact hits, evictions and refusals of the prefix cache.
    #[test]
    fn a_cache_answers_as_the_model_does(
        block_tokens in select(&BLOCK_TOKENS[..]),
        operations in vec(any::<PrefixOperation>(), 1..OPERATIONS_MAX),
    ) {
        prefix::run(60, block_tokens, &operations).map_err(TestCaseError::fail)?;
    }
}

proptest! {
    #![proptest_config(config(256))]

    /// Evictions and outcomes after any hints, with budgets of pins.
    #[test]
    fn hints_are_carried_out_as_in_the_model(
        pins_max in select(&[0, 3, 9, 64][..]),
        operations in vec(any::<HintOperation>(), 1..OPERATIONS_MAX),
    ) {
        hints::run(pins_max, &operations).map_err(TestCaseError::fail)?;
    }
}

fn check(setup: Setup, operations: &[Operation]) -> Result<(), TestCaseError> {
    run(setup, operations).map_err(|mismatch| TestCaseError::fail(mismatch.to_string()))
}
