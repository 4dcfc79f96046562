//! The audit: recounts every frame and compares the result with the counters.

use std::collections::BTreeMap;
use std::time::Duration;

use thiserror::Error;

use crate::frame::Magazine;
use crate::ids::{BlockId, FrameId, Run, TenantId};
use crate::sync::{heavy_fence, pause};

use super::accounts::{Accounts, Unaccounted};
use super::core::Core;
use super::counts::Counts;
use super::state::{Noted, SourcePlace};
use super::tenants::TENANTS_MAX;
use super::thread_cache::{Local, ThreadCache};

/// Walks of an audit that finds a contradiction, with pauses of 1, 2, 4 .. ms between them.
const WALKS: u32 = if cfg!(kvpool_loom) { 3 } else { 6 };

/// Number of frames that an audit found in each place.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub struct AuditReport {
    /// Number of frames, including the null block's.
    pub total: usize,
    /// Frames that are free in the bitmaps.
    pub in_bitmap: usize,
    /// Part of [`in_bitmap`](Self::in_bitmap) that sequences reserve for their growth.
    pub reserved_for_growth: usize,
    /// Frames that are free in magazines and in the depot.
    pub in_magazines: usize,
    /// Retired frames.
    pub retired: usize,
    /// Held frames.
    pub held: usize,
    /// Part of [`held`](Self::held) that could not be wiped.
    #[cfg_attr(feature = "serde", serde(default))]
    pub unwiped: usize,
    /// Free frames that are set aside for urgent requests.
    pub reserved: usize,
    /// Frames of evictable blocks.
    pub evictable: usize,
    /// Frames of owned blocks.
    pub owned: usize,
    /// Total number of references on owned blocks.
    pub references: u64,
    /// In debug builds, the number of owned blocks of leases by the place that allocated them.
    pub allocated_at: Vec<(SourcePlace, usize)>,
}

/// A contradiction found by an audit.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
#[non_exhaustive]
pub enum AuditError {
    /// A thread was allocating or freeing, so the counters cannot be compared.
    #[error("a thread is using the pool; audit it while none does")]
    Busy,
    /// The kernel denies this thread the fence that visits need. Audit from another thread.
    #[error("the system refuses this thread membarrier(2), which visits to other threads' caches need")]
    FenceRefused,
    /// The bitmaps contradict themselves.
    #[error("the bitmaps: {0}")]
    Bitmap(&'static str),
    /// A frame is in two places at once.
    #[error("frame {frame} is {first} and {second} at once")]
    Doubled {
        /// The frame.
        frame: FrameId,
        /// Place where it was found first.
        first: FramePlace,
        /// Place where it was found next.
        second: FramePlace,
    },
    /// A free frame is in no free list.
    #[error("frame {frame} is lost: its block {block} is free, and it is in no free list")]
    Lost {
        /// The frame.
        frame: FrameId,
        /// Its block.
        block: BlockId,
    },
    /// A frame that a shrink removed is in use, or free.
    #[error("frame {frame} was removed by a shrink, and its block {block} is not held")]
    Beyond {
        /// The frame.
        frame: FrameId,
        /// Its block.
        block: BlockId,
    },
    /// Block and frame do not name each other.
    #[error("block {block} is in frame {frame}, which names block {other}")]
    Bijection {
        /// The block.
        block: BlockId,
        /// The frame that its word names.
        frame: FrameId,
        /// The block that the frame names.
        other: BlockId,
    },
    /// More units are reserved for growth than sequences are open.
    #[error("{units} units are reserved for growth, and {sequences} sequences are open")]
    ReservedForGrowth {
        /// Number of units reserved for growth.
        units: usize,
        /// Number of open sequences.
        sequences: usize,
    },
    /// A referenced frame of a frame pool is not pinned by its references.
    #[error("frame {frame} has references and {pins} pins")]
    NotInPlace {
        /// The frame.
        frame: FrameId,
        /// Number of pins.
        pins: u32,
    },
    /// A block of a frame pool has hashes but is not cached.
    #[error("block {block} is not cached, and has hashes")]
    StrayHash {
        /// The block.
        block: BlockId,
    },
    /// References without an owner that will release them, or owners without a reference.
    #[error(transparent)]
    Unaccounted(#[from] Unaccounted),
    /// The account of a tenant differs from the recount.
    #[error("tenant {tenant}: held, charged and cached are {counted:?}, the walk found {held} and {cached}")]
    Tenant {
        /// The tenant.
        tenant: TenantId,
        /// Blocks that it holds, was charged for, and has cached, by its account.
        counted: [u64; 3],
        /// Blocks that name it.
        held: u64,
        /// Those of them that are evictable.
        cached: u64,
    },
    /// The counters differ from the recount.
    #[error("the counters say {counted:?}, the walk found {found:?}")]
    Miscounted {
        /// The fast counters.
        counted: Counts,
        /// The recount.
        found: Counts,
    },
}

/// Place of a frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum FramePlace {
    /// Free in the bitmaps.
    Bitmap,
    /// Free in a magazine or in the depot.
    Magazine,
    /// Retired.
    Retired,
    /// Held: the destination of a move, collected by a shrink, or not wiped.
    Held,
    /// Set aside for urgent requests.
    Reserved,
    /// Owned.
    Owned,
    /// Evictable.
    Evictable,
    /// The null block's.
    Null,
    /// Removed by a shrink.
    Gone,
}

impl std::fmt::Display for FramePlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Bitmap => "free in the bitmaps",
            Self::Magazine => "in a magazine",
            Self::Retired => "retired",
            Self::Held => "held",
            Self::Reserved => "in the reserve",
            Self::Owned => "owned",
            Self::Evictable => "evictable",
            Self::Null => "the null block's",
            Self::Gone => "removed by a shrink",
        })
    }
}

