//! How hints are carried out.
//!
//! ```text
//! close   release the blocks;  session: its hashes, one request more (lock);  what it was granted: carry it out
//! hint    session: what it is granted, read its hashes (lock);  carry it out
//! ```
//!
//! To carry out a hint is to give evictable blocks other places in the eviction order, found by
//! their hashes. If a close and a hint meet, the later one in the order of the lock sees what the
//! earlier one wrote, so a hint that lasts reaches the blocks: the close's if the hint came first,
//! else the hint's. Blocks that an owner still has are not placed: the close of a request of the
//! session does it.
//!
//! Hints on tokens of an open sequence go with the sequence when it is closed, since its id may be
//! in use again before a batch that writes to it has ended.

use std::ops::Range;

use smallvec::SmallVec;

use crate::block::{Evictor, TENANTS_MAX, Tenant};
use crate::hints::{Action, Hint, Limit, Outcome, Rejection, Target};
use crate::ids::{BlockId, SequenceId, SessionId};
use crate::prefix::policy::{CachePriority, Millis};
use crate::prefix::{BlockHash, PrefixCache, Retention, Users};
use crate::sync::{AtomicU32, Ordering::Acquire};

use super::grouped::GroupedSequence;
use super::hinted::{Hashes, Hinted, Lasting, STANDING_MAX, Standing};
use super::pins::{Moment, Pin, Pins, shares, sum};
use super::registry::{SequenceView, Sequences};
use super::sequence::Sequence;
use super::window::ListKind;

// As the text of the rejection says.
const _: () = assert!(STANDING_MAX == 16);

/// Blocks found for a hint.
#[derive(Clone, Copy, Default)]
struct Found {
    placed: usize,
    owned: usize,
    /// A tenant whose budget some exceeded.
    full: Tenant,
}

/// Whose blocks a hint is about.
#[derive(Clone, Copy)]
enum Of<'a> {
    Session(SessionId),
    Hashes,
    /// Of a sequence; or of an open one, for which this range replaces earlier hints.
    Tokens {
        id: SequenceId,
        session: Option<SessionId>,
        within: Option<&'a Range<usize>>,
    },
}

impl Of<'_> {
    fn session(self) -> Option<SessionId> {
        match self {
            Self::Session(session) => Some(session),
            Self::Hashes => None,
            Self::Tokens { session, .. } => session,
        }
    }

    /// Returns the user of the blocks, if it is known.
    fn user(self) -> Option<Users> {
        (!matches!(self, Self::Hashes)).then(|| Users::of(self.session()))
    }

    /// Returns whether a close carries the hint out for blocks that have owners.
    fn waits(self) -> bool {
        matches!(self, Self::Session(_))
    }

    /// Returns whether it takes the place of this hint on tokens of an open sequence.
    fn replaces(self, standing_id: SequenceId, standing: &Standing) -> bool {
        match self {
            Self::Tokens { id, within, .. } => {
                id == standing_id && within.is_none_or(|within| standing.is_within(within))
            }
            Self::Session(_) | Self::Hashes => false,
        }
    }
}

/// What is known of a sequence whose blocks are being released.
struct Closing {
    session: Option<SessionId>,
    returns_at: Option<Millis>,
    standing: Vec<Standing>,
    list: Hashes,
}

impl Sequence {
    /// Sets when its session is expected to send the next request, on the
    /// [cache's clock](crate::prefix::PrefixCache::now): when a tool that it calls returns, for
    /// example. For policies that use it, which learn it when the sequence is closed.
    pub fn expect_return(&mut self, at: Millis) {
        self.known.iter_mut().for_each(|known| known.policy_info.returns_at = Some(at));
    }

    /// Takes the hints on its tokens along, when it is closed.
    pub(super) fn take_hints(&mut self) {
        let Some(hinted) = self.sequences.0.hinted.as_deref() else { return };
        // The first list of a sequence is closed last.
        let standing =
            if self.group == 0 { hinted.take_standing(self.id()) } else { hinted.standing(self.id()) };
        if let Some(known) = &mut self.known {
            known.standing = standing;
        }
    }

    /// Releases its blocks, which no batch writes, and carries out the hints about them.
    pub(super) fn close_now(&mut self) {
        let closing = self.closing();
        if let (Some(_), Some(known), Some(cache)) =
            (&self.sequences.0.hinted, &self.known, self.sequences.cache())
        {
            cache.add_user(self.held(), Users::of(known.policy_info.session));
        }
        self.cut(0);
        closing.into_iter().for_each(|closing| self.note_closed(closing));
    }

