//! Compares every operation, on one thread, with a naive model: a vector of booleans.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::config::{FAN, FAN_LOG2};
use crate::error::{GrowError, ShrinkError};
use crate::ids::{FrameId, Order, Run};

fn frames(frames: usize, frames_max: usize, segment_frames: usize) -> Frames {
    Frames::new(FrameConfig { frames, frames_max, segment_frames })
}

fn run(start: usize, len: usize) -> Run {
    Run { start: FrameId(start as u32), len: len as u32 }
}

/// The pool, and the naive model of its free and closed frames.
struct Checked {
    frames: Frames,
    free: Vec<bool>,
    closed: Vec<bool>,
    /// Units that were reserved for growth, by number.
    reserved_for_growth: BTreeSet<u32>,
}

impl Checked {
    fn new(config: FrameConfig) -> Self {
        Self {
            frames: Frames::new(config),
            free: vec![true; config.frames],
            closed: vec![false; config.frames],
            reserved_for_growth: BTreeSet::new(),
        }
    }

    fn take(&mut self, run: Run) {
        for frame in run.frames() {
            assert!(std::mem::replace(&mut self.free[frame.index()], false), "{frame} was not free");
        }
    }

    fn put(&mut self, run: Run) {
        for frame in run.frames() {
            assert!(!std::mem::replace(&mut self.free[frame.index()], true));
        }
        self.frames.free_run(run);
    }

    fn first_run(&self, len: usize, align: usize) -> Option<usize> {
        (0..self.free.len().saturating_sub(len - 1))
            .step_by(align)
            .find(|&at| (at..at + len).all(|frame| self.free[frame] && !self.closed[frame]))
    }

    fn has_run(&self, len: usize, align: usize) -> bool {
        self.first_run(len, align).is_some()
    }

    fn open_frames(&self) -> usize {
        self.free.iter().zip(&self.closed).filter(|(free, closed)| **free && !**closed).count()
    }

    fn check(&self) {
        self.frames.audit().unwrap();
        assert_eq!(self.frames.total(), self.free.len());
        let mut seen = vec![false; self.free.len()];
        let mut last_end = None;
        self.frames.for_each_free_run(&mut |run| {
            assert!(last_end.is_none_or(|end| end < run.start.0), "runs ascend and are maximal");
            last_end = Some(run.end());
            run.frames().for_each(|frame| seen[frame.index()] = true);
        });
        assert_eq!(seen, self.free);
        let free = self.free.iter().filter(|free| **free).count();
        let census = self.frames.census(Order(2));
        assert_eq!((self.frames.free_frames(), self.frames.free_counted()), (free, free));
        assert_eq!(census.free, free);
        let of_growth = |(frame, free): (usize, &bool)| {
            *free && self.reserved_for_growth.contains(&((frame >> FAN_LOG2) as u32))
        };
        let reserved_for_growth = self.free.iter().enumerate().filter(|&frame| of_growth(frame)).count();
        assert_eq!(
            (census.reserved_for_growth, self.frames.growth_frames()),
            (reserved_for_growth, reserved_for_growth)
        );
        let by_order = census.by_order.iter().enumerate().map(|(order, count)| count << order).sum::<usize>();
        assert_eq!(by_order, free);
        let aligned = |len: usize| {
            let whole =
                |at: &usize| at + len <= self.free.len() && self.free[*at..at + len].iter().all(|free| *free);
            len * (0..self.free.len()).step_by(len).filter(whole).count()
        };
        assert_eq!(census.free_in_order, aligned(4));
        assert_eq!(census.free_in_units, aligned(FAN));
    }
}

#[derive(Clone, Debug)]
enum Op {
    Aligned { order: u8, near: u32 },
    Run { len: u32, near: u32 },
    Many { count: u32, near: u32 },
    Some { count: u32, near: u32 },
    Refill { want: u32, near: u32 },
    Claim { start: u32, len: u32 },
    Free { pick: usize },
    FreePart { pick: usize, cut: u32 },
    Spare { frame: u32, on: bool },
    Extend { from: u32, want: u32, reserves: bool },
    Fresh { count: u32, near: u32 },
    Last { count: u32 },
    First { len: u32 },
    Grow { frames: usize },
    Shrink { to: usize, gives_up: bool },
}