struct Ledger {
    seen: Vec<Option<FramePlace>>,
    outcome: Result<(), AuditError>,
}

impl Ledger {
    fn see(&mut self, frame: FrameId, place: FramePlace) {
        let first = &mut self.seen[frame.index()];
        match *first {
            None => *first = Some(place),
            Some(first) => {
                let doubled = AuditError::Doubled { frame, first, second: place };
                self.outcome = self.outcome.clone().and(Err(doubled));
            }
        }
    }

    fn see_run(&mut self, run: Run, place: FramePlace) {
        run.frames().for_each(|frame| self.see(frame, place));
    }

    fn count(&self, place: FramePlace) -> usize {
        self.seen.iter().filter(|&&seen| seen == Some(place)).count()
    }
}

fn visited(thread_cache: &ThreadCache, f: impl FnOnce(&mut Local)) -> Result<(), AuditError> {
    thread_cache
        .visit(f)
        .ok_or_else(|| if heavy_fence() { AuditError::Busy } else { AuditError::FenceRefused })
}

impl Core {
    /// Recounts everything: each frame is in one place, blocks and frames name each other, and the
    /// counters agree. Must be called while no thread allocates or frees; leases and batches may be
    /// open. Repeats a walk that finds a contradiction: a thread that ends empties its cache late.
    pub fn audit(&self) -> Result<AuditReport, AuditError> {
        self.confirmed(|| self.walk())
    }

    /// [Audits](Self::audit) that each reference has an owner.
    pub(crate) fn audit_owners(&self, accounts: impl Fn() -> Accounts) -> Result<(), AuditError> {
        self.confirmed(|| {
            let (before, Accounts { listed, unlisted, lists_shared }) = (self.sum_counts(), accounts());
            let mut owned = vec![0_i64; self.rows()];
            listed.iter().for_each(|id| owned[id.index()] += 1);
            let mut references = -self.counted_references() - unlisted as i64;
            let (mut blocks, mut candidates) = (Vec::new(), Vec::new());
            for (id, owned) in (0..).map(BlockId).zip(owned) {
                let word = self.word(id);
                let others = i64::from(word.refs()) - owned;
                references += others;
                // A lease's block is in no list and not cached.
                let is_leasable = owned == 0 && others > 0 && !word.is_cached();
                if others != 0 {
                    let is_sure = lists_shared && !is_leasable;
                    if is_sure { blocks.push(id) } else { candidates.push(id) }
                }
            }
            if self.sum_counts() != before {
                Err(AuditError::Busy)
            } else if references == 0 && blocks.is_empty() {
                Ok(())
            } else {
                Err(Unaccounted { references, blocks, candidates }.into())
            }
        })
    }

    fn confirmed<T>(&self, walk: impl Fn() -> Result<T, AuditError>) -> Result<T, AuditError> {
        let mut outcome = walk();
        for walks in 1..WALKS {
            if matches!(outcome, Ok(_) | Err(AuditError::FenceRefused)) {
                break;
            }
            // A thread may be emptying its cache.
            pause(Duration::from_millis(1 << (walks - 1)));
            let visited = self.thread_caches.iter().try_for_each(|cache| visited(cache, |_| ()));
            // An owner that is still inside may be gone by the end of the next walk.
            outcome = visited.and_then(|()| walk());
        }
        outcome
    }

