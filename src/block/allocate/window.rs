//! A run for a contiguous request in a pool full of evictable blocks: a window with few evictions.
//!
//! A walk over the frames, region by region, takes the window with the fewest evictions of the
//! first region in which one ends; each walk begins in another region. Whether batches see a block
//! is looked up only where enough frames in a row are free or evictable: that reads the cache's row
//! of the block, and most walks of a full pool pass many blocks. If concurrent changes make the run
//! fail, the walk is repeated, a few times. That no window exists is [stored](super::refused): each
//! frame is counted once, and not if it has changed when it is looked up, so that the counts show
//! changes. Test of the borders: `a_run_is_refused_until_there_is_one`.

use crate::config::FAN;
use crate::frame::cheapest_window;
use crate::ids::{FrameId, Run, Ticket};
use crate::sync::Ordering::Relaxed;

use crate::block::core::{Core, WakeGuard};
use crate::block::state::TenantSet;
use crate::block::tenants::{TENANTS_MAX, Tenant};

const WINDOWS: usize = 3;

const REGION: usize = 1 << 13;

/// Minimum number of windows in a region.
const WINDOWS_IN_REGION: usize = 8;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Cost {
    Free,
    /// Evictable, if no batch sees it: not looked up yet.
    Open,
    /// Evictable, and of this tenant, which is read once: the block may be another's later.
    Evict(Tenant),
    Fixed,
}

impl Cost {
    fn evictions(self) -> Option<u32> {
        match self {
            Self::Free => Some(0),
            Self::Open | Self::Evict(_) => Some(1),
            Self::Fixed => None,
        }
    }

    /// Returns the tenant of a block that may be evicted, as an index.
    fn of(self) -> usize {
        match self {
            Self::Evict(tenant) => tenant.index(),
            _ => Tenant::NONE.index(),
        }
    }
}

#[derive(Default)]
struct Walk {
    /// The costs of a region's frames, behind those of the `len - 1` frames before it.
    costs: Vec<Cost>,
    /// The first costs of the walk, for the windows that begin in its last region.
    head: Vec<Cost>,
    /// Evictable blocks that were not looked up.
    open: usize,
    /// Those that no batch sees.
    unseen: usize,
    /// Those that batches see for certain, or that are protected.
    kept: usize,
    protected: TenantSet,
    free: usize,
    /// Whether frames were left out whose return no counter shows: a shrink has closed them, or a
    /// tenant has fewer blocks beyond its floor than a window.
    has_others: bool,
}

impl Walk {
    /// Keeps the last `kept` costs, and reads further ones. Returns the frame of the first cost.
    fn read(&mut self, core: &Core, kept: usize, start: usize, end: usize) -> usize {
        self.costs.drain(..self.costs.len().saturating_sub(kept));
        let kept = self.costs.len();
        for frame in start..end {
            let id = core.space.table.block_at(FrameId(frame as u32));
            let word = core.word(id);
            let is_evictable = word.frame().index() == frame && word.evict().is_some();
            self.costs.push(if is_evictable { Cost::Open } else { Cost::Fixed });
            self.open += usize::from(is_evictable);
        }
        for unit in (start..end).step_by(FAN) {
            let free = core.space.frames.all_free_in_unit(FrameId(unit as u32));
            for frame in free.frames().map(|frame| frame.index()) {
                if let Some(cost) = self.costs.get_mut(kept + frame - start) {
                    *cost = Cost::Free;
                    self.free += 1;
                }
            }
            let closed = core.space.frames.closed_in_unit(FrameId(unit as u32));
            self.has_others |= !closed.is_empty();
            for frame in closed.frames().map(|frame| frame.index()) {
                if let Some(cost) = self.costs.get_mut(kept + frame - start) {
                    *cost = Cost::Fixed;
                }
            }
        }
        start - kept
    }

    /// Looks up whether batches see the evictable blocks of each stretch that may contain a window,
    /// and whether they are protected from the tenant.
    /// `frame` is that of a cost.
    fn look_up(
        &mut self,
        core: &Core,
        (oldest, tenant): (Ticket, Tenant),
        len: usize,
        frame: impl Fn(usize) -> usize,
    ) {
        let mut at = 0;
        while at < self.costs.len() {
            let fixed = self.costs[at..].iter().position(|&cost| cost == Cost::Fixed);
            let end = fixed.map_or(self.costs.len(), |behind| at + behind);
            let stretch = if end - at < len { at..at } else { at..end };
            for place in stretch {
                if self.costs[place] == Cost::Open {
                    self.costs[place] = self.cost(core, (oldest, tenant), frame(place));
                }
            }
            at = end + 1;
        }
    }

    fn cost(&mut self, core: &Core, (oldest, tenant): (Ticket, Tenant), frame: usize) -> Cost {
        self.open -= 1;
        let id = core.space.table.block_at(FrameId(frame as u32));
        let word = core.word(id);
        let is_evictable = word.frame().index() == frame && word.evict().is_some();
        if !is_evictable {
            return Cost::Fixed;
        }
        let of = core.tenant_of(id);
        if core.is_protected(of, tenant) {
            self.protected.add(of.index());
            self.kept += 1;
            return Cost::Fixed;
        }
        if core.is_unseen(id, word, oldest) {
            self.unseen += 1;
            return Cost::Evict(of);
        }
        self.kept += usize::from(core.is_seen_for_certain(id, word, oldest));
        Cost::Fixed
    }

