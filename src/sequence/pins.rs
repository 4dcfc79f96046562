//! The blocks that hints have pinned, each counted once, within a budget. With a budget for each
//! tenant, retained blocks count too.
//!
//! A block counts from its grant to the end of its time, or until another hint about it, whatever
//! becomes of its contents. When a budget is short, those that have lost their place stop counting:
//! they were evicted, or hit and released. A tenant's blocks are looked through for them only if
//! these are few, or more than a [`SHARE`] of them may have lost it since the last time, or the time
//! of one has ended.

use std::collections::HashMap;

use smallvec::SmallVec;

use crate::block::{TENANTS_MAX, Tenant};
use crate::hints::Limit;
use crate::ids::{BlockId, SessionId};
use crate::prefix::policy::Millis;

/// Of a tenant with more than `FEW` blocks, one in `SHARE` may count although it has lost its place.
const FEW: usize = 1 << 12;
const SHARE: usize = 32;

/// What changes before a block loses its place, apart from the time.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Moment {
    /// Number of releases of blocks, modulo 2^64; also counts others.
    pub releases: u64,
    pub evictable: usize,
    /// Of the cache's contents.
    pub era: u64,
}

impl Moment {
    /// Returns how many blocks may have lost their place since: each was released, or was evictable
    /// and no longer is.
    fn changes_since(self, before: Self) -> usize {
        if self.era != before.era {
            return usize::MAX;
        }
        let releases = usize::try_from(self.releases.wrapping_sub(before.releases)).unwrap_or(usize::MAX);
        releases.saturating_mul(2).saturating_add(before.evictable).saturating_sub(self.evictable)
    }
}

/// The counted blocks of a tenant.
#[derive(Default)]
struct Kept {
    ids: Vec<BlockId>,
    /// When they were last looked through.
    looked: Option<Moment>,
    /// No later than the time of one of them ends.
    earliest: Option<Millis>,
}

/// For whom a block is retained or pinned, and until when.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pin {
    pub session: Option<SessionId>,
    pub until: Millis,
    pub is_pinned: bool,
    /// To which it belongs.
    pub tenant: Tenant,
}

pub(super) struct Pins {
    blocks_max: usize,
    /// Of each tenant.
    tenant_max: Option<usize>,
    by_block: Vec<Option<Pin>>,
    /// Where each of them is among those of its tenant.
    places: Vec<u32>,
    /// Number of pinned blocks.
    len: usize,
    by_tenant: Box<[Kept]>,
}

impl Pins {
    pub(super) fn new(blocks_max: usize, tenant_max: Option<usize>) -> Self {
        let by_tenant = (0..=TENANTS_MAX).map(|_| Kept::default()).collect();
        Self { blocks_max, tenant_max, by_block: Vec::new(), places: Vec::new(), len: 0, by_tenant }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Returns the number of counted blocks of a tenant.
    pub(super) fn of_tenant(&self, tenant: Tenant) -> usize {
        self.by_tenant[tenant.index()].ids.len()
    }

    /// Returns whether a block counts for this tenant.
    pub(super) fn counts(&self, id: BlockId, tenant: Tenant) -> bool {
        self.by_block.get(id.index()).copied().flatten().is_some_and(|pin| pin.tenant == tenant)
    }

    /// Returns the number of counted blocks of each tenant.
    pub(super) fn of_tenants(&self) -> impl Iterator<Item = usize> {
        self.by_tenant.iter().map(|kept| kept.ids.len())
    }

    /// Returns how many more blocks may be pinned, with `reserved` ones in the budget.
    pub(super) fn left(&self, reserved: usize) -> usize {
        self.blocks_max.saturating_sub(self.len + reserved)
    }

    /// Returns how many more blocks of a tenant may be retained or pinned.
    pub(super) fn left_of(&self, tenant: Tenant) -> usize {
        let most = self.tenant_max.filter(|_| tenant != Tenant::NONE);
        most.map_or(usize::MAX, |most| most.saturating_sub(self.of_tenant(tenant)))
    }

    /// Returns whether there is a budget for each tenant.
    pub(super) fn has_tenants(&self) -> bool {
        self.tenant_max.is_some()
    }

    /// Changes whose pin it is, and its end. Returns false if the block does not count alike.
    #[inline]
    pub(super) fn renew(&mut self, id: BlockId, pin: Pin) -> bool {
        let before = self.by_block.get_mut(id.index()).and_then(Option::as_mut);
        let alike = |before: &&mut Pin| (before.tenant, before.is_pinned) == (pin.tenant, pin.is_pinned);
        let is_alike = before.filter(alike).map(|before| *before = pin).is_some();
        if is_alike {
            self.by_tenant[pin.tenant.index()].note_end(pin.until);
        }
        is_alike
    }

    /// Counts a block as the pin says. `left`: how many more may be pinned. Returns whether it is
    /// another pinned one; the error is the budget that is used up.
    pub(super) fn set(&mut self, id: BlockId, pin: Pin, left: usize) -> Result<bool, Limit> {
        let before = self.by_block.get(id.index()).copied().flatten();
        let is_more = pin.is_pinned && before.is_none_or(|before| !before.is_pinned);
        if before.is_none_or(|before| before.tenant != pin.tenant) && self.left_of(pin.tenant) == 0 {
            return Err(Limit::TenantBytes);
        }
        if is_more && left == 0 {
            return Err(Limit::PinnedBytes);
        }
        self.remove(id);
        if self.by_block.len() <= id.index() {
            self.by_block.resize(id.index() + 1, None);
            self.places.resize(id.index() + 1, 0);
        }
        self.by_block[id.index()] = Some(pin);
        self.len += usize::from(pin.is_pinned);
        let kept = &mut self.by_tenant[pin.tenant.index()];
        self.places[id.index()] = kept.ids.len() as u32;
        kept.ids.push(id);
        kept.note_end(pin.until);
        Ok(is_more)
    }

    pub(super) fn remove(&mut self, id: BlockId) {
        if let Some(pin) = self.by_block.get_mut(id.index()).and_then(Option::take) {
            self.len -= usize::from(pin.is_pinned);
            let (ids, place) = (&mut self.by_tenant[pin.tenant.index()].ids, self.places[id.index()]);
            ids.swap_remove(place as usize);
            if let Some(&moved) = ids.get(place as usize) {
                self.places[moved.index()] = place;
            }
        }
    }

    /// Drops pins of a tenant, or of all, that no longer `count`: few of them are left. `at`: read
    /// before.
    #[cold]
    pub(super) fn drop_gone(
        &mut self,
        tenant: Option<Tenant>,
        (at, now): (Moment, Millis),
        counts: impl Fn(BlockId, Pin) -> bool,
    ) {
        let all = tenant.map_or(0..self.by_tenant.len(), |of| of.index()..of.index() + 1);
        for of in all {
            let kept = &self.by_tenant[of];
            if !kept.has_changed(at, now) {
                continue;
            }
            let mut earliest: Option<Millis> = None;
            // From the last: a removed one is replaced by one that was looked at.
            for place in (0..kept.ids.len()).rev() {
                let id = self.by_tenant[of].ids[place];
                match self.by_block[id.index()] {
                    Some(pin) if counts(id, pin) => earliest = earliest.into_iter().chain([pin.until]).min(),
                    _ => self.remove(id),
                }
            }
            let kept = &mut self.by_tenant[of];
            (kept.looked, kept.earliest) = (Some(at), earliest);
        }
    }

    /// Returns the number of blocks that are pinned for each session.
    pub(super) fn by_session(&self, now: Millis) -> HashMap<SessionId, usize> {
        let mut all = HashMap::new();
        let pins = self.by_block.iter().flatten().filter(|pin| pin.is_pinned && pin.until > now);
        pins.filter_map(|pin| pin.session).for_each(|session| *all.entry(session).or_default() += 1);
        all
    }
}

impl Kept {
    fn note_end(&mut self, until: Millis) {
        self.earliest = self.earliest.into_iter().chain([until]).min();
    }

