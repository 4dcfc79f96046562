//! The naive model of the prefix cache: which prefix of a prompt is cached, and which blocks are
//! evicted first, in a pool that one thread drives and that evicts by LRU. It is exact: a look-up
//! returns the model's result, an allocation evicts as many blocks as are missing, the least
//! recently released first, and a refused request evicts nothing.
//!
//! [`run`] applies a list of [`PrefixOperation`]s to a real pool and to the model. Property tests
//! and a fuzz target call it.

use std::collections::BTreeMap;

use kvpool::prefix::{HashKey, PrefixConfig};
use kvpool::storage::KvLayout;
use kvpool::{AllocError, AllocRequest, Lease, Pool, Sequence, SequenceError, SequenceId};

use crate::model::Pick;

/// One step.
#[derive(Clone, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "arbitrary", derive(arbitrary::Arbitrary))]
#[non_exhaustive]
pub enum PrefixOperation {
    /// Open a prompt and append the part that is not cached. Prompts with one number begin alike,
    /// and share their first half with the prompts of half that number; each ends in an unfinished
    /// block.
    Admit {
        /// Number of the prompt.
        prompt: u8,
        /// Number of full blocks.
        blocks: u8,
    },
    /// Truncate a sequence to this share of its tokens, in 255ths. A cut inside a cached block
    /// leaves it cached as a whole.
    Cut(Pick, u8),
    /// Fork a sequence.
    Fork(Pick),
    /// Close a sequence.
    Close(Pick),
    /// Allocate blocks.
    Lease(u8),
    /// Free the blocks of one `Lease`.
    Drop(Pick),
    /// Clear the cache.
    Clear,
}

/// A cached block: its tokens, and all before them.
type Chain = Vec<u32>;

struct Model {
    block_tokens: usize,
    /// References, and the number of the last release.
    cached: BTreeMap<Chain, (u32, u64)>,
    releases: u64,
}

impl Model {
    fn evictable(&self) -> usize {
        self.cached.values().filter(|(refs, _)| *refs == 0).count()
    }

    fn evict(&mut self, count: usize) {
        for _ in 0..count {
            let oldest = self.cached.iter().filter(|(_, (refs, _))| *refs == 0);
            let chain = oldest.min_by_key(|(_, (_, released))| *released).map(|(chain, _)| chain.clone());
            self.cached.remove(&chain.expect("a cached block to evict"));
        }
    }

    /// No look-up finds the blocks, which keep their places in the order of evictions.
    fn clear(&mut self) {
        for (mut chain, block) in std::mem::take(&mut self.cached) {
            chain.insert(0, u32::MAX);
            chain.push(block.1 as u32);
            self.cached.insert(chain, block);
        }
    }

    fn share(&mut self, tokens: &[u32]) {
        for end in (self.block_tokens..=tokens.len()).step_by(self.block_tokens) {
            self.cached.entry(tokens[..end].to_vec()).or_insert((0, 0)).0 += 1;
        }
    }

    /// The blocks of `tokens` from the `keep`th on, the last first.
    fn release(&mut self, tokens: &[u32], keep: usize) {
        for block in (keep..tokens.len() / self.block_tokens).rev() {
            let end = (block + 1) * self.block_tokens;
            let (refs, released) = self.cached.get_mut(&tokens[..end]).expect("in a sequence");
            *refs -= 1;
            if *refs == 0 {
                self.releases += 1;
                *released = self.releases;
            }
        }
    }
}

struct Open {
    real: Sequence,
    /// All tokens of its blocks, if it was cut inside one.
    tokens: Vec<u32>,
}

struct Drive {
    pool: Pool,
    model: Model,
    open: Vec<Open>,
    leases: Vec<Lease<'static>>,
    last: u64,
}

