use kvpool::prefix::{BlockHash, ExtraKey};

/// A cached block as far as known.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct StoredBlock {
    pub(super) hash: BlockHash,
    /// `None` for the first block of a prefix, or if unknown, as then the tokens are.
    pub(super) parent: Option<BlockHash>,
    pub(super) tokens: Box<[u32]>,
    pub(super) block_tokens: u32,
    pub(super) group: u32,
    /// The extra keys that touch its tokens, with positions relative to its first token.
    pub(super) extra_keys: Box<[(i64, ExtraKey)]>,
}

/// A change of the set of findable hashes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Change {
    /// Blocks of a chain, in order: the hash of each is the parent of the next.
    Stored(Vec<StoredBlock>),
    /// Blocks of a group.
    Removed(u32, Vec<BlockHash>),
    Cleared,
}

/// Changes in order, merged as far as possible.
#[derive(Debug, Default)]
pub(super) struct Changes(Vec<Change>);

impl Changes {
    pub(super) fn stored(&mut self, block: StoredBlock) {
        if let Some(Change::Stored(chain)) = self.0.last_mut()
            && let Some(last) = chain.last()
            && continues(last, &block)
        {
            chain.push(block);
        } else {
            self.0.push(Change::Stored(vec![block]));
        }
    }

    pub(super) fn removed(&mut self, group: u32, hash: BlockHash) {
        match self.0.last_mut() {
            Some(Change::Removed(of, hashes)) if *of == group => hashes.push(hash),
            _ => self.0.push(Change::Removed(group, vec![hash])),
        }
    }

    pub(super) fn cleared(&mut self) {
        self.0.clear();
        self.0.push(Change::Cleared);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn as_slice(&self) -> &[Change] {
        &self.0
    }
}

/// Returns whether a block extends a chain, whose blocks all need tokens.
fn continues(last: &StoredBlock, next: &StoredBlock) -> bool {
    let is_whole = |block: &StoredBlock| block.tokens.len() == block.block_tokens as usize;
    next.parent == Some(last.hash)
        && (next.group, next.block_tokens) == (last.group, last.block_tokens)
        && is_whole(last)
        && is_whole(next)
}
