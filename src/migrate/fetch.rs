//! Cached blocks of a prompt that come from a node into this pool's cache.
//!
//! ```text
//! keep     what is a hit here already, until the end
//! ask      which blocks behind it the node has, unless any number of leading blocks is a hit
//! fetch    what the longest boundary lacks for which there is room; what has come is kept
//! ```
//!
//! The node may send less than it was asked for, or said that it has. Of a chain, that is the
//! result. Else the rest is asked for, in parts of as many blocks, which may be its quota. If a
//! part brings nothing, its first block counts as absent, and the boundary is an earlier one; if it
//! fails, and others came, it is asked for again. Both a few times only.

use std::collections::HashSet;
use std::time::Instant;

use crate::error::TransferError;
use crate::prefix::{BlockHash, PrefixCache};
use crate::sequence::{BlockRefs, PromptBlock, PromptBlocks};
use crate::sync::Arc;

use super::held::HeldBlocks;
use super::remote::Remote;
use super::report::{BringBackReport, Carried};
use super::route::End;

/// Most blocks of one request, whose hashes are one message.
const PART: usize = 4096;

/// Number of parts that bring nothing, with which the operation ends.
const ATTEMPTS: usize = 4;

/// Number of boundaries for which there is too little room, with which it ends.
const TOO_LONG: usize = 32;

/// Copies cached blocks from a node, continuing the prefix cached here, as
/// [`bring_back`](super::bring_back).
pub(crate) async fn bring_back_from(
    end: &End,
    remote: &dyn Remote,
    blocks: &PromptBlocks,
) -> Result<BringBackReport, TransferError> {
    end.check_alive()?;
    let mut fetch = Fetch { end, cache: end.cache()?, began: Instant::now(), carried: Carried::default() };
    let hit = blocks.boundary(usize::MAX, &mut |hash| fetch.has(hash));
    let (own, _) = fetch.take(&blocks.needed(hit));
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

/// Blocks that came, by parts in the order of the prompt. Released from its end.
struct Parts(Vec<HeldBlocks>);

impl Drop for Parts {
    fn drop(&mut self) {
        while self.0.pop().is_some() {}
    }
}

/// How a fetch of blocks ended.
enum Fetched {
    /// Nothing more is to be had.
    Over,
    /// The node did not send this one.
    Lacks(BlockHash),
    /// It failed after some came.
    Failed,
}

impl Fetch<'_> {
    fn has(&self, hash: BlockHash) -> bool {
        self.cache.has(self.end.sequences.blocks(), hash)
    }

    /// Takes references on those of these blocks that are here. Returns the others too.
    fn take(&self, needed: &[PromptBlock]) -> (BlockRefs, Vec<PromptBlock>) {
        let (mut here, mut others) = (BlockRefs::new(&self.end.sequences), Vec::new());
        for &block in needed {
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
        // At most so many blocks are there or find room.
        let here = blocks.behind(0).filter(|&hash| self.has(hash)).count() + blocks.needed_blocks(hit);
        let mut most = blocks.longest(here + self.end.sequences.blocks().counts().available());
        let (mut attempts, mut too_long) = (0, 0);
        let mut came = Parts(Vec::new());
        while attempts < ATTEMPTS && too_long < TOO_LONG {
            let boundary = blocks.boundary(most, &mut |hash| !absent.contains(&hash) || self.has(hash));
            if boundary <= hit {
                break;
            }
            let (here, wanted) = self.take(&blocks.needed(boundary));
            // The blocks here take no room.
            if let Some(beyond) = wanted.get(self.end.sequences.blocks().counts().available()) {
                (most, too_long) = (beyond.without(), too_long + 1);
                continue;
            }
            // Those of an earlier attempt among them have another reference now.
            came = Parts(vec![self.end.keep(here)]);
            match self.fetch(remote, wanted, blocks.is_chain(), &mut came).await? {
                Fetched::Over => break,
                Fetched::Lacks(block) => {
                    absent.insert(block);
                }
                Fetched::Failed => {}
            }
            attempts += 1;
        }
        drop(came);
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

    /// Fetches these blocks, and keeps those that come. An error counts only if none came.
    async fn fetch(
        &mut self,
        remote: &dyn Remote,
        mut wanted: Vec<PromptBlock>,
        is_chain: bool,
        came: &mut Parts,
    ) -> Result<Fetched, TransferError> {
        let mut most = PART;
        while let Some(first) = wanted.first() {
            let (part, lacks) = (wanted.len().min(most), first.hash);
            let hashes = wanted[..part].iter().map(|block| block.hash).collect();
            let carried = match remote.fetch(hashes).await {
                Ok(fetched) => fetched.carried,
                Err(_) if self.carried.blocks > 0 => return Ok(Fetched::Failed),
                Err(error) => return Err(error),
            };
            self.carried.blocks += carried.blocks;
            self.carried.bytes += carried.bytes;
            self.carried.runs += carried.runs;
            let (here, others) = self.take(&wanted[..part]);
            came.0.push(self.end.keep(here));
            let arrived = part - others.len();
            wanted.splice(..part, others);
            if is_chain && arrived < part {
                return Ok(Fetched::Over);
            }
            if arrived == 0 {
                return Ok(Fetched::Lacks(lacks));
            }
            most = most.min(arrived);
        }
        Ok(Fetched::Over)
    }

    fn report(mut self, blocks: &PromptBlocks) -> BringBackReport {
        self.carried.took = self.began.elapsed();
        let cached = blocks.boundary(usize::MAX, &mut |hash| self.has(hash));
        let cached_blocks = cached / blocks.block_tokens();
        BringBackReport { cached_blocks, stale_blocks: 0, carried: self.carried }
    }
}