fn any_op() -> impl Strategy<Value = Op> {
    let near = 0u32..2000;
    let len = prop_oneof![1u32..8, 1u32..140, 1u32..700];
    prop_oneof![
        2 => (0u8..10, near.clone()).prop_map(|(order, near)| Op::Aligned { order, near }),
        3 => (len.clone(), near.clone()).prop_map(|(len, near)| Op::Run { len, near }),
        2 => (len.clone(), near.clone()).prop_map(|(count, near)| Op::Many { count, near }),
        1 => (len.clone(), near.clone()).prop_map(|(count, near)| Op::Some { count, near }),
        3 => (1u32..70, near.clone()).prop_map(|(want, near)| Op::Refill { want, near }),
        2 => (near.clone(), len.clone()).prop_map(|(start, len)| Op::Claim { start, len }),
        6 => any::<usize>().prop_map(|pick| Op::Free { pick }),
        4 => (any::<usize>(), any::<u32>()).prop_map(|(pick, cut)| Op::FreePart { pick, cut }),
        2 => (0u32..2000, any::<bool>()).prop_map(|(frame, on)| Op::Spare { frame, on }),
        3 => (near.clone(), len.clone(), any::<bool>())
            .prop_map(|(from, want, reserves)| Op::Extend { from, want, reserves }),
        2 => (len.clone(), near.clone()).prop_map(|(count, near)| Op::Fresh { count, near }),
        2 => len.clone().prop_map(|count| Op::Last { count }),
        2 => len.clone().prop_map(|len| Op::First { len }),
        1 => (1usize..300).prop_map(|frames| Op::Grow { frames }),
        3 => (0usize..1500, any::<bool>()).prop_map(|(to, gives_up)| Op::Shrink { to, gives_up }),
    ]
}