    /// Returns what is to be noted once the blocks are released; `None` for a sequence that no hint
    /// can be about.
    #[inline]
    fn closing(&mut self) -> Option<Closing> {
        self.sequences.0.hinted.as_deref()?;
        // A refused admission.
        if self.list.len() == 0 {
            return None;
        }
        let known = self.known.as_deref_mut()?;
        let session = known.policy_info.session;
        let standing = std::mem::take(&mut known.standing);
        if session.is_none() && standing.is_empty() {
            return None;
        }
        let hashes = if known.is_forgotten() { &[][..] } else { known.hashes() };
        let list = Hashes { hashes: hashes.into(), era: known.era() };
        Some(Closing { session, returns_at: known.policy_info.returns_at, standing, list })
    }

    #[cold]
    fn note_closed(&self, closing: Closing) {
        let (Some(hinted), Some(cache)) = (self.sequences.0.hinted.as_deref(), self.sequences.cache()) else {
            return;
        };
        let Closing { session, returns_at, standing, list } = closing;
        let (group, now) = (self.group as usize, cache.caught_now());
        let lasts = |what: Lasting| what.retention().is_none_or(|at| at.until > now);
        if group >= self.sequences.kinds().len() {
            // A checkpoint of a state. The lists of tokens are noted.
            let granted = session.zip(session.and_then(|session| hinted.session(session)?.granted));
            if let Some((session, (what, most))) = granted.filter(|&(_, (what, _))| lasts(what)) {
                let room = self.sequences.room_of_states(hinted, what, most);
                let (kept, left) = self.sequences.checkpoints_within(session, room);
                let (of, mut pins) = (Of::Session(session), hinted.pins());
                // Without hashes, its blocks were uncached.
                let own = list.hashes.first();
                let is_own =
                    |(hashes, _): &(Vec<BlockHash>, u64)| own.is_some_and(|own| hashes.contains(own));
                for (hashes, era) in &left {
                    self.sequences.leave(cache, &mut pins, hashes, *era);
                }
                if kept.iter().any(is_own) {
                    let with = (hinted, &**cache, &mut *pins);
                    self.sequences.carry_out(with, &[(&list.hashes, list.era)], what, of);
                }
            }
            return;
        }
        if let Some(session) = session {
            let (granted, before) = hinted.note(session, group, list.clone(), returns_at, now);
            let granted = granted.filter(|&(what, _)| lasts(what));
            if let Some((what, most)) = granted {
                let mut pins = hinted.pins();
                if what.is_pin() {
                    // It is for the blocks of one request.
                    let pairs = list.hashes.iter().zip(&*before.hashes);
                    let same = pairs.take_while(|(one, other)| one == other).count();
                    self.sequences.leave(cache, &mut pins, &before.hashes[same..], before.era);
                }
                let lists = [(&list.hashes[..list.hashes.len().min(most)], list.era)];
                self.sequences.carry_out((hinted, cache, &mut pins), &lists, what, Of::Session(session));
                if group == 0 && what == Lasting::Release {
                    hinted.forget(session);
                }
            }
        }
        for Standing { tokens, blocks_max, what } in standing {
            let places = full_blocks(&tokens, self.kind.block_tokens as usize);
            let hashes = list.hashes.get(places.start..).unwrap_or_default();
            let most = blocks_max.get(group).copied().unwrap_or(0);
            let lists = [(&hashes[..hashes.len().min(places.len()).min(most)], list.era)];
            let of = Of::Tokens { id: self.id(), session, within: None };
            self.sequences.carry_out((hinted, cache, &mut hinted.pins()), &lists, what, of);
        }
    }
}

impl GroupedSequence {
    /// As [`Sequence::expect_return`], in every group.
    pub fn expect_return(&mut self, at: Millis) {
        self.parts.iter_mut().for_each(|part| part.expect_return(at));
    }
}

/// Returns the places of the full blocks in a range of tokens.
fn full_blocks(tokens: &Range<usize>, block_tokens: usize) -> Range<usize> {
    let end = if tokens.end == usize::MAX { usize::MAX } else { tokens.end / block_tokens };
    tokens.start.div_ceil(block_tokens)..end
}

