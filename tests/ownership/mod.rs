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
    Lease, Order, Pool, PoolHandle, Sequence, SequenceId,
};
use kvpool_testkit::model::Pick;
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;

use world::{Checked, World, new_pool};

const BLOCKS: usize = 48;
const POOLS: usize = 2;
/// Number of handles that are kept for misuse.
const KNOWN_MAX: usize = 200;

/// Operation on a handle.
#[derive(Clone, Copy, Debug)]
enum Act {
    Free { through_handle: bool },
    FreeTwice,
    Share,
    Pin,
    Unpin,
    Seal,
    Reopen,
    PinScoped,
    Lease,
}

#[derive(Clone, Debug)]
enum Operation {
    Lease { pool: bool, blocks: u8, pinned: bool, contiguous: bool, through_handle: bool },
    Raw { pool: bool, blocks: u8, pinned: bool },
    Drop(Pick),
    DropElsewhere(Pick),
    Release(Pick, bool),
    Forget(Pick),
    Truncate(Pick, Pick),
    SplitOff(Pick, Pick),
    SealLease(Pick, Pick),
    ReopenLease(Pick, Pick),
    IntoRaw(Pick),
    FromRaw(Vec<Pick>),
    ByHandle(Pick, Act),
    ByList(Vec<Pick>),
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
    let act = prop_oneof![
        4 => any::<bool>().prop_map(|through_handle| Act::Free { through_handle }),
        1 => Just(Act::FreeTwice),
        2 => Just(Act::Share),
        2 => Just(Act::Pin),
        3 => Just(Act::Unpin),
        2 => Just(Act::Seal),
        2 => Just(Act::Reopen),
        2 => Just(Act::PinScoped),
        1 => Just(Act::Lease),
    ];
    prop_oneof![
        8 => (any::<bool>(), size(), any::<[bool; 3]>()).prop_map(
            |(pool, blocks, [pinned, contiguous, through_handle])| Operation::Lease {
                pool, blocks, pinned, contiguous, through_handle
            }
        ),
        5 => (any::<bool>(), size(), any::<bool>())
            .prop_map(|(pool, blocks, pinned)| Operation::Raw { pool, blocks, pinned }),
        3 => pick().prop_map(Operation::Drop),
        1 => pick().prop_map(Operation::DropElsewhere),
        2 => (pick(), any::<bool>()).prop_map(|(lease, pool)| Operation::Release(lease, pool)),
        1 => pick().prop_map(Operation::Forget),
        2 => (pick(), pick()).prop_map(|(lease, keep)| Operation::Truncate(lease, keep)),
        2 => (pick(), pick()).prop_map(|(lease, at)| Operation::SplitOff(lease, at)),
        3 => (pick(), pick()).prop_map(|(lease, place)| Operation::SealLease(lease, place)),
        2 => (pick(), pick()).prop_map(|(lease, place)| Operation::ReopenLease(lease, place)),
        2 => pick().prop_map(Operation::IntoRaw),
        2 => vec(pick(), 1..6).prop_map(Operation::FromRaw),
        14 => (pick(), act).prop_map(|(handle, act)| Operation::ByHandle(handle, act)),
        2 => vec(pick(), 1..8).prop_map(Operation::ByList),
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

/// Regression: a lease's blocks were freed by handle, and then had two owners.
#[test]
fn a_leases_handles_free_nothing() {
    let pool = new_pool();
    let request = AllocRequest::new(3);
    let first = pool.allocate(request).unwrap();
    let handles: Vec<_> = first.handles().collect();
    assert_eq!(pool.free(&handles), Err(HandleError::Guarded { handle: handles[0] }));
    let second = pool.allocate(request).unwrap();
    drop(first);
    let third = pool.allocate(request).unwrap();
    assert!(second.blocks().iter().all(|id| !third.blocks().contains(id)), "{second:?} {third:?}");
    drop((second, third));
    assert_eq!(pool.audit().unwrap().owned, 0);
}