    /// Returns whether more than a share of them may have lost their place, or the time of one has
    /// ended.
    fn has_changed(&self, at: Moment, now: Millis) -> bool {
        let is_more = |before| at.changes_since(before) > self.ids.len() / SHARE;
        self.ids.len() <= FEW
            || self.looked.is_none_or(is_more)
            || self.earliest.is_some_and(|earliest| earliest <= now)
    }
}

/// Divides `most` among lists of these numbers of blocks: each gets what it has, or an equal part of
/// what is left.
pub(super) fn shares(counts: &[usize], mut most: usize) -> SmallVec<[usize; 2]> {
    let share = |(at, &blocks): (usize, &usize)| {
        let left = most.saturating_sub(sum(&counts[at + 1..])).max(most / (counts.len() - at));
        let share = blocks.min(left);
        most -= share;
        share
    };
    counts.iter().enumerate().map(share).collect()
}

pub(super) fn sum(counts: &[usize]) -> usize {
    counts.iter().copied().fold(0, usize::saturating_add)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn blocks_are_looked_through_once_until_some_may_have_lost_their_place() {
        let mut pins = Pins::new(1 << 20, Some(1 << 20));
        let pin = |until| Pin { session: None, until: Millis(until), is_pinned: false, tenant: Tenant::NONE };
        (0..6_400).for_each(|id| assert!(pins.set(BlockId(id), pin(1_000), 0).is_ok()));
        let looks = Cell::new(0);
        let look = |pins: &mut Pins, releases, evictable, now, gone: u32| {
            looks.set(0);
            let at = Moment { releases, evictable, era: 0 };
            pins.drop_gone(Some(Tenant::NONE), (at, Millis(now)), |id, pin| {
                looks.set(looks.get() + 1);
                pin.until > Millis(now) && id.0 >= gone
            });
            (looks.get(), pins.of_tenant(Tenant::NONE))
        };
        assert_eq!(look(&mut pins, 0, 9_000, 1, 0), (6_400, 6_400));
        assert_eq!(look(&mut pins, 0, 9_000, 1, 0), (0, 6_400), "nothing has changed");
        assert_eq!(look(&mut pins, 0, 8_800, 1, 0), (0, 6_400), "a 32nd");
        assert_eq!(look(&mut pins, 0, 8_799, 1, 201), (6_400, 6_199), "evictions");
        assert_eq!(look(&mut pins, 150, 8_949, 1, 201), (0, 6_199), "releases of owned ones");
        assert_eq!(look(&mut pins, 150, 8_799, 1, 301), (6_199, 6_099), "and hits");
        pins.set(BlockId(0), pin(50), 0).unwrap();
        assert_eq!(look(&mut pins, 150, 8_799, 49, 0), (0, 6_100));
        assert_eq!(look(&mut pins, 150, 8_799, 50, 0), (6_100, 6_099), "the time of one has ended");
        assert!(pins.renew(BlockId(400), pin(60)));
        assert_eq!(look(&mut pins, 150, 8_799, 60, 0), (6_099, 6_098));
        assert_eq!(look(&mut pins, 150, 8_799, 999, 0), (0, 6_098));
        assert_eq!(look(&mut pins, 150, 8_799, 1_000, 0), (6_098, 0));
    }
}