impl Sequences {
    /// Carries out a hint about lists of blocks, each in its era. Also returns the first place in a list
    /// that was not pinned for lack of room.
    fn carry_out(
        &self,
        (hinted, cache, pins): (&Hinted, &PrefixCache, &mut Pins),
        lists: &[(&[BlockHash], u64)],
        what: Lasting,
        of: Of,
    ) -> (Found, Option<usize>) {
        let blocks = &self.0.blocks;
        let (mut found, mut first_left) = (Found::default(), None);
        let add = |found: &mut Found, (placed, owned): (usize, usize)| {
            (found.placed, found.owned) = (found.placed + placed, found.owned + owned);
        };
        let has_budget = pins.has_tenants();
        let counted = what.retention().filter(|what| what.is_pinned || has_budget);
        let Some(retention @ Retention { until, is_pinned, .. }) = counted else {
            for &(hashes, era) in lists {
                let placed = match what {
                    Lasting::Retain(retention) => cache.retain(blocks, hashes, era, retention, |_, id, _| {
                        pins.remove(id);
                        true
                    }),
                    what => cache.demote(blocks, hashes, era, |id, users| {
                        pins.remove(id);
                        what == Lasting::Release && users.has_others(of.user())
                    }),
                };
                add(&mut found, placed);
            }
            return (found, None);
        };
        let session = of.session();
        let reserved = if is_pinned { self.reserved(hinted, of) } else { 0 };
        let (mut has_looked, mut rest) = ([false; TENANTS_MAX + 1], 0);
        lists.iter().for_each(|(hashes, _)| rest += hashes.len());
        for (at, &(hashes, era)) in lists.iter().enumerate() {
            rest -= hashes.len();
            // Every group of layers gets its share, or what the others do not need.
            let share = |pins: &Pins, added| {
                let left: usize = pins.left(reserved) + added;
                left.saturating_sub(rest).max(left / (lists.len() - at))
            };
            let (mut added, mut most, mut is_left) = (0, share(pins, 0), None);
            let retained = cache.retain(blocks, hashes, era, retention, |place, id, is_evictable| {
                if is_left.is_some() {
                    return false;
                }
                // Owned blocks of a session wait for its close.
                if !is_evictable && !of.waits() {
                    if !is_pinned {
                        pins.remove(id);
                    }
                    return true;
                }
                let tenant = if has_budget { self.tenant_of(id) } else { Tenant::NONE };
                let pin = Pin { session, until, is_pinned, tenant };
                if pins.renew(id, pin) {
                    return true;
                }
                let mut set = pins.set(id, pin, most.saturating_sub(added));
                let full = set.err().map(|limit| (limit == Limit::TenantBytes).then_some(tenant));
                if let Some(full) = full
                    && !std::mem::replace(&mut has_looked[full.map_or(0, Tenant::index)], true)
                {
                    self.drop_gone(cache, pins, full);
                    most = share(pins, added);
                    set = pins.set(id, pin, most.saturating_sub(added));
                }
                match set {
                    Ok(is_more) => added += usize::from(is_more),
                    // Those of other tenants behind it may be kept.
                    Err(Limit::TenantBytes) => found.full = pin.tenant,
                    Err(_) => is_left = Some(place),
                }
                set.is_ok()
            });
            add(&mut found, retained);
            first_left = first_left.into_iter().chain(is_left).min();
        }
        (found, first_left)
    }

    /// Returns how many blocks of states a session may retain beside `most` in each list.
    fn room_of_states(&self, hinted: &Hinted, what: Lasting, most: usize) -> usize {
        match what.retention().map(|_| hinted.session_blocks()) {
            None | Some(usize::MAX) => usize::MAX,
            Some(in_session) => in_session.saturating_sub(most.saturating_mul(self.kinds().len())),
        }
    }

    /// Returns the number of blocks to be pinned when open sequences are closed, without those of an
    /// earlier hint about the same.
    fn reserved(&self, hinted: &Hinted, of: Of) -> usize {
        hinted.reserved(|id, standing| of.replaces(id, standing))
    }

    /// Has blocks of a tenant, or of all, no longer count that have lost their place.
    fn drop_gone(&self, cache: &PrefixCache, pins: &mut Pins, tenant: Option<Tenant>) {
        let (now, blocks) = (cache.caught_now(), &self.0.blocks);
        let at = Moment { releases: cache.releases(), evictable: blocks.evictable(), era: cache.era() };
        pins.drop_gone(tenant, (at, now), |id, Pin { until, is_pinned, tenant, .. }| {
            until > now
                && (tenant == Tenant::NONE || self.tenant_of(id) == tenant)
                && cache.may_be_kept(&self.0.blocks, id, is_pinned)
        });
    }

