//! Transfer of evictable cached blocks to another pool's cache, and back.

use std::time::Instant;

use crate::error::{AllocError, TransferError};
use crate::ids::BlockId;
use crate::prefix::{BlockHash, Chain, ColdBlock, KvEvent, PrefixCache, PrefixKeys};
use crate::sequence::{BlockRefs, Sequences};

use super::carry::Pair;
use super::job::{self, IsAbandoned};
use super::report::{BringBackReport, Carried, OffloadReport};
use super::route::{End, Route};

/// Evictable blocks held for copying. Dropping it returns them to their former places.
struct ColdBlocks {
    end: End,
    cold: Vec<ColdBlock>,
}

impl ColdBlocks {
    fn coldest(end: &End, cache: &PrefixCache, wanted: usize) -> Self {
        Self { end: end.clone(), cold: cache.take_coldest(end.sequences.blocks(), wanted) }
    }

    fn put_back(&mut self, from: usize) {
        if let Ok(cache) = self.end.cache() {
            cache.put_back(self.end.sequences.blocks(), &self.cold.split_off(from));
        }
    }
}

impl Drop for ColdBlocks {
    fn drop(&mut self) {
        self.put_back(0);
    }
}

/// Moves up to `blocks_max` evictable blocks to another pool's cache, in eviction order.
///
/// The blocks are copied and then evicted here. The same tokens find them in the other pool, and
/// [`bring_back`] copies them back. Moves fewer blocks if the other pool has less room.
///
/// The future may be dropped at any time: the operation then either completes, or leaves all blocks
/// in place.
///
/// # Errors
///
/// [`TransferError`]; all blocks are left in place.
pub async fn offload(
    from: &Sequences,
    to: &Sequences,
    blocks_max: usize,
) -> Result<OffloadReport, TransferError> {
    let route = Route::between_caches(from, to)?;
    if blocks_max == 0 {
        return Err(AllocError::Zero.into());
    }
    job::run(false, move |is_abandoned| route.offload(blocks_max, is_abandoned)).await
}

/// Copies cached blocks of these tokens from another pool, continuing the prefix that is cached
/// here.
///
/// A sequence opened with these tokens then finds them all. Only full blocks are copied. If there
/// is less room here, only the leading ones are. The other pool keeps its copies.
///
/// The future may be dropped at any time: the operation then either completes, or has no effect.
///
/// # Errors
///
/// [`TransferError`]; no block was copied.
pub async fn bring_back(
    from: &Sequences,
    to: &Sequences,
    keys: &PrefixKeys<'_>,
    tokens: &[u32],
) -> Result<BringBackReport, TransferError> {
    let route = Route::between_caches(from, to)?;
    let hasher = route.to.cache()?.hasher();
    let (mut chain, mut hashes) = (Chain::new(hasher.root(keys)?), Vec::new());
    chain.extend(hasher, tokens, |hash| hashes.push(hash));
    let prompt = Prompt { tokens: tokens.into(), hashes };
    job::run(false, move |is_abandoned| route.bring_back(&prompt, is_abandoned)).await
}

/// A prepared offload.
struct PreparedOffload {
    /// The blocks already present in the target, then the blocks of `going`.
    taken: ColdBlocks,
    /// In the target: the blocks already present, then fresh ones.
    held: BlockRefs,
    present_blocks: usize,
    going: Vec<(ColdBlock, BlockId)>,
    /// Era of the target's cache.
    era: u64,
}

/// The full blocks of a prompt.
struct Prompt {
    tokens: Box<[u32]>,
    hashes: Vec<BlockHash>,
}

impl Prompt {
    /// Returns the event for a stored block, if there is a subscriber.
    fn stored(&self, cache: &PrefixCache, block: BlockId, place: usize) -> Option<Box<KvEvent>> {
        let block_tokens = cache.hasher().block_tokens();
        cache.events().is_subscribed().then(|| {
            Box::new(KvEvent::Stored {
                block,
                hash: self.hashes[place],
                parent: place.checked_sub(1).map(|parent| self.hashes[parent]),
                tokens: self.tokens[place * block_tokens..(place + 1) * block_tokens].into(),
                block_tokens: block_tokens as u32,
            })
        })
    }
}

