//! The blocks that hints have pinned, each counted once, within a budget. With a budget for each
//! tenant, retained blocks count too.
//!
//! A block counts from its grant to the end of its time, or until another hint about it, whatever
//! becomes of its contents. When a budget is short, those that have lost their place stop counting:
//! they were evicted, or hit and released.

use std::collections::HashMap;

use crate::block::{TENANTS_MAX, Tenant};
use crate::hints::Limit;
use crate::ids::{BlockId, SessionId};
use crate::prefix::policy::Millis;

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
    /// Number of pinned blocks.
    len: usize,
    /// Number of blocks of each tenant.
    by_tenant: [usize; TENANTS_MAX + 1],
}

impl Pins {
    pub(super) fn new(blocks_max: usize, tenant_max: Option<usize>) -> Self {
        Self { blocks_max, tenant_max, by_block: Vec::new(), len: 0, by_tenant: [0; TENANTS_MAX + 1] }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Returns the number of counted blocks of a tenant.
    pub(super) fn of_tenant(&self, tenant: Tenant) -> usize {
        self.by_tenant[tenant.index()]
    }

    /// Returns whether a block counts for this tenant.
    pub(super) fn counts(&self, id: BlockId, tenant: Tenant) -> bool {
        self.by_block.get(id.index()).copied().flatten().is_some_and(|pin| pin.tenant == tenant)
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
        before.filter(alike).map(|before| *before = pin).is_some()
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
        }
        self.by_block[id.index()] = Some(pin);
        self.count(pin, 1);
        Ok(is_more)
    }

    pub(super) fn remove(&mut self, id: BlockId) {
        if let Some(pin) = self.by_block.get_mut(id.index()).and_then(Option::take) {
            self.count(pin, -1);
        }
    }

    fn count(&mut self, pin: Pin, blocks: isize) {
        let of_tenant = &mut self.by_tenant[pin.tenant.index()];
        *of_tenant = of_tenant.wrapping_add_signed(blocks);
        if pin.is_pinned {
            self.len = self.len.wrapping_add_signed(blocks);
        }
    }

    /// Drops pins that no longer `count`.
    #[cold]
    pub(super) fn drop_gone(&mut self, counts: impl Fn(BlockId, Pin) -> bool) {
        for at in 0..self.by_block.len() {
            let id = BlockId(at as u32);
            if self.by_block[at].is_some_and(|pin| !counts(id, pin)) {
                self.remove(id);
            }
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