    /// Returns the place of the cheapest window, in which no tenant has more blocks than others may
    /// evict: some of them would be evicted in vain.
    fn cheapest(&mut self, core: &Core, by: Tenant, len: usize) -> Option<usize> {
        let costs = &self.costs;
        let Some(tenants) = core.tenants() else {
            return cheapest_window(costs.len(), len, |at| costs[at].evictions(), |_| 0).map(|(at, _)| at);
        };
        let mut rooms = [isize::MAX; TENANTS_MAX + 1];
        tenants.all().for_each(|of| rooms[of.index()] = tenants.room(of, by) as isize & isize::MAX);
        // Blocks that the last frames have too many.
        let (mut left, mut excess, mut evictions, mut clear) = (rooms, 0, 0, 0);
        let mut best: Option<(u32, usize)> = None;
        for (last, cost) in costs.iter().enumerate() {
            let Some(one) = cost.evictions() else {
                (left, excess, evictions, clear) = (rooms, 0, 0, 0);
                continue;
            };
            if clear == len {
                let first = last - len;
                if costs[first] != Cost::Free {
                    let left = &mut left[costs[first].of()];
                    excess -= usize::from(*left < 0);
                    *left += 1;
                    evictions -= 1;
                }
            } else {
                clear += 1;
            }
            if one > 0 {
                let left = &mut left[cost.of()];
                *left -= 1;
                excess += usize::from(*left < 0);
                evictions += 1;
            }
            if clear == len && excess == 0 && best.is_none_or(|(least, _)| evictions < least) {
                best = Some((evictions, last + 1 - len));
            }
            self.has_others |= clear == len && excess > 0;
        }
        best.map(|(_, at)| at)
    }
}

impl Core {
    #[cold]
    pub(in crate::block) fn evict_run(&self, len: usize, tenant: Tenant, _: &WakeGuard<'_>) -> Option<Run> {
        let region = REGION.max(WINDOWS_IN_REGION * len).next_multiple_of(FAN);
        let mut walk = Walk::default();
        for _ in 0..WINDOWS {
            if self.evictable() == 0 || self.knows_no_eviction(tenant) || self.knows_no_window(len, tenant) {
                return None;
            }
            let (state, before) = (self.evictions(), self.space.frames.snapshot());
            let total = self.total_frames();
            let regions = total.div_ceil(region);
            walk = Walk { costs: walk.costs, head: walk.head, ..Walk::default() };
            walk.costs.clear();
            // Relaxed: a hint.
            let first = self.windows.fetch_add(1, Relaxed) % regions;
            let cheapest = (0..regions).find_map(|at| {
                let region_at = (first + at) % regions;
                let kept = if region_at == 0 { 0 } else { len - 1 };
                let (start, end) = (region_at * region, ((region_at + 1) * region).min(total));
                let start = walk.read(self, kept, start, end);
                walk.look_up(self, (state.oldest, tenant), len, |at| start + at);
                if at == 0 {
                    walk.head.clear();
                    walk.head.extend(walk.costs.iter().take(len - 1));
                }
                walk.cheapest(self, tenant, len).map(|at| (start, at))
            });
            // Windows that begin before the first region of the walk and end in it.
            let cheapest = cheapest.or_else(|| {
                if first == 0 {
                    return None;
                }
                let kept = walk.costs.len().min(len - 1);
                walk.costs.drain(..walk.costs.len() - kept);
                walk.costs.append(&mut walk.head);
                let start = first * region - kept;
                walk.look_up(self, (state.oldest, tenant), len, |at| start + at);
                walk.cheapest(self, tenant, len).map(|at| (start, at))
            });
            let Some((start, at)) = cheapest else {
                if walk.open + walk.unseen == 0 {
                    self.remember_no_eviction(state, walk.kept, walk.protected);
                }
                if walk.open + walk.unseen + walk.kept == state.evictable
                    && let Some(before) = before
                    && walk.free == before.free()
                    && self.evictions() == state
                    && self.space.frames.snapshot() == Some(before)
                    && !walk.has_others
                {
                    self.refused.remember_no_window(((state, walk.protected), before, len));
                }
                return None;
            };
            for at in (at..at + len).filter(|&at| matches!(walk.costs[at], Cost::Evict(_))) {
                let frame = FrameId((start + at) as u32);
                // Not through the reserve, which would take a frame out of the window.
                let run = Run { start: frame, len: 1 };
                if self.evict_in(frame, state.oldest, tenant) && self.space.wipe(run) {
                    self.space.frames.free_run(run);
                }
            }
            if let Some(run) = self.space.frames.allocate_run(len as u32, FrameId((start + at) as u32)) {
                return Some(run);
            }
        }
        None
    }
}