fn apply(pool: &mut Checked, owned: &mut Vec<Run>, op: Op) {
    match op {
        Op::Aligned { order, near } => match pool.frames.allocate_aligned(Order(order), FrameId(near)) {
            Some(run) => {
                assert_eq!((run.len, run.start.0 % run.len), (1 << order, 0));
                pool.take(run);
                owned.push(run);
            }
            None => assert!(!pool.has_run(1 << order, 1 << order)),
        },
        Op::Run { len, near } => match pool.frames.allocate_run(len, FrameId(near)) {
            Some(run) => {
                assert_eq!(run.len, len);
                pool.take(run);
                owned.push(run);
            }
            None => assert!(!pool.has_run(len as usize, 1)),
        },
        Op::Many { count, near } => {
            let open = pool.open_frames();
            let mut got = Vec::new();
            let taken = pool.frames.allocate_many(count, FrameId(near), &mut |run| got.push(run));
            assert_eq!(taken as usize, open.min(count as usize));
            assert_eq!(taken, got.iter().map(|run| run.len).sum::<u32>());
            got.iter().for_each(|run| pool.take(*run));
            owned.extend(got);
        }
        // Hints may skip frames reserved for growth, and those of an open shrink.
        Op::Some { count, near } => {
            let mut got = Vec::new();
            let taken = pool.frames.allocate_some(count, FrameId(near), &mut |run| got.push(run));
            assert!(taken <= count && taken == got.iter().map(|run| run.len).sum::<u32>());
            got.iter().for_each(|run| pool.take(*run));
            owned.extend(got);
        }
        Op::Refill { want, near } => match pool.frames.refill(want, FrameId(near)) {
            Some(mask) => {
                assert!(mask.len() <= want && !mask.is_empty() && mask.base.index() % FAN == 0);
                for frame in mask.frames() {
                    let one = Run { start: frame, len: 1 };
                    pool.take(one);
                    owned.push(one);
                }
            }
            None => assert_eq!(pool.open_frames(), 0),
        },
        Op::Claim { start, len } => {
            let wanted = Run { start: FrameId(start), len };
            let is_free = pool
                .free
                .get(start as usize..(start + len) as usize)
                .is_some_and(|all| all.iter().all(|f| *f));
            assert_eq!(pool.frames.claim(wanted), is_free, "{wanted}");
            if is_free {
                pool.take(wanted);
                owned.push(wanted);
            }
        }
        Op::Free { pick } if !owned.is_empty() => {
            let run = owned.swap_remove(pick % owned.len());
            pool.put(run);
        }
        Op::FreePart { pick, cut } if !owned.is_empty() => {
            let pick = pick % owned.len();
            let run = owned[pick];
            let cut = 1 + cut % run.len;
            pool.put(Run { start: FrameId(run.end() - cut), len: cut });
            if cut == run.len {
                owned.swap_remove(pick);
            } else {
                owned[pick].len -= cut;
            }
        }
        Op::Spare { frame, on } => {
            let unit = frame >> FAN_LOG2;
            if on && pool.frames.begin_growth_unit(FrameId(frame)) {
                assert!(pool.reserved_for_growth.insert(unit), "a bit has one owner");
            } else if !on && pool.reserved_for_growth.remove(&unit) {
                pool.frames.end_growth_unit(FrameId(frame));
            }
        }
        Op::Extend { from, want, reserves } => {
            let from = FrameId(from % pool.free.len() as u32);
            let got = pool.frames.extend(from, want, reserves).unwrap_or(0);
            assert!(got <= want);
            let next = from.index() + got as usize;
            let unit = from.index() / FAN * FAN;
            let is_inside_whole =
                got == 0 && (unit..unit + FAN).all(|frame| pool.free.get(frame) == Some(&true));
            let ends = got == want
                || next.is_multiple_of(FAN)
                || is_inside_whole
                || pool.frames.is_reserved_for_growth(from);
            assert!(ends || !pool.free.get(next).is_some_and(|free| *free), "stopped at a free frame");
            if got > 0 {
                let run = Run { start: from, len: got };
                pool.take(run);
                owned.push(run);
            }
        }
        Op::Fresh { count, near } => {
            let units = pool.frames.free_units();
            let mut got = Vec::new();
            let taken = pool.frames.allocate_fresh(count, FrameId(near), &mut |run| got.push(run));
            assert_eq!(taken as usize, (count as usize).min(units * FAN));
            got.iter().for_each(|run| pool.take(*run));
            owned.extend(got);
        }
        Op::Last { count } => {
            let (units, mut got) = (pool.frames.free_units(), Vec::new());
            let taken = pool.frames.allocate_last(count, &mut |run| got.push(run));
            assert_eq!(taken as usize, (count as usize).min(units * FAN));
            assert!(got.iter().all(|run| run.start.index().is_multiple_of(FAN)));
            got.iter().for_each(|run| pool.take(*run));
            owned.extend(got);
        }
        Op::First { len } => match pool.frames.allocate_first(len) {
            Some(run) => {
                assert_eq!(run.len, len);
                assert_eq!(Some(run.start.index()), pool.first_run(len as usize, 1));
                pool.take(run);
                owned.push(run);
            }
            None => assert!(!pool.has_run(len as usize, 1)),
        },
        Op::Grow { frames } => {
            let total = pool.free.len();
            let mut prepared = None;
            let grown = pool.frames.grow(frames, &mut |run| {
                prepared = Some(run);
                Ok(())
            });
            match grown {
                Ok(added) => {
                    assert_eq!(Some(added), prepared);
                    assert_eq!(added, run(total, frames));
                    pool.free.resize(total + frames, true);
                    // The tail of a closed unit is closed with it.
                    let tail = total.next_multiple_of(FAN).min(total + frames);
                    let is_closed = !total.is_multiple_of(FAN) && pool.closed[total - 1];
                    pool.closed.resize(tail, is_closed);
                    pool.closed.resize(total + frames, false);
                }
                Err(error) => {
                    assert_eq!(error, GrowError::TooLarge { asked: frames, total, max: 1500 });
                    assert!(total + frames > 1500);
                }
            }
        }
        Op::Shrink { to, gives_up } => shrink(pool, to, gives_up),
        Op::Free { .. } | Op::FreePart { .. } => {}
    }
}

