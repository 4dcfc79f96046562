//! Hits of several groups of layers at one boundary, compared with a search over all boundaries.

use std::collections::HashMap;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use kvpool::{AllocRequest, FrameError, FrameGroup, FrameKey, FramePool, HitGroup, Need};
use proptest::prelude::*;

use super::{allocate, pool, references};

/// Units of a block, what the group needs, and which of its blocks are cached.
type Layers = (usize, Need, Vec<bool>);

fn keys(pool: &FramePool, group: usize, blocks: usize) -> Vec<FrameKey> {
    let key = |block: usize| pool.key(FrameGroup(group as u32), &block.to_le_bytes()).unwrap();
    (0..blocks).map(key).collect()
}

fn units(units: usize) -> NonZeroUsize {
    NonZeroUsize::new(units).unwrap()
}

/// The places that a group needs at a boundary, if it can be hit there.
fn needed((units, need, cached): &Layers, boundary: usize) -> Option<Vec<usize>> {
    let blocks = boundary / units;
    let last = match *need {
        Need::Last(0) => return Some(Vec::new()),
        Need::Last(last) => last,
        Need::At => 1,
        Need::All => blocks,
    };
    let is_whole = boundary.is_multiple_of(*units) && blocks <= cached.len();
    let places = blocks.saturating_sub(last)..blocks;
    (is_whole && places.clone().all(|place| cached[place])).then(|| places.collect())
}

fn layers() -> impl Strategy<Value = Layers> {
    let need = prop_oneof![
        3 => Just(Need::All),
        3 => (0..5_usize).prop_map(Need::Last),
        1 => Just(Need::At),
    ];
    (1..4_usize, need, prop::collection::vec(prop::bool::weighted(0.8), 0..12))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(debug_assertions) { 100 } else { 1_000 }))]
    /// The hit is the longest boundary at which every group has what it needs, with one reference on
    /// each of these frames and on no others.
    #[test]
    fn a_hit_is_the_longest_boundary_of_all_groups(groups in prop::collection::vec(layers(), 0..5)) {
        let pool = pool(80);
        let mut frame_of = HashMap::new();
        for (group, (_, _, cached)) in groups.iter().enumerate() {
            let keys = keys(&pool, group, cached.len());
            for (place, key) in keys.into_iter().enumerate().filter(|&(place, _)| cached[place]) {
                let frame = allocate(&pool, 1)[0];
                pool.register(&[(frame, key)]).unwrap();
                frame_of.insert((group, place), frame);
            }
        }
        let all: Vec<u32> = frame_of.values().copied().collect();
        pool.free(&all).unwrap();
        let keys: Vec<_> =
            groups.iter().enumerate().map(|(group, layers)| keys(&pool, group, layers.2.len())).collect();
        let asked = keys.iter().zip(&groups);
        let asked: Vec<_> = asked
            .map(|(keys, &(of, need, _))| HitGroup { keys, block_units: units(of), need })
            .collect();
        let has_say = groups.iter().any(|(_, need, _)| *need != Need::Last(0));
        let longest = (0..50).rev().find(|&at| groups.iter().all(|layers| needed(layers, at).is_some()));
        let longest = longest.filter(|_| has_say).unwrap_or(0);
        let expected: Vec<Vec<u32>> = groups.iter().enumerate().map(|(group, layers)| {
            needed(layers, longest).unwrap().into_iter().map(|place| frame_of[&(group, place)]).collect()
        }).collect();
        let (boundary, frames) = pool.hit_groups(&asked).unwrap();
        prop_assert_eq!((boundary, &frames), (longest, &expected));
        let held: Vec<u32> = frames.concat();
        for frame in all {
            prop_assert_eq!(references(&pool, &[frame])[0], u32::from(held.contains(&frame)));
        }
        pool.free(&held).unwrap();
        prop_assert_eq!(pool.available(), pool.frames() - 1);
        pool.audit().unwrap();
    }
}

#[test]
fn a_key_of_another_pool_takes_nothing() {
    let (pool, other) = (pool(20), super::pool(20));
    let (own, foreign) = (keys(&pool, 0, 3), keys(&other, 1, 2));
    let frames = allocate(&pool, 3);
    pool.register(&frames.iter().copied().zip(own.iter().copied()).collect::<Vec<_>>()).unwrap();
    pool.free(&frames).unwrap();
    let group = |keys| HitGroup { keys, block_units: NonZeroUsize::MIN, need: Need::All };
    let error = pool.hit_groups(&[group(&own), group(&foreign)]).unwrap_err();
    assert!(matches!(error, FrameError::ForeignKey { index: 3, .. }), "{error}");
    assert_eq!(references(&pool, &frames), [0; 3]);
}

/// Beside evictions, each hit is of one boundary: the frames of both groups have the same contents.
#[test]
fn groups_are_hit_while_frames_are_evicted() {
    const BLOCKS: usize = 12;
    let pool = &FramePool::builder(40).threads(4).build().unwrap();
    let keys = &[keys(pool, 0, BLOCKS), keys(pool, 1, BLOCKS)];
    let (is_over, rounds) = (&AtomicBool::new(false), if cfg!(debug_assertions) { 300 } else { 5_000 });
    let group = |of: usize, need| HitGroup { keys: &keys[of], block_units: NonZeroUsize::MIN, need };
    let hits = thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Relaxed) {
                pool.evict(3);
                thread::yield_now();
            }
        });
        let worker = |seed| {
            move || {
                let (mut random, mut hits) = (fastrand::Rng::with_seed(seed), 0);
                for _ in 0..rounds {
                    let asked = [group(0, Need::All), group(1, Need::Last(2))];
                    let (boundary, frames) = pool.hit_groups(&asked).unwrap();
                    assert_eq!((frames[0].len(), frames[1].len()), (boundary, boundary.min(2)));
                    assert!(references(pool, &frames.concat()).iter().all(|&references| references > 0));
                    hits += usize::from(boundary > 0);
                    // Computes the rest in both groups, if there is room.
                    let mut fresh = Vec::new();
                    let rest = random.usize(boundary..=BLOCKS) - boundary;
                    if rest > 0 && pool.allocate(AllocRequest::new(2 * rest), &mut fresh).is_ok() {
                        let places =
                            (boundary..boundary + rest).flat_map(|place| [keys[0][place], keys[1][place]]);
                        pool.register(&fresh.iter().copied().zip(places).collect::<Vec<_>>()).unwrap();
                    }
                    pool.free(&[frames.concat(), fresh].concat()).unwrap();
                }
                hits
            }
        };
        let workers = [scope.spawn(worker(1)), scope.spawn(worker(2))];
        let hits: usize = workers.map(|worker| worker.join().unwrap()).iter().sum();
        is_over.store(true, Relaxed);
        hits
    });
    assert!(hits > 0, "no request was hit");
    pool.trim();
    pool.audit().unwrap();
}