    fn walk(&self) -> Result<AuditReport, AuditError> {
        self.space.frames.audit().map_err(AuditError::Bitmap)?;
        // A waiting request may search while frames are counted here.
        let wake_guard = self.wake_guard();
        let total = self.total_frames();
        let mut ledger = Ledger { seen: vec![None; self.rows()], outcome: Ok(()) };
        self.space.frames.for_each_free_run(&mut |run| ledger.see_run(run, FramePlace::Bitmap));
        let mut magazines: Vec<Magazine> = std::iter::from_fn(|| self.space.depot.pop()).collect();
        for magazine in magazines.drain(..) {
            magazine.iter().for_each(|frame| ledger.see(frame, FramePlace::Magazine));
            if let Err(mut magazine) = self.space.depot.push(magazine) {
                magazine.flush(&self.space.frames);
            }
        }
        for thread_cache in self.thread_caches.iter() {
            visited(thread_cache, |local| {
                local.magazines.iter().for_each(|frame| ledger.see(frame, FramePlace::Magazine));
                local.retire_list.runs().for_each(|run| ledger.see_run(run, FramePlace::Retired));
            })?;
        }
        self.shared_retire_list.for_each(&wake_guard, |run| ledger.see_run(run, FramePlace::Retired));
        self.for_each_reserved(&wake_guard, |frame| ledger.see(frame, FramePlace::Reserved));
        let references = self.audit_words(&mut ledger)?;
        ledger.outcome.clone()?;
        let report = AuditReport {
            total,
            in_bitmap: ledger.count(FramePlace::Bitmap),
            reserved_for_growth: self.audit_growth(&ledger)?,
            in_magazines: ledger.count(FramePlace::Magazine),
            retired: ledger.count(FramePlace::Retired),
            held: ledger.count(FramePlace::Held),
            unwiped: self.unwiped(),
            reserved: ledger.count(FramePlace::Reserved),
            evictable: ledger.count(FramePlace::Evictable),
            owned: ledger.count(FramePlace::Owned),
            references,
            allocated_at: self.allocated_at(),
        };
        self.compare(&report)?;
        self.audit_tenants()?;
        Ok(report)
    }

    /// [Audits](Self::audit) that owned blocks of a frame pool are pinned once; counts them.
    pub(crate) fn audit_in_place(&self) -> Result<usize, AuditError> {
        let words = (0..self.rows() as u32).map(|id| self.word(BlockId(id)));
        words.filter(|word| word.is_owned()).try_fold(0, |owned, word| {
            let is_in_place = word.pins() == 1;
            if is_in_place {
                Ok(owned + 1)
            } else {
                Err(AuditError::NotInPlace { frame: word.frame(), pins: word.pins() })
            }
        })
    }

    /// Returns the number of units that sequences reserve for growth, in O(1).
    pub fn growth_units(&self) -> usize {
        self.space.frames.growth_units()
    }

    fn audit_growth(&self, ledger: &Ledger) -> Result<usize, AuditError> {
        let mut reserved_for_growth = 0;
        self.space.frames.for_each_growth_unit(&mut |unit| {
            let seen = ledger.seen.get(unit.start.index()..).unwrap_or_default();
            let is_free = |seen: &&Option<FramePlace>| **seen == Some(FramePlace::Bitmap);
            reserved_for_growth += seen.iter().take(unit.len as usize).filter(is_free).count();
        });
        let is_right = reserved_for_growth == self.reserved_for_growth();
        if is_right {
            Ok(reserved_for_growth)
        } else {
            Err(AuditError::Bitmap("the frames reserved for growth are counted wrongly"))
        }
    }

    fn audit_words(&self, ledger: &mut Ledger) -> Result<u64, AuditError> {
        let mut references = 0;
        for block in (0..ledger.seen.len() as u32).map(BlockId) {
            let word = self.word(block);
            let frame = word.frame();
            let other = self.space.table.block_at(frame);
            if other != block {
                return Err(AuditError::Bijection { block, frame, other });
            }
            if frame.index() >= self.total_frames() {
                if !word.is_held() {
                    return Err(AuditError::Beyond { frame, block });
                }
                ledger.see(frame, FramePlace::Gone);
            } else if self.null_block() == Some(block) {
                ledger.see(frame, FramePlace::Null);
            } else if word.is_evictable() {
                ledger.see(frame, FramePlace::Evictable);
            } else if word.is_owned() {
                references += u64::from(word.refs());
                ledger.see(frame, FramePlace::Owned);
            } else if word.is_held() {
                ledger.see(frame, FramePlace::Held);
            } else if ledger.seen[frame.index()].is_none() {
                return Err(AuditError::Lost { frame, block });
            }
        }
        Ok(references)
    }

