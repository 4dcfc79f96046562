//! The cache as subscribers see it: a set of hashes.
//!
//! Several blocks may have one hash, so a hash is announced with its first block and removed with
//! its last one. For listings, the view also keeps parents and tokens, which the pool does not:
//! about 100 bytes and the tokens per cached block.

use std::collections::{HashMap, HashSet};

use kvpool::BlockId;
use kvpool::prefix::{BlockHash, KvEvent};

use super::changes::{Changes, StoredBlock};

#[derive(Debug, Default)]
pub(super) struct CacheView {
    entries: HashMap<BlockHash, Entry>,
    blocks: HashSet<(BlockId, BlockHash)>,
}

#[derive(Debug)]
struct Entry {
    copies: usize,
    block: StoredBlock,
}

impl CacheView {
    /// Applies an event, and adds the resulting changes. Returns false for lost events, after which
    /// the view must be [listed](Self::relist) again.
    #[must_use]
    pub(super) fn apply(&mut self, event: KvEvent, changes: &mut Changes) -> bool {
        match event {
            KvEvent::Stored { block, hash, parent, tokens, block_tokens, group, extra_keys } => {
                let tokens = tokens.into_vec().into_boxed_slice();
                let stored = StoredBlock { hash, parent, tokens, block_tokens, group, extra_keys };
                self.stored(block, stored, changes);
            }
            KvEvent::Removed { block, hash, .. } => self.removed(block, hash, changes),
            KvEvent::Cleared => {
                *self = Self::default();
                changes.cleared();
            }
            // Lost events, or an event of a later version: list the pool again.
            _ => return false,
        }
        true
    }

    fn stored(&mut self, id: BlockId, block: StoredBlock, changes: &mut Changes) {
        let is_new = self.blocks.insert((id, block.hash));
        let entry = self.entries.entry(block.hash);
        let entry = entry.or_insert_with(|| Entry { copies: 0, block: block.clone() });
        entry.copies += usize::from(is_new);
        let is_first = is_new && entry.copies == 1;
        // A block that was listed without tokens, or parent, is announced again with them.
        let is_better = entry.block.tokens.is_empty() && !block.tokens.is_empty()
            || entry.block.parent.is_none() && block.parent.is_some();
        if is_better {
            entry.block = block.clone();
        }
        if is_first || is_better {
            changes.stored(block);
        }
    }

    fn removed(&mut self, id: BlockId, hash: BlockHash, changes: &mut Changes) {
        if !self.blocks.remove(&(id, hash)) {
            return;
        }
        let Some(entry) = self.entries.get_mut(&hash) else { return };
        entry.copies -= 1;
        if entry.copies == 0 {
            changes.removed(entry.block.group, hash);
            self.entries.remove(&hash);
        }
    }

    /// Replaces the view by a listing, by groups of these numbers of tokens per block; keeps known
    /// parents and tokens. Adds a clear and all blocks.
    pub(super) fn relist(
        &mut self,
        cached: Vec<Vec<(BlockId, BlockHash)>>,
        block_tokens: &[u32],
        changes: &mut Changes,
    ) {
        let mut before = std::mem::take(&mut self.entries);
        self.blocks.clear();
        for ((group, cached), &block_tokens) in (0..).zip(cached).zip(block_tokens) {
            for (id, hash) in cached {
                let is_new = self.blocks.insert((id, hash));
                let entry = self.entries.entry(hash).or_insert_with(|| {
                    let (parent, tokens, extra_keys) = (None, Box::default(), Box::default());
                    let unknown = StoredBlock { hash, parent, tokens, block_tokens, group, extra_keys };
                    let block = before.remove(&hash).map_or(unknown, |entry| entry.block);
                    Entry { copies: 0, block }
                });
                entry.copies += usize::from(is_new);
            }
        }
        self.list(changes);
    }

    /// Adds a clear and the whole cache, chain by chain.
    pub(super) fn list(&self, changes: &mut Changes) {
        changes.cleared();
        let mut children: HashMap<BlockHash, Vec<BlockHash>> = HashMap::new();
        let mut pending = Vec::new();
        for (&hash, entry) in &self.entries {
            match entry.block.parent {
                Some(parent) if self.entries.contains_key(&parent) => {
                    children.entry(parent).or_default().push(hash)
                }
                _ => pending.push(hash),
            }
        }
        // Depth first, for contiguous chains. A hash covers its prefix: there are no cycles.
        while let Some(hash) = pending.pop() {
            changes.stored(self.entries[&hash].block.clone());
            pending.extend(children.remove(&hash).unwrap_or_default());
        }
    }

