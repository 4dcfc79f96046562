//! Cached blocks of a prompt that come from a node into this pool's cache.
//!
//! ```text
//! keep     what is a hit here already, until the end
//! ask      which of the blocks behind it the node has, unless any number of leading blocks is a hit
//! fetch    what the longest boundary lacks for which there is room; what has come is kept for the rest
//! ```
//!
//! The node may send less than it was asked for, or said that it has: a part of what is wanted, as
//! its quota allows, after which the rest is fetched, or nothing, and then the first of these blocks
//! counts as absent, and the boundary is an earlier one. Such a fetch is repeated a few times only.

use std::collections::HashSet;
use std::time::Instant;

use crate::error::TransferError;
use crate::prefix::{BlockHash, PrefixCache};
use crate::sequence::{BlockRefs, PromptBlock, PromptBlocks};
use crate::sync::Arc;

use super::remote::Remote;
use super::report::{BringBackReport, Carried};
use super::route::End;

/// Most blocks of one request, whose hashes are one message.
const PART: usize = 4096;

/// Number of fetches that bring nothing, with which the operation ends.
const ATTEMPTS: usize = 4;

/// Copies cached blocks from a node, continuing the prefix cached here, as
/// [`bring_back`](super::bring_back).
pub(crate) async fn bring_back_from(
    end: &End,
    remote: &dyn Remote,
    blocks: &PromptBlocks,
) -> Result<BringBackReport, TransferError> {
    let mut fetch = Fetch { end, cache: end.cache()?, began: Instant::now(), carried: Carried::default() };
    let hit = blocks.boundary(usize::MAX, &mut |hash| fetch.has(hash));
    let (own, _) = fetch.take(blocks.needed(hit));
    let _own = end.keep(own);
    if hit < blocks.boundary(usize::MAX, &mut |_| true) {
        fetch.behind(hit, remote, blocks).await?;
    }
    Ok(fetch.report(blocks))
}

struct Fetch<'a> {
    end: &'a End,
    cache: &'a Arc<PrefixCache>,
    began: Instant,
    carried: Carried,
}

impl Fetch<'_> {
    fn has(&self, hash: BlockHash) -> bool {
        self.cache.has(self.end.sequences.blocks(), hash)
    }

    /// Takes references on those of these blocks that are here. Returns the others too.
    fn take(&self, needed: Vec<PromptBlock>) -> (BlockRefs, Vec<PromptBlock>) {
        let (mut here, mut others) = (BlockRefs::new(&self.end.sequences), Vec::new());
        for block in needed {
            match self.cache.take_to_carry(self.end.sequences.blocks(), block.hash, self.cache.era()) {
                Some(id) => here.blocks.push(id),
                None => others.push(block),
            }
        }
        (here, others)
    }

    /// Fetches what a boundary behind this hit lacks.
    async fn behind(
        &mut self,
        hit: usize,
        remote: &dyn Remote,
        blocks: &PromptBlocks,
    ) -> Result<(), TransferError> {
        let mut absent = HashSet::new();
        if !blocks.is_chain() {
            let of_lists = blocks.behind(hit).chain(blocks.checkpoints_behind(hit));
            self.ask(remote, of_lists.collect(), &mut absent).await?;
            let frames = blocks.frames_behind(hit, &|first| !absent.contains(&first) || self.has(first));
            self.ask(remote, frames, &mut absent).await?;
        }
        let (mut most, mut attempts) = (usize::MAX, 0);
        while attempts < ATTEMPTS {
            let boundary = blocks.boundary(most, &mut |hash| !absent.contains(&hash) || self.has(hash));
            if boundary <= hit {
                break;
            }
            let (here, wanted) = self.take(blocks.needed(boundary));
            let here = self.end.keep(here);
            // The blocks here take no room.
            if let Some(beyond) = wanted.get(self.end.sequences.blocks().counts().available()) {
                most = beyond.without();
                continue;
            }
            let Some(lacks) = self.fetch(remote, wanted, blocks.is_chain()).await? else { break };
            drop(here);
            absent.insert(lacks);
            attempts += 1;
        }
        Ok(())
    }

    /// Asks which of these blocks, unless they are here, the node has, and notes the others.
    async fn ask(
        &self,
        remote: &dyn Remote,
        mut hashes: Vec<BlockHash>,
        absent: &mut HashSet<BlockHash>,
    ) -> Result<(), TransferError> {
        hashes.retain(|&hash| !absent.contains(&hash) && !self.has(hash));
        if !hashes.is_empty() {
            let cached = remote.cached(hashes.clone()).await?;
            absent.extend(hashes.into_iter().zip(cached).filter(|(_, cached)| !cached).map(|(hash, _)| hash));
        }
        Ok(())
    }

    /// Fetches these blocks. Returns the first one that the node did not send, unless the operation is
    /// over. An error counts only if nothing came.
    async fn fetch(
        &mut self,
        remote: &dyn Remote,
        mut wanted: Vec<PromptBlock>,
        is_chain: bool,
    ) -> Result<Option<BlockHash>, TransferError> {
        let mut kept = Vec::new();
        while let Some(first) = wanted.first() {
            let (part, lacks) = (wanted.len().min(PART), first.hash);
            let hashes = wanted[..part].iter().map(|block| block.hash).collect();
            let came = match remote.fetch(hashes).await {
                Ok(fetched) => fetched.carried,
                Err(_) if self.carried.blocks > 0 => return Ok(None),
                Err(error) => return Err(error),
            };
            self.carried.blocks += came.blocks;
            self.carried.bytes += came.bytes;
            self.carried.runs += came.runs;
            let before = wanted.len();
            let here;
            (here, wanted) = self.take(wanted);
            kept.push(self.end.keep(here));
            match before - wanted.len() {
                // Of a chain, the node has sent what it has.
                came if is_chain && came < part => return Ok(None),
                0 => return Ok(Some(lacks)),
                _ => {}
            }
        }
        Ok(None)
    }

    fn report(mut self, blocks: &PromptBlocks) -> BringBackReport {
        self.carried.took = self.began.elapsed();
        let cached = blocks.boundary(usize::MAX, &mut |hash| self.has(hash));
        let cached_blocks = cached / blocks.block_tokens();
        BringBackReport { cached_blocks, stale_blocks: 0, carried: self.carried }
    }
}
