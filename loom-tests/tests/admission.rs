//! Theorem: an admission that waits is admitted once its blocks are free, whichever way these
//! become free, and with its cached prefix, which it holds during each attempt and gives back after
//! a failed one. Giving back wakes no request for ever, and lets none sleep beside a free block.
//!
//! Theorem: an append that begins after a request of higher priority entered the queue gets no
//! block before that request has left it; a running sequence that waits comes before an admission
//! of its priority, and an admission that waits before one that begins later.
//!
//! Theorem: a reserved block is owned: an append that draws on the reservation cannot fail,
//! whatever other threads allocate.
#![cfg(kvpool_loom)]

use kvpool::prefix::{HashKey, PrefixConfig};
use kvpool::storage::KvLayout;
use kvpool::{
    AdmitRequest, AllocError, AllocRequest, Pool, PoolBuilder, Priority, SequenceError, SequenceId,
};
use kvpool_loom_tests::{block_on, boxed, check, check_to, conclude, join_last, lull};
use loom::thread;

/// Tokens per block of the layout.
const BLOCK_TOKENS: usize = 4;

fn builder(blocks: usize) -> PoolBuilder {
    let layout = KvLayout::named("tiny").unwrap();
    Pool::builder(layout)
        .blocks(blocks)
        .without_null_block()
        .segment_blocks(4)
        .without_storage()
        .magazine_blocks(0)
}

fn open(blocks: usize) -> Pool {
    builder(blocks).build().unwrap()
}

fn close(pool: &Pool) {
    conclude(pool.blocks());
    let report = pool.audit().unwrap();
    assert_eq!((report.owned, pool.stats().waiting, pool.sequence_count()), (0, 0, 0), "{report:?}");
    assert!(!pool.blocks().is_awaited());
}

fn request(id: u64, prompt: &[u32]) -> AdmitRequest<'_> {
    AdmitRequest::new(SequenceId(id), prompt)
}

/// A block is freed by a lease, while an admission arrives.
#[test]
fn a_free_admits() {
    check("admission::a_free_admits", || {
        let pool = open(1);
        let held = pool.allocate(AllocRequest::new(1)).unwrap();
        let other = pool.clone();
        let thread = thread::spawn(move || {
            let prompt = [1; BLOCK_TOKENS];
            let mut sequence = block_on(other.admit_async(&request(1, &prompt))).unwrap();
            // Reserved: cannot fail.
            let mut step = other.begin_batch();
            step.append(&mut sequence, BLOCK_TOKENS).unwrap();
            step.finish();
        });
        drop(held);
        join_last(thread);
        close(&pool);
    });
}

/// The prefix is cached, and may not be evicted for the rest of the same prompt; the other block is
/// freed meanwhile.
#[test]
fn the_prefix_is_kept() {
    check_to(1, "admission::the_prefix_is_kept", || {
        let key = HashKey::from_bytes([7; 32]);
        let pool = builder(2).prefix_cache(PrefixConfig::new().key(key)).build().unwrap();
        let prompt = [1; 2 * BLOCK_TOKENS];
        let mut first = pool.sequence(SequenceId(1)).tokens(&prompt[..BLOCK_TOKENS]).unwrap();
        let mut step = pool.begin_batch();
        step.append(&mut first, BLOCK_TOKENS).unwrap();
        step.finish();
        drop(first);
        assert_eq!(pool.stats().evictable, 1);
        let held = pool.allocate(AllocRequest::new(1)).unwrap();
        let other = pool.clone();
        let thread = thread::spawn(move || {
            let sequence = block_on(other.admit_async(&request(2, &prompt))).unwrap();
            assert_eq!((sequence.len(), sequence.reserved_blocks()), (BLOCK_TOKENS, 1));
        });
        drop(held);
        join_last(thread);
        close(&pool);
    });
}

/// An admission is in the queue, and searches with its prefix in hand, the only block that can be
/// evicted; meanwhile a more urgent request comes, which finds nothing. The admission is not polled
/// again before that request has got the block.
#[test]
fn a_request_ahead_learns_of_the_prefix_put_back() {
    check_to(1, "admission::a_request_ahead_learns_of_the_prefix_put_back", || {
        let key = HashKey::from_bytes([7; 32]);
        let pool = builder(2).prefix_cache(PrefixConfig::new().key(key)).build().unwrap();
        let prompt = [1; 2 * BLOCK_TOKENS];
        let mut first = pool.sequence(SequenceId(1)).tokens(&prompt[..BLOCK_TOKENS]).unwrap();
        let mut step = pool.begin_batch();
        step.append(&mut first, BLOCK_TOKENS).unwrap();
        step.finish();
        drop(first);
        let held = pool.allocate_owned(AllocRequest::new(1)).unwrap();
        let other = pool.clone();
        let thread = thread::spawn(move || {
            let urgent = AllocRequest::new(1).priority(Priority::Urgent);
            drop(block_on(other.allocate_async(urgent)).unwrap());
        });
        let wanted = request(2, &prompt);
        let mut waiting = boxed(|| pool.admit_async(&wanted).into_future());
        lull(waiting.as_mut());
        join_last(thread);
        drop(held);
        drop(block_on(waiting).unwrap());
        close(&pool);
    });
}