    #[cfg(test)]
    pub(super) fn hashes(&self) -> std::collections::BTreeSet<BlockHash> {
        self.entries.keys().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::super::changes::Change;
    use super::*;

    fn hash(n: u128) -> BlockHash {
        BlockHash::new(n, 1)
    }

    fn stored(block: u32, n: u128, parent: Option<u128>, tokens: &[u32]) -> KvEvent {
        KvEvent::Stored {
            block: BlockId(block),
            hash: hash(n),
            parent: parent.map(hash),
            tokens: tokens.into(),
            block_tokens: 2,
            group: 0,
            extra_keys: Box::default(),
        }
    }

    fn removed(block: u32, n: u128) -> KvEvent {
        KvEvent::Removed { block: BlockId(block), hash: hash(n), group: 0 }
    }

    fn apply(view: &mut CacheView, events: impl IntoIterator<Item = KvEvent>) -> Vec<Change> {
        let mut changes = Changes::default();
        events.into_iter().for_each(|event| assert!(view.apply(event, &mut changes)));
        changes.as_slice().to_vec()
    }

    fn subscriber(set: &mut BTreeSet<BlockHash>, changes: &[Change]) {
        for change in changes {
            match change {
                Change::Stored(chain) => set.extend(chain.iter().map(|block| block.hash)),
                Change::Removed(_, hashes) => hashes.iter().for_each(|hash| assert!(set.remove(hash))),
                Change::Cleared => set.clear(),
            }
        }
    }

    #[test]
    fn a_hash_is_announced_once_and_removed_with_its_last_block() {
        let mut view = CacheView::default();
        assert_eq!(apply(&mut view, [stored(1, 7, None, &[1, 2])]).len(), 1);
        assert_eq!(apply(&mut view, [stored(2, 7, None, &[1, 2]), stored(1, 7, None, &[1, 2])]), []);
        assert_eq!(apply(&mut view, [removed(1, 7), removed(1, 7), removed(3, 7)]), []);
        assert_eq!(apply(&mut view, [removed(2, 7)]), [Change::Removed(0, vec![hash(7)])]);
        assert_eq!(view.hashes(), BTreeSet::new());
    }

    #[test]
    fn chains_are_one_change_and_a_clear_covers_what_was_before() {
        let mut view = CacheView::default();
        let chain = [stored(1, 1, None, &[1, 2]), stored(2, 2, Some(1), &[3, 4]), stored(3, 3, Some(2), &[])];
        let changes = apply(&mut view, chain.clone());
        assert!(
            matches!(&changes[..], [Change::Stored(a), Change::Stored(b)] if a.len() == 2 && b.len() == 1)
        );
        let changes =
            apply(&mut view, chain.into_iter().chain([KvEvent::Cleared, stored(9, 9, None, &[1, 2])]));
        assert!(matches!(&changes[..], [Change::Cleared, Change::Stored(a)] if a.len() == 1));
    }

    #[test]
    fn a_listing_keeps_what_is_known_and_whole_chains() {
        let mut view = CacheView::default();
        apply(&mut view, (0..100).map(|n| stored(n, n.into(), n.checked_sub(1).map(u128::from), &[n, n])));
        let mut changes = Changes::default();
        assert!(!view.apply(KvEvent::Resync { lost: 3 }, &mut changes));
        let mut cached: Vec<_> = (0..100).map(|n| (BlockId(n), hash(n.into()))).collect();
        cached[50] = (BlockId(50), hash(500));
        cached.push((BlockId(200), hash(7)));
        view.relist(vec![cached], &[2], &mut changes);
        let mut set = BTreeSet::from([hash(12345)]);
        subscriber(&mut set, changes.as_slice());
        assert_eq!(set, view.hashes());
        assert_eq!(set.len(), 100);
        // 0..50, 51..100 and the unknown one.
        let mut lengths: Vec<_> = changes.as_slice()[1..]
            .iter()
            .map(|change| if let Change::Stored(chain) = change { chain.len() } else { panic!("{change:?}") })
            .collect();
        lengths.sort();
        assert_eq!(lengths, [1, 49, 50]);
        assert_eq!(apply(&mut view, [removed(7, 7)]), [], "block 200 has it too");
        let better = apply(&mut view, [stored(50, 500, Some(49), &[50, 50])]);
        assert!(matches!(&better[..], [Change::Stored(chain)] if chain[0].tokens.len() == 2));
    }

    /// Random events, repeated and out of place, and listings: a subscriber has the view's set.
    #[test]
    fn a_subscriber_with_a_set_agrees() {
        let mut rng = fastrand::Rng::with_seed(5);
        let (mut view, mut set) = (CacheView::default(), BTreeSet::new());
        for _ in 0..20_000 {
            let (block, n) = (rng.u32(0..20), rng.u128(0..12));
            let event = match rng.u32(0..100) {
                0 => KvEvent::Cleared,
                1..50 => {
                    stored(block, n, rng.bool().then_some(n + 1), if rng.bool() { &[1, 2] } else { &[] })
                }
                _ => removed(block, n),
            };
            let mut changes = Changes::default();
            if rng.u32(0..200) == 0 {
                let cached = (0..rng.u32(0..20)).map(|id| (BlockId(id), hash(rng.u128(0..12)))).collect();
                view.relist(vec![cached], &[2], &mut changes);
            } else {
                assert!(view.apply(event, &mut changes));
            }
            subscriber(&mut set, changes.as_slice());
            assert_eq!(set, view.hashes());
        }
    }
}