fn shrink(pool: &mut Checked, to: usize, gives_up: bool) {
    let total = pool.free.len();
    let mut shrink = match pool.frames.begin_shrink(to) {
        Ok(shrink) => shrink,
        Err(error) if to == 0 => return assert_eq!(error, ShrinkError::TooFew { asked: 0, min: 1 }),
        Err(error) => {
            assert!(to >= total);
            return assert_eq!(error, ShrinkError::NotSmaller { asked: to, total });
        }
    };
    assert_eq!(pool.frames.begin_shrink(1).unwrap_err(), ShrinkError::Busy);
    assert_eq!(pool.frames.grow(1, &mut |_| Ok(())), Err(GrowError::Busy));
    let is_free = |frame: usize| pool.free[frame] && !pool.closed[frame];
    let kept = (0..to).filter(|&frame| is_free(frame)).count();
    let mut got = Vec::new();
    assert_eq!(
        pool.frames.allocate_many(total as u32, FrameId(to as u32), &mut |run| got.push(run)),
        kept as u32
    );
    assert!(got.iter().all(|run| run.end() as usize <= to), "{got:?} includes frames of the region");
    got.into_iter().for_each(|run| pool.frames.free_run(run));
    let mut collected = vec![false; total];
    let missing = pool.frames.collect(&mut shrink, |run| {
        run.frames().for_each(|frame| assert!(!std::mem::replace(&mut collected[frame.index()], true)));
    });
    assert_eq!(collected[to..], pool.free[to..]);
    assert_eq!(missing, pool.free[to..].iter().filter(|free| !**free).count());
    assert_eq!(pool.frames.collect(&mut shrink, |_| panic!("nothing was freed since")), missing);
    if gives_up || missing > 0 {
        pool.frames.abandon_shrink(&shrink);
    } else {
        pool.frames.commit_shrink(&shrink);
        pool.free.truncate(to);
        pool.closed.truncate(to);
    }
    pool.frames.end_shrink(shrink);
    pool.check();
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 200 }))]

    #[test]
    fn as_the_naive_model(
        total in 1usize..1000,
        segment_log2 in 6u32..12,
        ops in prop::collection::vec(any_op(), 1..120),
    ) {
        let config = FrameConfig { frames: total, frames_max: 1500, segment_frames: 1 << segment_log2 };
        let mut pool = Checked::new(config);
        let mut owned = Vec::new();
        for (step, op) in ops.into_iter().enumerate() {
            apply(&mut pool, &mut owned, op);
            if step % 8 == 0 {
                pool.check();
            }
        }
        pool.check();
        for run in owned.drain(..) {
            pool.put(run);
        }
        pool.check();
        let census = pool.frames.census(Order(0));
        prop_assert_eq!((census.runs, census.longest_run), (1, pool.free.len()));
    }
}

#[test]
fn a_run_crosses_words_groups_and_segments() {
    for segment_frames in [FAN, 4 * FAN, FAN * FAN, 4 * FAN * FAN] {
        let pool = frames(9000, 9000, segment_frames);
        // Leave only a run that begins and ends inside words.
        assert!(pool.claim(run(0, 37)));
        assert!(pool.claim(run(8937, 63)));
        assert_eq!(pool.allocate_run(8901, FrameId(0)), None);
        assert_eq!(pool.allocate_run(8900, FrameId(5000)), Some(run(37, 8900)));
        assert_eq!(pool.allocate_run(1, FrameId(0)), None);
        assert_eq!(pool.free_frames(), 0);
        pool.free_run(run(37, 8900));
        pool.free_run(run(0, 37));
        pool.free_run(run(8937, 63));
        pool.audit().unwrap();
        assert_eq!(pool.census(Order(4)).longest_run, 9000);
    }
}

#[test]
fn holes_before_whole_units() {
    let pool = frames(4096, 4096, 4096);
    assert!(pool.claim(run(0, 4096)));
    pool.free_run(run(640, 3));
    pool.free_run(run(1280, 64));
    let refill = pool.refill(64, FrameId(0)).unwrap();
    assert_eq!((refill.base, refill.bits), (FrameId(640), 0b111));
    assert_eq!(pool.refill(10, FrameId(0)).unwrap().len(), 10);
    assert_eq!(pool.allocate_run(8, FrameId(0)), Some(run(1290, 8)));
}