    fn tenant_of(&self, id: BlockId) -> Tenant {
        self.0.blocks.tenants().map_or(Tenant::NONE, |tenants| tenants.of(id))
    }

    /// Returns the error of a hint about blocks of a tenant at its budget.
    fn full_of(&self, hinted: &Hinted, pins: &Pins, tenant: Tenant) -> Rejection {
        let id = self.0.blocks.tenants().map(|tenants| tenants.id(tenant));
        hinted.full_of(id.unwrap_or_default(), pins.of_tenant(tenant))
    }

    /// Ends the retention and pins of blocks that their session has left.
    pub(super) fn leave(&self, cache: &PrefixCache, pins: &mut Pins, hashes: &[BlockHash], era: u64) {
        let left = cache.end_retention_by(&self.0.blocks, hashes, era);
        left.into_iter().for_each(|id| pins.remove(id));
    }

    /// Carries out a hint.
    pub(crate) fn hint(&self, hint: &Hint) -> Outcome {
        let (Some(hinted), Some(cache)) = (self.0.hinted.as_deref(), self.cache()) else {
            return Outcome::Rejected { reason: Rejection::Disabled };
        };
        let now = cache.caught_now();
        let outcome = self.try_hint(hinted, cache, hint, now);
        outcome.unwrap_or_else(|reason| Outcome::Rejected { reason })
    }

    fn try_hint(
        &self,
        hinted: &Hinted,
        cache: &PrefixCache,
        hint: &Hint,
        now: Millis,
    ) -> Result<Outcome, Rejection> {
        let (until, what) = match hint.action {
            Action::Retain { priority, until } => (Some(until), retained(priority, until, false)),
            Action::Pin { until } => (Some(until), retained(CachePriority::Normal, until, true)),
            Action::Demote => (None, Lasting::Demote),
            Action::Release => (None, Lasting::Release),
            Action::Prefetch { .. } => return Err(Rejection::NoTier),
        };
        if let Some(until) = until.filter(|&until| until <= now) {
            return Err(Rejection::Ended { until, now });
        }
        let longest = hinted.longest(now);
        let what = match what {
            Lasting::Retain(at) => Lasting::Retain(Retention { until: at.until.min(longest), ..at }),
            what => what,
        };
        let with = (hinted, cache, &mut *hinted.pins());
        let outcome = match &hint.target {
            Target::Session(session) => self.hint_session(with, *session, what)?,
            Target::Hashes(hashes) => self.hint_hashes(with, hashes, what)?,
            Target::Tokens(id, tokens) => self.hint_tokens(with, *id, tokens, what)?,
        };
        Ok(match outcome {
            Outcome::Accepted { blocks } | Outcome::Deferred { blocks } if until > Some(longest) => {
                Outcome::Clipped { blocks, until: longest, limit: Limit::Longest }
            }
            outcome => outcome,
        })
    }

    fn hint_hashes(
        &self,
        (hinted, cache, pins): (&Hinted, &PrefixCache, &mut Pins),
        hashes: &[BlockHash],
        what: Lasting,
    ) -> Result<Outcome, Rejection> {
        let era = cache.era();
        if cache.count_cached(&self.0.blocks, hashes, era) == 0 {
            return Ok(Outcome::Missing);
        }
        let most = what.retention().map_or(usize::MAX, |_| hinted.session_blocks()).min(hashes.len());
        let list = [(&hashes[..most], era)];
        let (found, left) = self.carry_out((hinted, cache, pins), &list, what, Of::Hashes);
        match (found, left) {
            (Found { placed: 0, owned: 0, .. }, Some(_)) => {
                Err(hinted.full(pins.len() + self.reserved(hinted, Of::Hashes)))
            }
            (Found { placed: 0, owned: 0, full }, None) if full != Tenant::NONE => {
                Err(self.full_of(hinted, pins, full))
            }
            (Found { placed: 0, owned: 1.., .. }, _) => {
                let why = "the blocks have owners: name their session, or tokens of the sequence";
                Err(Rejection::Unsupported { why })
            }
            _ => Ok(outcome_of(found.placed, what, clipped_by(left, found.full, most < hashes.len()))),
        }
    }

