//! Checks of the results before any timing: a hit has the requested tokens, and no thread writes
//! into it.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

use super::{Engine, Worker};
use crate::threads::together;

const BLOCKS: usize = 512;
const BLOCK_TOKENS: usize = 16;

/// Runs two threads with prompts that share prefixes, in a pool too small for all of them. A value
/// that stands for the token and all before it is written to each token's place; cached places must
/// hold exactly that value, and so must all of them when the request ends.
///
/// # Panics
///
/// If a place does not, if nothing was ever cached, or if blocks are lost.
pub fn verify<E: Engine>() {
    let engine = E::new(BLOCKS, BLOCK_TOKENS);
    let memory: Vec<AtomicU64> = (0..(BLOCKS + 1) * BLOCK_TOKENS).map(|_| AtomicU64::new(0)).collect();
    let (found, asked) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let check = |slots: &[i64], values: &[u64]| {
        for (&slot, &value) in slots.iter().zip(values) {
            assert_eq!(memory[slot as usize].load(Relaxed), value, "{}: slot {slot}", E::NAME);
        }
    };
    let prepare = |thread: usize| (engine.worker(thread), fastrand::Rng::with_seed(thread as u64));
    together(2, prepare, |_, (worker, random)| {
        let mut open = Vec::new();
        for _ in 0..3_000 {
            let prompt = prompt(random);
            let values = values(&prompt);
            let mut slots = Vec::new();
            worker.begin();
            worker.prepare(&prompt);
            let mut request = worker.admit(&prompt);
            worker.slots(&request, 0..prompt.len(), &mut slots);
            let cached = <E::Worker<'_> as Worker>::cached(&request);
            check(&slots[..cached], &values);
            for (&slot, &value) in slots.iter().zip(&values).skip(cached) {
                memory[slot as usize].store(value, Relaxed);
            }
            found.fetch_add(cached, Relaxed);
            asked.fetch_add(prompt.len(), Relaxed);
            worker.finish(&mut request);
            open.push((request, slots, values));
            if open.len() > 4 {
                let (request, slots, values) = open.swap_remove(random.usize(..open.len()));
                check(&slots, &values);
                worker.end(request);
            }
        }
        for (request, slots, values) in open {
            check(&slots, &values);
            worker.end(request);
        }
    });
    let (found, asked) = (found.into_inner(), asked.into_inner());
    assert!(0 < found && found < asked, "{}: {found} of {asked} tokens were cached", E::NAME);
    assert_eq!(engine.unowned(), BLOCKS, "{} lost blocks", E::NAME);
}

/// Runs the same requests, some open at once, on two engines that have room for all their blocks.
///
/// # Panics
///
/// If the engines find different numbers of cached tokens.
pub fn verify_hits<A: Engine, B: Engine>() {
    let (a, b) = (hits::<A>(), hits::<B>());
    assert!(a == b, "{} and {} have different hits", A::NAME, B::NAME);
}

/// Returns the number of cached tokens of each of 3,000 prompts.
fn hits<E: Engine>() -> Vec<usize> {
    let mut random = fastrand::Rng::with_seed(7);
    let engine = E::new(128 * BLOCKS, BLOCK_TOKENS);
    let mut worker = engine.worker(0);
    let mut open = Vec::new();
    let one = |_| {
        let prompt = prompt(&mut random);
        worker.begin();
        worker.prepare(&prompt);
        let mut request = worker.admit(&prompt);
        // Each also decodes, so that its blocks end elsewhere than its prompt.
        (0..random.usize(..40)).for_each(|token| worker.append(&mut request, token as u32 % 2));
        worker.finish(&mut request);
        let cached = <E::Worker<'_> as Worker>::cached(&request);
        open.push(request);
        if open.len() > 4 {
            worker.end(open.swap_remove(random.usize(..open.len())));
        }
        cached
    };
    let cached = (0..3_000).map(one).collect();
    open.into_iter().for_each(|request| worker.end(request));
    cached
}

/// Up to 12 parts of 24 tokens, each one of two.
fn prompt(random: &mut fastrand::Rng) -> Vec<u32> {
    let parts = random.usize(1..=12);
    (0..parts).flat_map(|_| [random.u32(..2); 24]).collect()
}

/// Returns for each token the value that stands for it and all before it.
fn values(prompt: &[u32]) -> Vec<u64> {
    let add = |value: &mut u64, &token: &u32| {
        *value = (value.rotate_left(7) ^ u64::from(token + 1)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        Some(*value)
    };
    prompt.iter().scan(1, add).collect()
}