/// An urgent admission is in the queue; then another thread appends, and the block is freed.
#[test]
fn an_append_follows_an_urgent_admission() {
    check_to(1, "admission::an_append_follows_an_urgent_admission", || {
        let pool = open(1);
        let held = pool.allocate_owned(AllocRequest::new(1)).unwrap();
        let prompt = [1; BLOCK_TOKENS];
        let wanted = request(1, &prompt).priority(Priority::Urgent);
        let mut waiting = Box::pin(pool.admit_async(&wanted).into_future());
        lull(waiting.as_mut());
        let other = pool.clone();
        let thread = thread::spawn(move || {
            let mut sequence = other.sequence(SequenceId(2)).open().unwrap();
            drop(held);
            let refused = other.begin_batch().append(&mut sequence, 1);
            // Admitted meanwhile, or still in the queue: in either case the block is not for this
            // thread.
            assert!(
                matches!(
                    refused,
                    Err(SequenceError::Alloc(AllocError::Behind { .. } | AllocError::Exhausted { .. }))
                ),
                "{refused:?}"
            );
        });
        let sequence = block_on(waiting).unwrap();
        join_last(thread);
        drop(sequence);
        close(&pool);
    });
}

/// An admission is in the queue; then another thread tries one of the same priority, and the block
/// is freed.
#[test]
fn a_new_admission_follows_a_waiting_one() {
    check_to(1, "admission::a_new_admission_follows_a_waiting_one", || {
        let pool = open(1);
        let held = pool.allocate_owned(AllocRequest::new(1)).unwrap();
        let prompt = [1; BLOCK_TOKENS];
        let wanted = request(1, &prompt);
        let mut waiting = Box::pin(pool.admit_async(&wanted).into_future());
        lull(waiting.as_mut());
        let other = pool.clone();
        let thread = thread::spawn(move || {
            drop(held);
            let refused = other.admit(&request(2, &[2; BLOCK_TOKENS])).map(drop);
            // As an append that follows an urgent admission.
            assert!(
                matches!(
                    refused,
                    Err(SequenceError::Alloc(AllocError::Behind { .. } | AllocError::Exhausted { .. }))
                ),
                "{refused:?}"
            );
        });
        let sequence = block_on(waiting).unwrap();
        join_last(thread);
        drop(sequence);
        close(&pool);
    });
}

/// A running sequence gives its reserved block back, while an admission arrives.
#[test]
fn a_released_reservation_admits() {
    check("admission::a_released_reservation_admits", || {
        let pool = open(1);
        let mut running = pool.sequence(SequenceId(1)).open().unwrap();
        running.reserve(1).unwrap();
        let other = pool.clone();
        let thread = thread::spawn(move || {
            let prompt = [2; BLOCK_TOKENS];
            drop(block_on(other.admit_async(&request(2, &prompt))).unwrap());
        });
        assert_eq!(running.release_reservation(), 1);
        // The sequence stays open: its end might announce the block too.
        join_last(thread);
        drop(running);
        close(&pool);
    });
}

/// An admission waits, then a running sequence; both get the block in turn.
#[test]
fn running_before_new() {
    check_to(1, "admission::running_before_new", || {
        let pool = open(1);
        let held = pool.allocate_owned(AllocRequest::new(1)).unwrap();
        let prompt = [1; BLOCK_TOKENS];
        let wanted = request(1, &prompt);
        let mut admission = boxed(|| pool.admit_async(&wanted).into_future());
        lull(admission.as_mut());
        let mut running = pool.sequence(SequenceId(2)).open().unwrap();
        let growing = &mut running;
        let mut reserving = boxed(|| pool.reserve_async(growing, 1).into_future());
        lull(reserving.as_mut());
        let thread = thread::spawn(move || drop(held));
        // The admission is not polled: were it the first, this would sleep for ever.
        block_on(reserving).unwrap();
        drop(running);
        drop(block_on(admission).unwrap());
        join_last(thread);
        close(&pool);
    });
}

/// A dropped admission passes its turn on.
#[test]
fn a_dropped_admission_passes_its_turn_on() {
    check_to(1, "admission::a_dropped_admission_passes_its_turn_on", || {
        let pool = open(1);
        let held = pool.allocate_owned(AllocRequest::new(1)).unwrap();
        let prompt = [1; BLOCK_TOKENS];
        let wanted = request(1, &prompt);
        let mut first = Box::pin(pool.admit_async(&wanted).into_future());
        lull(first.as_mut());
        let other = pool.clone();
        let thread = thread::spawn(move || {
            let prompt = [2; BLOCK_TOKENS];
            drop(block_on(other.admit_async(&request(2, &prompt))).unwrap());
        });
        drop(held);
        drop(first);
        join_last(thread);
        close(&pool);
    });
}