    fn hint_session(
        &self,
        (hinted, cache, pins): (&Hinted, &PrefixCache, &mut Pins),
        id: SessionId,
        what: Lasting,
    ) -> Result<Outcome, Rejection> {
        let Some(known) = hinted.session(id) else { return Ok(Outcome::Missing) };
        let longest = known.lists.iter().map(|list| list.hashes.len()).max().unwrap_or(0);
        // What the next request continues behind: without it, the blocks of tokens are no hit.
        let in_session = what.retention().map_or(usize::MAX, |_| hinted.session_blocks());
        let (checkpoints, left_out) = self.checkpoints_within(id, in_session);
        let of_states: usize = checkpoints.iter().map(|(hashes, _)| hashes.len()).sum();
        let most = (in_session - of_states) / self.kinds().len();
        let is_clipped = most < longest || !left_out.is_empty();
        // A pin is for as many blocks as it has, and retention for later requests too.
        let most = if what.is_pin() { most.min(longest) } else { most };
        let grant = |most| hinted.set_granted(id, what.retention().map(|_| (what, most)));
        let Some(session) = grant(most) else { return Ok(Outcome::Missing) };
        let part = |list: &Hashes| list.hashes.len().min(most);
        if what.is_pin() {
            let all = session.lists.iter();
            all.for_each(|list| self.leave(cache, pins, &list.hashes[part(list)..], list.era));
        }
        let lists: SmallVec<[_; 1]> =
            session.lists.iter().map(|list| (&list.hashes[..part(list)], list.era)).collect();
        let (found, left) = self.carry_out((hinted, cache, &mut *pins), &lists, what, Of::Session(id));
        match (what, found, left) {
            (Lasting::Retain(_), Found { placed: 0, owned: 0, full }, left)
                if left.is_some() || full != Tenant::NONE =>
            {
                drop(hinted.set_granted(id, known.granted));
                return Err(match left {
                    Some(_) => hinted.full(pins.len() + self.reserved(hinted, Of::Session(id))),
                    None => self.full_of(hinted, pins, full),
                });
            }
            (Lasting::Retain(_), _, Some(left)) => drop(grant(left)),
            (Lasting::Retain(_), _, None) => {}
            // A request is open, whose close does it.
            (_, Found { placed: 0, owned: 1.., .. }, _) => {
                drop(hinted.set_granted(id, Some((what, usize::MAX))));
            }
            (Lasting::Release, ..) => hinted.forget(id),
            (Lasting::Demote, ..) => {}
        }
        // Again, behind what was granted: a close saw that, or its checkpoint is here.
        let (checkpoints, _) = self.checkpoints_within(id, in_session);
        let states: SmallVec<[_; 2]> = checkpoints.iter().map(|(hashes, era)| (&hashes[..], *era)).collect();
        let (of_states, left_of_states) =
            self.carry_out((hinted, cache, pins), &states, what, Of::Session(id));
        let is_deferred = found.placed == 0 && found.owned > 0;
        let found = Found {
            placed: if is_deferred { 0 } else { found.placed + of_states.placed },
            owned: found.owned + of_states.owned,
            full: if found.full == Tenant::NONE { of_states.full } else { found.full },
        };
        Ok(match (found, clipped_by(left.or(left_of_states), found.full, is_clipped)) {
            (Found { placed: 0, owned, .. }, None) if owned > 0 || what.retention().is_some() => {
                Outcome::Deferred { blocks: owned }
            }
            (Found { placed: 0, owned, .. }, clipped @ Some(_)) => outcome_of(owned, what, clipped),
            (Found { placed, .. }, clipped) => outcome_of(placed, what, clipped),
        })
    }

