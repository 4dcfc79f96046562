//! Random operations through the public interface, by every kind of owner, against a naive model of
//! ownership: no two owners have one block, unless they share it on purpose; a handle changes no
//! block of a lease or a sequence; pinned blocks stay in their frames.
//!
//! Handles are used as an adversary would: those of leases, forged ones of sequences' blocks, and
//! any earlier one.
#![cfg(not(kvpool_loom))]

mod world;

use std::collections::HashMap;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use kvpool::prefix::{HashKey, PrefixConfig};
use kvpool::storage::KvLayout;
use kvpool::{
    AllocRequest, Batch, BlockHandle, BlockId, BlockPin, DefragOptions, FrameId, Generation, HandleError,
    Lease, Order, Pool, Sequence, SequenceId,
};
use kvpool_testkit::model::Pick;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;

use world::{Checked, World};

const BLOCKS: usize = 48;
const POOLS: usize = 2;
/// Number of handles that are kept for misuse.
const KNOWN_MAX: usize = 200;

#[derive(Clone, Debug)]
enum Operation {
    Lease { pool: bool, blocks: u8, pinned: bool, contiguous: bool },
    Drop(Pick),
    DropElsewhere(Pick),
    Forget(Pick),
    Truncate(Pick, Pick),
    SplitOff(Pick, Pick),
    SealLease(Pick, Pick),
    ReopenLease(Pick, Pick),
    Share(Pick),
    Pin(Pick),
    Unpin(Pick),
    Open { pool: bool, prompt: u8, tokens: u8 },
    Append { sequence: Pick, tokens: u8, draft: bool },
    TruncateSequence(Pick, Pick),
    Fork(Pick),
    Close(Pick),
    Migrate { sequence: Pick, stays: bool },
    Offload { pool: bool, blocks: u8 },
    Clear(bool),
    Begin(bool),
    End(Pick),
    Defragment(bool, u8),
}

fn operations() -> impl Strategy<Value = Operation> {
    let pick = any::<Pick>;
    let size = || prop_oneof![6 => 1..6_u8, 3 => 1..24_u8];
    prop_oneof![
        13 => (any::<bool>(), size(), any::<[bool; 2]>()).prop_map(
            |(pool, blocks, [pinned, contiguous])| Operation::Lease { pool, blocks, pinned, contiguous }
        ),
        3 => pick().prop_map(Operation::Drop),
        1 => pick().prop_map(Operation::DropElsewhere),
        1 => pick().prop_map(Operation::Forget),
        2 => (pick(), pick()).prop_map(|(lease, keep)| Operation::Truncate(lease, keep)),
        2 => (pick(), pick()).prop_map(|(lease, at)| Operation::SplitOff(lease, at)),
        3 => (pick(), pick()).prop_map(|(lease, place)| Operation::SealLease(lease, place)),
        2 => (pick(), pick()).prop_map(|(lease, place)| Operation::ReopenLease(lease, place)),
        4 => pick().prop_map(Operation::Share),
        8 => pick().prop_map(Operation::Pin),
        2 => pick().prop_map(Operation::Unpin),
        4 => (any::<bool>(), 0..3_u8, 1..40_u8)
            .prop_map(|(pool, prompt, tokens)| Operation::Open { pool, prompt, tokens }),
        6 => (pick(), 1..14_u8, any::<bool>())
            .prop_map(|(sequence, tokens, draft)| Operation::Append { sequence, tokens, draft }),
        3 => (pick(), pick()).prop_map(|(sequence, keep)| Operation::TruncateSequence(sequence, keep)),
        3 => pick().prop_map(Operation::Fork),
        3 => pick().prop_map(Operation::Close),
        2 => (pick(), any::<bool>()).prop_map(|(sequence, stays)| Operation::Migrate { sequence, stays }),
        1 => (any::<bool>(), size()).prop_map(|(pool, blocks)| Operation::Offload { pool, blocks }),
        1 => any::<bool>().prop_map(Operation::Clear),
        2 => any::<bool>().prop_map(Operation::Begin),
        2 => pick().prop_map(Operation::End),
        4 => (any::<bool>(), 1..4_u8).prop_map(|(pool, order)| Operation::Defragment(pool, order)),
    ]
}

/// A block of a pool, in one generation.
type Block = (usize, BlockHandle);

fn run(operations: &[Operation]) -> Checked {
    let mut world = World::new();
    for (step, operation) in operations.iter().enumerate() {
        let at =
            |error: TestCaseError| TestCaseError::fail(format!("operation {step}, {operation:?}: {error}"));
        world.step(operation).map_err(at)?;
        world.check().map_err(at)?;
    }
    world.finish()
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 200,
        max_shrink_iters: 10_000,
        // A failure is stored beside this file, and run first from then on.
        failure_persistence: Some(Box::new(FileFailurePersistence::WithSource("regressions"))),
        ..ProptestConfig::default()
    })]

    #[test]
    fn no_block_has_two_owners(operations in vec(operations(), 1..160)) {
        run(&operations)?;
    }
}