    fn audit_tenants(&self) -> Result<(), AuditError> {
        let Some(tenants) = self.tenants() else { return Ok(()) };
        let mut found = vec![(0, 0); TENANTS_MAX + 1];
        for id in (0..self.rows() as u32).map(BlockId) {
            let of = &mut found[tenants.of(id).index()];
            *of = (of.0 + 1, of.1 + u64::from(self.word(id).is_evictable()));
        }
        let Some((tenant, counted)) = tenants.audit(&found) else { return Ok(()) };
        let (held, cached) = found[tenant.index()];
        Err(AuditError::Tenant { tenant: tenants.id(tenant), counted, held, cached })
    }

    fn allocated_at(&self) -> Vec<(SourcePlace, usize)> {
        let mut places = BTreeMap::<SourcePlace, usize>::new();
        let ids = (0..self.rows() as u32).map(BlockId).filter(|&id| self.word(id).is_owned());
        for (place, _) in ids.filter_map(|id| self.site(Noted::Allocated, id)) {
            *places.entry(place).or_default() += 1;
        }
        places.into_iter().collect()
    }

    fn compare(&self, report: &AuditReport) -> Result<(), AuditError> {
        let counted = self.counts();
        let found = Counts {
            total: report.total - self.config.has_null_block as usize,
            in_bitmap: report.in_bitmap,
            // The counters count retired frames that no batch sees as free.
            in_magazines: report.in_magazines + report.retired - counted.retired.min(report.retired),
            retired: counted.retired.min(report.retired),
            held: report.held,
            reserved: report.reserved,
            evictable: report.evictable,
        };
        if counted == found { Ok(()) } else { Err(AuditError::Miscounted { counted, found }) }
    }
}

#[cfg(all(test, not(kvpool_loom)))]
mod tests {
    use super::*;
    use crate::block::{AllocRequest, Blocks, BlocksConfig};
    use crate::ids::DeviceId;

    fn blocks() -> Blocks {
        blocks_of(70)
    }

    fn blocks_of(frames: usize) -> Blocks {
        let config = BlocksConfig {
            frames,
            frames_max: frames,
            segment_frames: 64,
            magazine_blocks: 0,
            threads: 1,
            has_null_block: true,
            reserve: 0,
            run_frames: 0,
            device: DeviceId::Host,
        };
        Blocks::new(config, None)
    }

    #[test]
    fn a_held_frame_is_not_reported_as_lost() {
        let blocks = blocks();
        let frame = FrameId(7);
        assert!(blocks.space.frames.claim(Run { start: frame, len: 1 }));
        assert_eq!(blocks.audit(), Err(AuditError::Lost { frame, block: BlockId(7) }));
        blocks.space.hold_frame(frame);
        let report = blocks.audit().unwrap();
        assert_eq!((report.held, report.in_bitmap, report.owned), (1, 68, 0));
        let counts = blocks.counts();
        assert_eq!((counts.held, counts.free(), counts.used()), (1, 68, 0));
        let mut got = Vec::new();
        blocks.allocate(&AllocRequest::new(68), &mut |id| got.push(id)).unwrap();
        assert!(!got.contains(&BlockId(7)));
        blocks.space.release_held(frame);
        blocks.allocate(&AllocRequest::new(1), &mut |id| got.push(id)).unwrap();
        assert_eq!((got.last(), blocks.audit().unwrap().held), (Some(&BlockId(7)), 0));
    }

    #[test]
    fn a_held_frame_in_a_free_list_is_in_two_places() {
        let blocks = blocks();
        blocks.space.hold_frame(FrameId(9));
        let doubled =
            AuditError::Doubled { frame: FrameId(9), first: FramePlace::Bitmap, second: FramePlace::Held };
        assert_eq!(blocks.audit(), Err(doubled));
    }

    #[test]
    fn a_growth_unit_is_ended_by_its_owner_alone() {
        let blocks = blocks_of(8 * 64 + 6);
        assert!(blocks.begin_growth_unit(FrameId(8 * 64)));
        assert_eq!(
            (
                blocks.audit().unwrap().reserved_for_growth,
                blocks.reserved_for_growth(),
                blocks.growth_units()
            ),
            (6, 6, 1)
        );
        blocks.end_growth_unit(FrameId(8 * 64));
        assert_eq!((blocks.audit().unwrap().reserved_for_growth, blocks.growth_units()), (0, 0));
        blocks.end_growth_unit(FrameId(8 * 64));
        assert_eq!(
            blocks.audit(),
            Err(AuditError::Bitmap("the count of units reserved for growth is wrong"))
        );
    }

    #[test]
    #[should_panic(expected = "handed out while owned or held")]
    fn a_held_frame_is_not_handed_out() {
        let blocks = blocks();
        blocks.space.hold_frame(FrameId(1));
        let _ = blocks.allocate(&AllocRequest::new(69), &mut |_| ());
    }
}