    fn hint_tokens(
        &self,
        (hinted, cache, pins): (&Hinted, &PrefixCache, &mut Pins),
        id: SequenceId,
        tokens: &Range<usize>,
        what: Lasting,
    ) -> Result<Outcome, Rejection> {
        let Some(view) = self.view(id) else { return Ok(Outcome::Missing) };
        let in_groups = |length: usize| -> SmallVec<[usize; 2]> {
            let within = tokens.start.min(length)..tokens.end.min(length);
            let blocks = |kind: &ListKind| full_blocks(&within, kind.block_tokens as usize).len();
            self.kinds().iter().map(blocks).collect()
        };
        let (now, later) = (in_groups(view.len()), in_groups(usize::MAX));
        if sum(&later) == 0 {
            return Err(Rejection::NoBlock { tokens: tokens.clone() });
        }
        let asked = sum(&now);
        // A pin is for the blocks that are full now, and retention for the answer's too.
        let counts = if what.is_pin() { now } else { later };
        let most = sum(&counts).min(what.retention().map_or(usize::MAX, |_| hinted.session_blocks()));
        let of = Of::Tokens { id, session: None, within: Some(tokens) };
        let reserved = self.reserved(hinted, of);
        if what.is_pin() && pins.left(reserved) < most {
            self.drop_gone(cache, pins, None);
        }
        let room = if what.is_pin() { pins.left(reserved) } else { usize::MAX };
        if room == 0 && most > 0 {
            return Err(hinted.full(pins.len() + reserved));
        }
        // Not set aside for its close, which gets what is left then.
        let (mut of_tenants, mut full) = (usize::MAX, Tenant::NONE);
        if what.retention().is_some() && pins.has_tenants() {
            for (of, blocks) in self.by_tenant(pins, &view, tokens).1 {
                if blocks > pins.left_of(of) {
                    self.drop_gone(cache, pins, Some(of));
                }
            }
            let (kept, more) = self.by_tenant(pins, &view, tokens);
            of_tenants = kept + more.iter().map(|&(of, blocks)| blocks.min(pins.left_of(of))).sum::<usize>();
            let short = more.iter().find(|&&(of, blocks)| blocks > pins.left_of(of));
            full = short.map_or(Tenant::NONE, |&(of, _)| of);
        }
        if of_tenants == 0 && full != Tenant::NONE {
            return Err(self.full_of(hinted, pins, full));
        }
        let (left, is_clipped) = ((room < most).then_some(room), most < asked);
        let blocks_max = shares(&counts, most.min(room));
        let granted = sum(&blocks_max);
        if !hinted.stand(id, Standing { tokens: tokens.clone(), blocks_max, what }) {
            return Err(Rejection::Unsupported { why: "an open sequence takes 16 hints on its tokens" });
        }
        if self.view(id).is_none() {
            // It was closed meanwhile, and took the hint along, or did not.
            hinted.take_standing(id);
            return Ok(Outcome::Missing);
        }
        Ok(match clipped_by(left, full, is_clipped) {
            clipped @ Some(_) => outcome_of(granted.min(of_tenants), what, clipped),
            None => Outcome::Deferred { blocks: asked },
        })
    }

    /// Returns how many of the full blocks in a range of tokens count already, and how many others
    /// belong to each tenant.
    fn by_tenant(
        &self,
        pins: &Pins,
        view: &SequenceView,
        tokens: &Range<usize>,
    ) -> (usize, SmallVec<[(Tenant, usize); 4]>) {
        let (mut kept, mut more) = (0, SmallVec::<[(Tenant, usize); 4]>::new());
        for (list, kind) in view.lists().zip(self.kinds()) {
            let block_tokens = kind.block_tokens as usize;
            let ids = list.read(|ids, len| -> Vec<BlockId> {
                let within = tokens.start.min(len as usize)..tokens.end.min(len as usize);
                // Acquire: see `BlockList::read`.
                let of = |id: &AtomicU32| BlockId(id.load(Acquire));
                ids.get(full_blocks(&within, block_tokens)).unwrap_or_default().iter().map(of).collect()
            });
            for id in ids.into_iter().filter(|&id| !self.is_null(id)) {
                let tenant = self.tenant_of(id);
                if pins.counts(id, tenant) {
                    kept += 1;
                } else if let Some((_, blocks)) = more.iter_mut().find(|(of, _)| *of == tenant) {
                    *blocks += 1;
                } else {
                    more.push((tenant, 1));
                }
            }
        }
        (kept, more)
    }
}

fn retained(priority: CachePriority, until: Millis, is_pinned: bool) -> Lasting {
    Lasting::Retain(Retention { until, priority, is_pinned })
}

fn clipped_by(left: Option<usize>, full: Tenant, is_clipped: bool) -> Option<Limit> {
    let of_tenant = (full != Tenant::NONE).then_some(Limit::TenantBytes);
    left.map(|_| Limit::PinnedBytes).or(of_tenant).or(is_clipped.then_some(Limit::SessionBytes))
}

fn outcome_of(blocks: usize, what: Lasting, clipped: Option<Limit>) -> Outcome {
    match (what, clipped) {
        (Lasting::Retain(retention), Some(limit)) => {
            Outcome::Clipped { blocks, until: retention.until, limit }
        }
        _ => Outcome::Accepted { blocks },
    }
}