#[test]
fn many_prefers_whole_units() {
    let pool = frames(4096, 4096, 4096);
    let mut runs = Vec::new();
    assert_eq!(pool.allocate_many(1000, FrameId(0), &mut |run| runs.push(run)), 1000);
    assert!(runs.len() <= 2, "{runs:?}");
    runs.clear();
    assert_eq!(pool.allocate_many(5000, FrameId(0), &mut |run| runs.push(run)), 3096);
    assert_eq!(pool.free_frames(), 0);
}

/// Without concurrent frees, hints lead to every free frame.
#[test]
fn allocate_some_finds_all_without_concurrent_frees() {
    for seed in 0..20 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let pool = frames(1_000, 1_000, 64 << (seed % 5));
        assert_eq!(pool.allocate_many(1_000, FrameId(0), &mut |_| ()), 1_000);
        let mut freed = 0;
        for frame in 0..1_000 {
            if rng.u64(..20) < seed {
                pool.free_run(run(frame, 1));
                freed += 1;
            }
        }
        let mut taken = 0;
        assert_eq!(pool.allocate_some(1_000, FrameId(0), &mut |run| taken += run.len), freed);
        assert_eq!((taken, pool.free_frames()), (freed, 0));
    }
}

#[test]
fn growth_units_are_taken_last() {
    let pool = frames(256, 256, 256);
    let head = pool.allocate_run(10, FrameId(0)).unwrap();
    assert!(
        pool.begin_growth_unit(head.start) && !pool.begin_growth_unit(FrameId(63)),
        "a bit has one owner"
    );
    assert!(!pool.begin_growth_unit(FrameId(64)), "one unit of four");
    assert_eq!((pool.growth_frames(), pool.free_units()), (54, 3));
    assert_eq!(pool.extend(FrameId(10), 4, false), None, "reserved for growth by another caller");
    assert_eq!(pool.extend(FrameId(10), 4, true), Some(4));
    for _ in 0..3 {
        let mask = pool.refill(64, FrameId(0)).unwrap();
        assert!(mask.base.0 >= 64 && mask.len() == 64, "{mask:?}");
    }
    assert_eq!(pool.refill_some(1, FrameId(0)), None, "hints lead to frames reserved for growth only");
    let rest = pool.refill(64, FrameId(0)).expect("a refusal is last");
    assert_eq!((rest.base.0, rest.len()), (0, 50));
    assert_eq!(pool.refill(1, FrameId(0)), None);
    pool.end_growth_unit(FrameId(0));
    assert!(pool.begin_growth_unit(FrameId(64)));
    assert!(!pool.begin_growth_unit(FrameId(4096)), "not of this pool");
}

#[test]
fn a_list_extends_over_whole_units() {
    let pool = frames(1024, 1024, 1024);
    let mut runs = Vec::new();
    assert_eq!(pool.allocate_fresh(100, FrameId(0), &mut |run| runs.push(run)), 100);
    assert_eq!(runs, [run(0, 100)]);
    assert_eq!(pool.extend(FrameId(100), 300, false), Some(300), "the leaf, and whole units behind it");
    assert!(pool.claim(run(448, 1)));
    assert_eq!(pool.extend(FrameId(400), 300, false), Some(48), "up to the next frame in use");
    assert_eq!(pool.extend(FrameId(512), 64, false), Some(64), "from the start of a unit");
    assert_eq!(pool.extend(FrameId(512), 64, false), None);
    assert_eq!(pool.free_units(), 7);
    let mut runs = RunList::new();
    assert_eq!(pool.allocate_fresh(700, FrameId(0), &mut |run| runs.append(run)), 448, "holes are left");
    assert_eq!(*runs, [run(576, 448)]);
    pool.audit().unwrap();
}

#[test]
fn a_growth_that_cannot_be_prepared_changes_nothing() {
    let pool = frames(100, 1000, 256);
    let refused = GrowError::Memory { asked: 50, reason: "none left" };
    assert_eq!(pool.grow(50, &mut |_| Err(refused)), Err(refused));
    assert_eq!((pool.total(), pool.free_frames()), (100, 100));
}

#[test]
#[should_panic(expected = "double free: leaf 1")]
fn a_double_free_is_a_panic_with_the_word() {
    let pool = frames(128, 128, 128);
    assert!(pool.claim(run(64, 10)));
    pool.free_run(run(64, 1));
    pool.free_run(run(64, 10));
}