/// Runs the operations on a new pool of `blocks` blocks of `block_tokens` tokens and on the model,
/// and returns the first difference.
///
/// # Errors
///
/// The index of the operation, and the difference.
pub fn run(blocks: usize, block_tokens: usize, operations: &[PrefixOperation]) -> Result<(), String> {
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(1).block_tokens(block_tokens);
    let builder = Pool::builder(layout.build().expect("a valid layout"))
        .blocks(blocks)
        .magazine_blocks(0)
        .without_storage();
    // A fixed key: a failure reproduces.
    let cache = PrefixConfig::new().key(HashKey::from_bytes([7; 32]));
    let pool = builder.prefix_cache(cache).build().expect("a valid pool");
    let model = Model { block_tokens, cached: BTreeMap::new(), releases: 0 };
    let mut drive = Drive { pool, model, open: Vec::new(), leases: Vec::new(), last: 0 };
    for (step, operation) in operations.iter().enumerate() {
        let outcome = drive.step(operation).and_then(|()| drive.counts());
        let forgot =
            |drive: &Drive| drive.pool.prefix_cache().is_some_and(|cache| cache.stats().forgotten_blocks > 0);
        if outcome.is_err() && forgot(&drive) {
            // The index had no room for a block, and the model's has: the two differ from here on.
            break;
        }
        outcome.map_err(|what| format!("operation {step}: {operation:?}: {what}"))?;
    }
    drive.pool.audit().map(drop).map_err(|finding| finding.to_string())
}

impl Drive {
    /// Returns the tokens of a prompt. The last one is unique: it must be computed, and if it fills
    /// a block, that would be a duplicate.
    fn tokens_of(&self, prompt: u8, blocks: u8) -> Vec<u32> {
        let tokens = u32::from(blocks % 24) * self.model.block_tokens as u32;
        let (half, own) = (u32::from(prompt % 8 / 2), u32::from(prompt % 8));
        let first_half = 10 * self.model.block_tokens as u32;
        (0..tokens)
            .map(|token| if token < first_half { half * 1000 + token } else { own * 1000 + token })
            .chain([1 << 31 | self.last as u32])
            .collect()
    }

    /// Returns the number of free blocks, without the evictable ones.
    fn free(&self) -> usize {
        self.pool.total_blocks() - self.used() - self.model.evictable()
    }

    /// Returns the number of owned blocks, each shared one counted once.
    fn used(&self) -> usize {
        let mut blocks: Vec<_> = self.open.iter().flat_map(|open| open.real.blocks()).collect();
        blocks.sort_unstable();
        blocks.dedup();
        blocks.len() + self.leases.iter().map(|lease| lease.blocks().len()).sum::<usize>()
    }

    fn counts(&self) -> Result<(), String> {
        let counts = self.pool.blocks().counts();
        same("evictable", self.model.evictable(), counts.evictable)?;
        same("free", self.free(), counts.free())
    }

    /// Returns whether `blocks` blocks can be allocated; missing ones are evicted.
    fn takes(&mut self, blocks: usize) -> bool {
        let (free, evictable) = (self.free(), self.model.evictable());
        let can = blocks <= free + evictable;
        if can {
            self.model.evict(blocks.saturating_sub(free));
        }
        can
    }

    fn step(&mut self, operation: &PrefixOperation) -> Result<(), String> {
        match *operation {
            PrefixOperation::Admit { prompt, blocks } => self.admit(self.tokens_of(prompt, blocks)),
            PrefixOperation::Cut(pick, keep) => {
                let Some(index) = pick.index(self.open.len()) else { return Ok(()) };
                let Open { real, tokens } = &mut self.open[index];
                let length = real.len() * usize::from(keep) / 255;
                real.truncate(length).map_err(|error| error.to_string())?;
                let blocks = length.div_ceil(self.model.block_tokens);
                self.model.release(tokens, blocks);
                tokens.truncate(blocks * self.model.block_tokens);
                Ok(())
            }
            PrefixOperation::Fork(pick) => {
                let Some(open) = pick.of(&self.open) else { return Ok(()) };
                self.last += 1;
                let real = open.real.fork(SequenceId(self.last)).map_err(|error| error.to_string())?;
                let tokens = open.tokens.clone();
                self.model.share(&tokens);
                self.open.push(Open { real, tokens });
                Ok(())
            }
            PrefixOperation::Close(pick) => {
                if let Some(index) = pick.index(self.open.len()) {
                    let closed = self.open.swap_remove(index);
                    self.model.release(&closed.tokens, 0);
                }
                Ok(())
            }
            PrefixOperation::Lease(blocks) => self.lease(usize::from(blocks)),
            PrefixOperation::Drop(pick) => {
                if let Some(index) = pick.index(self.leases.len()) {
                    drop(self.leases.swap_remove(index));
                }
                Ok(())
            }
            PrefixOperation::Clear => {
                if !self.open.is_empty() {
                    // A block in use from an older era would be distinguished by its era alone.
                    return Ok(());
                }
                self.pool.clear_prefix_cache();
                self.model.clear();
                Ok(())
            }
        }
    }

