//! Transfer of evictable cached blocks to another pool's cache of the process, and back.

use std::time::Instant;

use crate::error::{AllocError, TransferError};
use crate::ids::BlockId;
use crate::prefix::{BlockHash, ExtraKey, KvEvent, PrefixCache, PrefixKeys};
use crate::sequence::BlockRefs;

use super::carry::forget_cleared;
use super::export::Export;
use super::import::Import;
use super::job::{self, IsAbandoned};
use super::manifest::Contents;
use super::report::{BringBackReport, Carried, OffloadReport};
use super::route::Route;

/// Moves up to `blocks_max` evictable blocks to another pool's cache, in eviction order: fewer if
/// it has less room. The blocks are copied and then evicted here; [`bring_back`] copies them back.
///
/// If the future is dropped or fails, the operation either completes or leaves all blocks in place.
pub(crate) async fn offload(route: Route, blocks_max: usize) -> Result<OffloadReport, TransferError> {
    route.check_caches()?;
    if blocks_max == 0 {
        return Err(AllocError::Zero.into());
    }
    job::run(false, move |is_abandoned| route.offload(blocks_max, is_abandoned)).await
}

/// Copies cached blocks of these tokens from another pool, which keeps its own, continuing the
/// prefix cached here. Copies full blocks only, and only the leading ones if there is less room.
///
/// If the future is dropped or fails, the operation either completes or has no effect.
pub(crate) async fn bring_back(
    route: Route,
    keys: &PrefixKeys<'_>,
    tokens: &[u32],
) -> Result<BringBackReport, TransferError> {
    route.check_caches()?;
    let hashes = route.to.cache()?.hashes(keys, tokens)?;
    let prompt = Prompt { tokens: tokens.into(), hashes, extra_keys: keys.extra().into() };
    job::run(false, move |is_abandoned| route.bring_back(&prompt, is_abandoned)).await
}

struct Prompt {
    tokens: Box<[u32]>,
    hashes: Vec<BlockHash>,
    extra_keys: Box<[ExtraKey]>,
}

impl Prompt {
    fn stored(&self, cache: &PrefixCache, block: BlockId, place: usize) -> Option<Box<KvEvent>> {
        let block_tokens = cache.hasher().block_tokens();
        let tokens = place * block_tokens..(place + 1) * block_tokens;
        cache.events().is_subscribed().then(|| {
            Box::new(KvEvent::Stored {
                block,
                hash: self.hashes[place],
                parent: place.checked_sub(1).map(|parent| self.hashes[parent]),
                tokens: self.tokens[tokens.clone()].into(),
                block_tokens: block_tokens as u32,
                group: 0,
                extra_keys: ExtraKey::of_block(&self.extra_keys, tokens),
            })
        })
    }
}

impl Route {
    fn offload(
        &self,
        blocks_max: usize,
        is_abandoned: IsAbandoned<'_>,
    ) -> Result<OffloadReport, TransferError> {
        let began = Instant::now();
        // Before any block is taken: what is cleared here first, then there, is not found there.
        let era = self.to.era();
        let mut export = Export::coldest(&self.from, blocks_max)?;
        let Contents::Cached(cold) = export.contents() else { unreachable!("cached blocks") };
        let mut import = Import::cached(&self.to, cold, era)?;
        // Of the blocks missing in the target, the coldest are moved.
        export.retain(&import.accepted())?;
        let present_blocks = import.shared_blocks();
        let carried = self.carry(&export, &mut import, is_abandoned)?;
        let stale_blocks = import.stale_blocks() + forget_cleared(&export, &mut import);
        let (_, refs) = import.commit_as(&|_, _| None)?;
        let finished = export.finish();
        drop(refs);
        let carried = Carried { took: began.elapsed(), ..carried };
        Ok(OffloadReport { stale_blocks, ..OffloadReport::new(carried, present_blocks, finished) })
    }

    fn bring_back(
        &self,
        prompt: &Prompt,
        is_abandoned: IsAbandoned<'_>,
    ) -> Result<BringBackReport, TransferError> {
        let began = Instant::now();
        let (near, pool) = (self.to.cache()?, self.to.sequences.blocks());
        // Before the other pool's: what is cleared there first, and then here, is not found here.
        let era = self.to.era();
        let mut held = BlockRefs::new(&self.to.sequences);
        // Blocks cached here, with their places in the prompt, up to the first one found nowhere.
        let mut here = Vec::<(usize, BlockId)>::new();
        let export = Export::prefix(&self.from, 0, &prompt.hashes, &mut |place| {
            let found = near.take(pool, prompt.hashes[place], era);
            held.blocks.extend(found);
            here.extend(found.map(|id| (place, id)));
            found.is_some()
        })?;
        let Contents::Cached(wanted) = export.contents() else { unreachable!("cached blocks") };
        let places: Vec<usize> = wanted.blocks.iter().map(|block| block.depth as usize).collect();
        let mut import = Import::cached(&self.to, wanted, era)?;
        let accepted = import.accepted();
        let carried = self.carry(&export, &mut import, is_abandoned)?;
        let forgotten = forget_cleared(&export, &mut import);
        let (_, mut came) = import.commit_as(&|place, id| prompt.stored(near, id, places[place]))?;
        // In the order of the prompt, so that its end is released first.
        let came_at = accepted.iter().map(|&place| places[place as usize]);
        if forgotten == 0 {
            here.extend(came_at.zip(import.blocks()));
            came.blocks.clear();
            here.sort_unstable();
        }
        // Blocks after a gap would never be found.
        let cached_blocks = (0..).zip(&here).take_while(|&(place, &(at, _))| place == at).count();
        let stale_blocks = import.stale_blocks() + forgotten;
        held.blocks = here.into_iter().map(|(_, id)| id).collect();
        drop((held, export));
        let carried = Carried { took: began.elapsed(), ..carried };
        Ok(BringBackReport { cached_blocks, stale_blocks, carried })
    }
}
