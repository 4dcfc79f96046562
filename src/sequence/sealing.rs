//! How a sequence seals and registers its blocks.

use std::ops::Range;

use crate::ids::Ticket;
use crate::prefix::{PrefixCache, Since};

use super::sequence::Sequence;
use super::token_hashes::TokenHashes;

/// Distance, in blocks, at which a registration prefetches what it writes.
const REGISTERED_AHEAD: u32 = 12;

impl Sequence {
    /// Makes the open ones of the first `full` blocks, all final, due after current writers.
    pub(super) fn complete(&mut self, full: u32) {
        self.seals.complete(full, self.writers.newest());
    }

    /// Seals the due full blocks of final tokens whose writers have all ended.
    #[inline]
    pub(super) fn settle(&mut self) {
        while let Some((full, writer)) = self.seals.due() {
            if !self.seal_due(full, writer) {
                return;
            }
        }
    }

    #[cold]
    fn seal_due(&mut self, full: u32, writer: Ticket) -> bool {
        // The first covers writers of other sequences, the second later batches of this one.
        let ended = self.pool_blocks().clock().ended(writer) || self.writing().is_none();
        // After `ended`: writers that were abandoned are in the log by then.
        let is_written = ended && !self.is_stale();
        if is_written {
            self.look_for_uncached(self.list.len());
            self.seal_blocks(self.seals.settled()..full);
            self.seals.sealed();
        }
        is_written
    }

    fn seal_blocks(&self, places: Range<u32>) {
        let pool = self.pool_blocks();
        let handle = |place: u32| pool.handle(self.list.id(place as usize));
        let end = places.end;
        // A sequence from another pool begins with blocks that were given up.
        let places = places.filter(|&place| !self.is_null(self.list.id(place as usize)));
        // What is not registered now will be when the sequence is closed.
        let Some((known, cache)) = self.token_hashes().filter(|(known, cache)| known.is_checked(cache))
        else {
            return places.for_each(|place| pool.seal(handle(place)));
        };
        let registered = places.filter_map(|place| {
            if place + REGISTERED_AHEAD < end {
                let next = self.list.id((place + REGISTERED_AHEAD) as usize);
                pool.prefetch_word(next);
                cache.prefetch(next);
            }
            let handle = handle(place);
            let Some(hash) = known.hash(place) else {
                pool.seal(handle);
                return None;
            };
            // A fork may have registered it first.
            if pool.word(handle.id).is_cached() {
                return None;
            }
            cache.note(handle.id, hash, known.era(), place, known.mark());
            Some((handle, known.stored(cache, handle.id, place)))
        });
        cache.register(pool, Since::Checked(known.checked), registered);
    }

    /// Registers sealed blocks that batches left out because of hashes that were uncached meanwhile.
    #[cold]
    fn register_left_out(&self) {
        let is_found = |(known, cache): &(&TokenHashes, &PrefixCache)| {
            known.era() == cache.era() && known.is_checked(cache)
        };
        let Some((known, cache)) = self.token_hashes().filter(is_found) else { return };
        let pool = self.pool_blocks();
        let left_out = (0..self.seals.settled()).filter_map(|place| {
            let hash = known.hash(place)?;
            let id = self.list.id(place as usize);
            let word = pool.word(id);
            if self.is_null(id) || !word.is_sealed() || word.is_cached() {
                return None;
            }
            cache.note(id, hash, known.era(), place, known.mark());
            Some((pool.handle(id), known.stored(cache, id, place)))
        });
        cache.register(pool, Since::Checked(known.checked), left_out);
    }

    /// Registers the unfinished last block, if it may be reused: its tokens are final and known,
    /// its writers have ended, and everything before it was computed.
    fn register_tail(&mut self) {
        let Some((known, cache)) = self.token_hashes().filter(|_| self.reuses_tail) else { return };
        let (length, pool) = (self.len(), self.pool_blocks());
        let is_done = self.writing().is_none();
        let place = length as u32 / self.kind.block_tokens;
        if let Some(hash) = known.tail_hash(cache, length)
            && self.committed as usize == length
            && place >= self.seals.settled()
            && is_done
            && !self.is_stale()
        {
            let handle = pool.handle(self.list.id(place as usize));
            let word = pool.word(handle.id);
            // Its hash was not known before.
            let is_uncached =
                known.looked != known.checked && cache.uncached().any_since(known.looked, &[hash]);
            if word.refs() == 1 && !word.is_cached() && !is_uncached {
                cache.note(handle.id, hash, known.era(), place, known.mark());
                cache.register(pool, Since::Checked(known.checked), [(handle, None)]);
            }
        }
    }

    /// Seals and registers as many blocks as possible before they are released.
    pub(super) fn make_findable(&mut self) {
        loop {
            self.catch_up();
            self.look_for_uncached(self.list.len());
            self.settle();
            if self.known.as_ref().is_some_and(|known| known.is_left_out) {
                self.register_left_out();
            }
            self.register_tail();
            // Otherwise a batch was abandoned meanwhile.
            if !self.is_stale() || self.writing().is_some() {
                return;
            }
        }
    }
}