impl Route {
    /// Takes the blocks to move, and allocates room for them in the target.
    fn prepare_offload(&self, blocks_max: usize) -> Result<PreparedOffload, TransferError> {
        let (here, there, pool) = (self.from.cache()?, self.to.cache()?, self.to.sequences.blocks());
        // Read before any block is taken: what is cleared here first, and then there, is not found
        // there.
        let era = there.era();
        let (mut taken, mut held) =
            (ColdBlocks::coldest(&self.from, here, blocks_max), BlockRefs::new(&self.to.sequences));
        let (mut present, mut missing) = (Vec::new(), Vec::new());
        for &cold in &taken.cold {
            match there.take(pool, cold.hash, era) {
                // Referenced, so that it stays there while it is given up here.
                Some(id) => {
                    held.blocks.push(id);
                    present.push(cold);
                }
                None => missing.push(cold),
            }
        }
        let present_blocks = present.len();
        let room = match held.allocate_up_to(missing.len()) {
            Ok(room) => room,
            // The target has lost all its blocks: they must stay here.
            Err(error @ AllocError::DeviceLost { .. }) => return Err(error.into()),
            Err(_) if present_blocks > 0 || missing.is_empty() => 0,
            Err(error) => return Err(error.into()),
        };
        let fresh = held.blocks[present_blocks..].iter().copied();
        let going = missing.iter().copied().zip(fresh).collect();
        // Of the blocks missing in the target, the coldest are moved.
        taken.cold = [present, missing].concat();
        taken.put_back(present_blocks + room);
        Ok(PreparedOffload { taken, held, present_blocks, going, era })
    }

    fn offload(
        &self,
        blocks_max: usize,
        is_abandoned: IsAbandoned<'_>,
    ) -> Result<OffloadReport, TransferError> {
        let began = Instant::now();
        let PreparedOffload { mut taken, mut held, present_blocks, going, era } =
            self.prepare_offload(blocks_max)?;
        let (here, there, pool) = (self.from.cache()?, self.to.cache()?, self.to.sequences.blocks());
        let pairs: Vec<Pair> = going.iter().map(|(cold, target)| (cold.id, *target)).collect();
        // SAFETY: the blocks read are sealed, and a reference on each is held; the blocks written
        // were allocated just now, and no other thread knows them.
        let carried = unsafe { self.carry(&pairs, is_abandoned) }?;
        going.iter().for_each(|(cold, target)| there.note(*target, cold.hash, era, cold.depth));
        there.register(pool, going.iter().map(|(_, target)| (pool.handle(*target), None)));
        let cold = std::mem::take(&mut taken.cold);
        let (evicted_blocks, leaving_blocks) = here.give_up(self.from.sequences.blocks(), &cold);
        // Released last first, so that the coldest are evicted first in the target too.
        held.blocks.reverse();
        drop(held);
        Ok(OffloadReport {
            present_blocks,
            evicted_blocks,
            leaving_blocks,
            warm_blocks: cold.len() - evicted_blocks - leaving_blocks,
            carried: Carried { took: began.elapsed(), ..carried },
        })
    }

    fn bring_back(
        &self,
        prompt: &Prompt,
        is_abandoned: IsAbandoned<'_>,
    ) -> Result<BringBackReport, TransferError> {
        let began = Instant::now();
        let (far, near) = (self.from.cache()?, self.to.cache()?);
        let (far_pool, pool) = (self.from.sequences.blocks(), self.to.sequences.blocks());
        // In this order: what is cleared there first, and then here, is not found here.
        let (era, far_era) = (near.era(), far.era());
        let (mut read, mut held) = (BlockRefs::new(&self.from.sequences), BlockRefs::new(&self.to.sequences));
        // With their places in the prompt: blocks cached here, and blocks found only in the other
        // pool.
        let (mut here, mut missing) = (Vec::<(usize, BlockId)>::new(), Vec::<(usize, BlockId)>::new());
        for (place, &hash) in prompt.hashes.iter().enumerate() {
            if let Some(id) = near.take(pool, hash, era) {
                held.blocks.push(id);
                here.push((place, id));
            } else if let Some(id) = far.take(far_pool, hash, far_era) {
                read.blocks.push(id);
                missing.push((place, id));
            } else {
                break;
            }
        }
        let cached = here.len();
        let room = match missing.len() {
            0 => 0,
            wanted => held.allocate_up_to(wanted)?,
        };
        // Blocks after a gap would never be found.
        let cached_blocks = missing.get(room).map_or(cached + room, |&(gap, _)| gap);
        let fresh = held.blocks[cached..].iter();
        let pairs: Vec<Pair> =
            missing.iter().zip(fresh).map(|(&(_, source), &target)| (source, target)).collect();
        // SAFETY: the blocks read are sealed, and a reference on each is held; the blocks written
        // were allocated just now, and no other thread knows them.
        let carried = unsafe { self.carry(&pairs, is_abandoned) }?;
        let came = missing.iter().zip(&pairs).map(|(&(place, _), &(_, target))| (place, target));
        here.extend(came);
        for &(place, target) in &here[cached..] {
            near.note(target, prompt.hashes[place], era, place as u32);
        }
        near.register(
            pool,
            here[cached..].iter().map(|&(place, id)| (pool.handle(id), prompt.stored(near, id, place))),
        );
        // In the order of the prompt, so that its end is released first.
        here.sort_unstable();
        held.blocks = here.into_iter().map(|(_, id)| id).collect();
        drop((held, read));
        Ok(BringBackReport { cached_blocks, carried: Carried { took: began.elapsed(), ..carried } })
    }
}
