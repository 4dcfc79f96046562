//! Transfer of evictable cached blocks to another pool's cache of the process, and back.
//!
//! Both pools have the same groups of layers. A block leaves when it is cold, whatever its group.
//! It comes back with all that a hit needs in the other groups, or not at all.

use std::time::Instant;

use crate::error::{AllocError, TransferError};
use crate::prefix::{ExtraKey, PrefixKeys};
use crate::sequence::{BlockRefs, PromptBlocks};

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
/// prefix cached here: what every group of layers needs at the longest boundary for which there is
/// room.
///
/// If the future is dropped or fails, the operation either completes or has no effect.
pub(crate) async fn bring_back(
    route: Route,
    keys: &PrefixKeys<'_>,
    tokens: &[u32],
) -> Result<BringBackReport, TransferError> {
    route.check_caches()?;
    let blocks = route.to.sequences.prompt_blocks(route.to.cache()?, keys, tokens)?;
    let prompt = Prompt { tokens: tokens.into(), blocks, extra_keys: keys.extra().into() };
    job::run(false, move |is_abandoned| route.bring_back(&prompt, is_abandoned)).await
}

struct Prompt {
    tokens: Box<[u32]>,
    blocks: PromptBlocks,
    extra_keys: Box<[ExtraKey]>,
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
        let (began, blocks) = (Instant::now(), &prompt.blocks);
        let (near, pool) = (self.to.cache()?, self.to.sequences.blocks());
        // Before the other pool's: what is cleared there first, and then here, is not found here.
        let era = self.to.era();
        let (far, far_era) = (self.from.cache()?, self.from.era());
        let is_here = |hash| near.has_in(pool, hash, era);
        let is_there = |hash| far.has_in(self.from.sequences.blocks(), hash, far_era);
        let (mut most, mut stale) = (usize::MAX, 0);
        // What is a hit already stays one, whatever is evicted for the rest.
        let own = blocks.needed(blocks.boundary(usize::MAX, &mut |hash| is_here(hash)));
        let mut own_held = BlockRefs::new(&self.to.sequences);
        let own = own.iter().filter_map(|block| near.take_to_carry(pool, block.hash, era));
        own_held.blocks.extend(own);
        loop {
            let boundary = blocks.boundary(most, &mut |hash| is_here(hash) || is_there(hash));
            // The blocks cached here, and the others, with their places.
            let (mut here, mut places, mut wanted) = (Vec::new(), Vec::new(), Vec::new());
            let mut held = BlockRefs::new(&self.to.sequences);
            for (place, block) in blocks.needed(boundary).into_iter().enumerate() {
                if let Some(id) = near.take_to_carry(pool, block.hash, era) {
                    held.blocks.push(id);
                    here.push((place, id));
                } else {
                    places.push(place);
                    wanted.push(block);
                }
            }
            let export = Export::prefix(&self.from, wanted.iter().map(|block| block.hash))?;
            if let Some(evicted) = wanted.get(export.len()) {
                most = evicted.without();
                continue;
            }
            let Contents::Cached(cached) = export.contents() else { unreachable!("cached blocks") };
            let mut import = Import::cached(&self.to, cached, era)?;
            let accepted = import.accepted();
            let refused = (0..).zip(&accepted).take_while(|&(place, &at)| place == at).count();
            if let Some(refused) = wanted.get(refused) {
                // There is less room, or it is from before a clear: a shorter prefix.
                (most, stale) = (refused.without(), stale.max(import.stale_blocks()));
                continue;
            }
            let carried = self.carry(&export, &mut import, is_abandoned)?;
            let forgotten = forget_cleared(&export, &mut import);
            let (_, mut came) = import.commit_as(&|place, id| {
                blocks.stored(near, (&wanted[place], id), (&prompt.tokens, &prompt.extra_keys))
            })?;
            if forgotten == 0 {
                here.extend(places.into_iter().zip(import.blocks()));
                came.blocks.clear();
                // In the order of the prompt, so that its end is released first.
                here.sort_unstable();
            }
            held.blocks = here.into_iter().map(|(_, id)| id).collect();
            let cached_blocks = blocks.boundary(boundary, &mut |hash| is_here(hash)) / blocks.block_tokens();
            drop((own_held, held, export));
            let carried = Carried { took: began.elapsed(), ..carried };
            return Ok(BringBackReport { cached_blocks, stale_blocks: stale + forgotten, carried });
        }
    }
}