#[test]
#[should_panic(expected = "which the pool does not have")]
fn a_foreign_frame_is_a_panic() {
    frames(64, 64, 64).free_run(run(640, 1));
}

/// The unit is whole and closed: the part before the cut remains allocatable.
#[test]
fn a_unit_that_is_cut_serves_up_to_the_cut() {
    let pool = frames(128, 128, 128);
    assert!(pool.claim(run(0, 64)));
    let mut shrink = pool.begin_shrink(100).unwrap();
    assert_eq!(pool.allocate_run(37, FrameId(0)), None);
    assert_eq!(pool.allocate_run(10, FrameId(0)), Some(run(64, 10)));
    assert_eq!(pool.refill(64, FrameId(0)).unwrap().bits, !0 >> 28 & !0 << 10, "up to 36 frames");
    assert_eq!(pool.refill(64, FrameId(0)), None);
    assert_eq!(pool.collect(&mut shrink, |_| ()), 0);
    pool.free_run(run(64, 36));
    pool.commit_shrink(&shrink);
    pool.end_shrink(shrink);
    pool.audit().unwrap();
    assert_eq!((pool.total(), pool.free_frames()), (100, 36));
    // Removed frames cannot be claimed by name, and growth adds them back in place.
    assert!(!pool.claim(run(100, 1)));
    assert_eq!(pool.grow(28, &mut |_| Ok(())), Ok(run(100, 28)));
    assert_eq!(pool.allocate_aligned(Order(6), FrameId(0)), Some(run(64, 64)), "merged");
}

#[test]
#[should_panic(expected = "1 of frames 64..128 are not the shrinker's")]
fn a_shrink_that_misses_a_frame_is_not_committed() {
    let pool = frames(128, 128, 128);
    assert!(pool.claim(run(100, 1)));
    let mut shrink = pool.begin_shrink(64).unwrap();
    assert_eq!(pool.collect(&mut shrink, |_| ()), 1);
    pool.commit_shrink(&shrink);
}

/// Searches do not probe removed words.
#[test]
fn removed_words_have_no_hints() {
    let pool = frames(3 * FAN * FAN, 3 * FAN * FAN, FAN * FAN);
    for frame in (0..pool.total()).step_by(3) {
        assert!(pool.claim(run(frame, 1)));
    }
    let mut shrink = pool.begin_shrink(FAN + 1).unwrap();
    for frame in (0..pool.total()).step_by(3).filter(|&frame| frame > FAN) {
        pool.free_run(run(frame, 1));
    }
    assert_eq!(pool.collect(&mut shrink, |_| ()), 0);
    pool.commit_shrink(&shrink);
    pool.end_shrink(shrink);
    assert_eq!(pool.hinted(2), 0);
    assert_eq!(pool.free_frames(), (0..FAN + 1).filter(|frame| frame % 3 != 0).count());
    pool.audit().unwrap();
}

/// One attempt before it reads the traffic, and one that is conclusive although it began a passage.
#[test]
fn a_failed_claim_tries_twice() {
    let pool = frames(128, 128, 64);
    assert!(pool.claim(run(70, 1)));
    let before = pool.with(|map| map.traffic());
    for taken in [run(70, 1), run(70, 5)] {
        let before = pool.with(|map| map.traffic());
        assert!(!pool.claim(taken));
        assert!(pool.with(|map| map.traffic()) == before.after(2), "{taken}");
    }
    assert!(pool.with(|map| map.traffic()) != before);
}

/// The models' audits compare the tally with the bitmaps and detect a wrong one.
#[test]
fn an_audit_finds_a_wrong_tally() {
    let pool = frames(5_000, 9_000, 1024);
    let before = pool.changes();
    pool.audit().unwrap();
    assert_eq!(pool.changes(), before, "reading changes nothing");
    assert_eq!(pool.allocate_run(100, FrameId(0)).map(|run| run.len), Some(100));
    assert_ne!(pool.changes(), before);
    pool.tally.took(FrameId(0), 1);
    assert_eq!(pool.audit(), Err("the tally of free frames is wrong"));
}