    fn admit(&mut self, tokens: Vec<u32>) -> Result<(), String> {
        self.last += 1;
        let block_tokens = self.model.block_tokens;
        let mut real = match self.pool.sequence(SequenceId(self.last)).tokens(&tokens) {
            Err(SequenceError::Alloc(AllocError::TooLarge { asked, total })) if asked > total => {
                return Ok(());
            }
            opened => opened.map_err(|error| error.to_string())?,
        };
        let ends = (block_tokens..tokens.len()).step_by(block_tokens);
        let hits = ends.take_while(|&end| self.model.cached.contains_key(&tokens[..end])).count();
        same("cached blocks", hits * block_tokens, real.len())?;
        self.model.share(&tokens[..hits * block_tokens]);
        self.open.push(Open { real, tokens: tokens[..hits * block_tokens].to_vec() });
        // The blocks found are referenced before any are evicted for the rest.
        let can = self.takes(tokens.len().div_ceil(block_tokens) - hits);
        let Some(Open { real: sequence, tokens: has }) = self.open.last_mut() else { return Ok(()) };
        let mut batch = self.pool.begin_batch();
        let appended = batch.append(sequence, tokens.len() - has.len());
        batch.finish();
        match appended {
            Ok(_) if can => {
                self.model.release(has, 0);
                self.model.share(&tokens);
                *has = tokens;
                Ok(())
            }
            Err(SequenceError::Alloc(AllocError::Exhausted { .. })) if !can => {
                real = self.open.pop().expect("pushed just now").real;
                drop(real);
                self.model.release(&tokens[..hits * block_tokens], 0);
                Ok(())
            }
            outcome => Err(format!("expected success: {can}, got {outcome:?}")),
        }
    }
}

impl Drive {
    fn lease(&mut self, blocks: usize) -> Result<(), String> {
        let total = self.pool.total_blocks();
        if blocks == 0 || blocks > total {
            return Ok(());
        }
        let can = self.takes(blocks);
        match self.pool.allocate_owned(AllocRequest::new(blocks)) {
            Ok(lease) if can => self.leases.push(lease),
            Err(AllocError::Exhausted { .. }) if !can => {}
            outcome => {
                return Err(format!("expected success of allocating {blocks}: {can}, got {outcome:?}"));
            }
        }
        Ok(())
    }
}

fn same(what: &str, expected: usize, got: usize) -> Result<(), String> {
    if expected == got { Ok(()) } else { Err(format!("{what}: expected {expected}, got {got}")) }
}

#[cfg(feature = "proptest")]
mod strategy {
    use proptest::prelude::*;

    use super::*;

    impl Arbitrary for PrefixOperation {
        type Parameters = ();
        type Strategy = BoxedStrategy<Self>;

        fn arbitrary_with((): ()) -> Self::Strategy {
            prop_oneof![
                10 => any::<(u8, u8)>().prop_map(|(prompt, blocks)| Self::Admit { prompt, blocks }),
                2 => (any::<Pick>(), any::<u8>()).prop_map(|(pick, keep)| Self::Cut(pick, keep)),
                1 => any::<Pick>().prop_map(Self::Fork),
                8 => any::<Pick>().prop_map(Self::Close),
                3 => (0..40_u8).prop_map(Self::Lease),
                3 => any::<Pick>().prop_map(Self::Drop),
                1 => Just(Self::Clear),
            ]
            .boxed()
        }
    }
}
