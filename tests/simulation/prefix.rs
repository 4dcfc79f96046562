//! Prompts with common beginnings, in a pool with a prefix cache.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use fastrand::Rng;
use kvpool::prefix::policy::{CachePriority, Millis};
use kvpool::prefix::{BlockHash, Chain, ExtraKey, HashKey, Hashing, PrefixCache, PrefixConfig, PrefixKeys};
use kvpool::{AdmitRequest, AllocError, SequenceError, SequenceId};

use kvpool::prefix::policy::PolicyKind;

use super::sequences::{Written, some_priority};
use super::world::World;

/// Returns a cache drawn from the seed.
pub fn some_config(rng: &mut Rng, clock: Arc<AtomicU64>) -> PrefixConfig {
    let hashing = match rng.u8(..4) {
        0 => Hashing::Weak { mask: rng.u64(..16) },
        1 => Hashing::Keyed,
        _ => Hashing::Fast,
    };
    let policy = PolicyKind::ALL[rng.usize(..PolicyKind::ALL.len())];
    let config = PrefixConfig::new().key(HashKey::from_bytes([3; 32]));
    let config = config.clock(move || Millis(clock.load(Relaxed)));
    config.hashing(hashing).policy(policy)
}

/// Beginnings of prompts, of 60 tokens at a scale of 1: half of them begin like one another.
pub fn some_prompts(rng: &mut Rng, scale: usize) -> Vec<Vec<u32>> {
    let all = 60 * scale;
    let mut prompts: Vec<Vec<u32>> = vec![(0..all).map(|_| rng.u32(..2)).collect()];
    for _ in 0..4 {
        let mut prompt = prompts[rng.usize(..prompts.len())].clone();
        prompt.truncate(rng.usize(..all));
        prompt.extend((prompt.len()..all).map(|_| rng.u32(..2)));
        prompts.push(prompt);
    }
    prompts
}

fn keys(salt: u64) -> PrefixKeys<'static> {
    if salt == 0 { PrefixKeys::new() } else { PrefixKeys::new().salt(b"salt") }
}

/// Returns the number of cached tokens of a prompt, according to the words.
fn cached(
    cache: &PrefixCache,
    held: &HashSet<BlockHash>,
    prompt: &[u32],
    keys: &PrefixKeys<'_>,
    extra: &[ExtraKey],
    reuses_tail: bool,
) -> usize {
    let (hasher, block_tokens) = (cache.hasher(), cache.hasher().block_tokens());
    let root = hasher.root(keys).unwrap();
    let begin = || {
        let mut chain = Chain::new(root);
        for ExtraKey { tokens, key } in extra {
            chain.extra_key(hasher, tokens.start as u64..tokens.end as u64, key).unwrap();
        }
        chain
    };
    let (mut chain, mut hashes) = (begin(), Vec::new());
    chain.extend(hasher, prompt, |hash| hashes.push(hash));
    let most = (prompt.len() - 1) / block_tokens;
    let blocks = hashes[..most].iter().take_while(|hash| held.contains(hash)).count();
    let (tokens, rest) = (blocks * block_tokens, &prompt[blocks * block_tokens..]);
    if !reuses_tail {
        return tokens;
    }
    if rest.len() == block_tokens && held.contains(&hashes[blocks]) {
        return prompt.len() - 1;
    }
    // An identical prompt's block holds the last token too, which must be computed.
    let half = (1..=rest.len().min(block_tokens - 1)).rev().find(|&more| {
        let mut chain = begin();
        chain.extend(hasher, &prompt[..tokens + more], |_| ());
        held.contains(&chain.partial(hasher).expect("less than a block"))
    });
    (tokens + half.unwrap_or(0)).min(prompt.len() - 1)
}

impl World {
    pub fn open_prompt(&mut self) {
        if self.sequences.len() >= 12 {
            return;
        }
        let id = SequenceId(self.number());
        let which = self.rng.usize(..self.prompts.len());
        let mut prompt = self.prompts[which][..self.rng.usize(1..60 * self.scale)].to_vec();
        prompt.extend((0..self.rng.usize(..6) * self.scale).map(|_| self.rng.u32(..2)));
        let (salt, reuses_tail) = (u64::from(self.rng.u8(..4) == 0), self.rng.bool());
        let extra: Vec<ExtraKey> = (0..self.rng.usize(..3).saturating_sub(1))
            .map(|_| {
                let start = self.rng.usize(..prompt.len());
                let end = prompt.len().min(start + self.rng.usize(1..12));
                ExtraKey::new(start..end, &[self.rng.u8(..2)])
            })
            .collect();
        let keys = keys(salt).extra_keys(&extra);
        let (priority, keep) = (some_priority(&mut self.rng), CachePriority::ALL[self.rng.usize(..3)]);
        let keep_until = (self.rng.u8(..4) == 0).then_some(self.now() + 1);
        let session = self.some_session();
        let headroom = (self.rng.u8(..3) == 0).then(|| self.rng.usize(..20 * self.scale));
        let is_told = self.pool.prefix_cache().map(|cache| {
            let held = self.pool.cached_blocks().into_iter().map(|(_, hash)| hash).collect();
            (cached(cache, &held, &prompt, &keys, &extra, reuses_tail), cache.stats().forgotten_blocks)
        });
        let opened = match headroom {
            None => {
                let mut builder = self.pool.sequence(id).keys(keys).priority(priority).keep(keep);
                if reuses_tail {
                    builder = builder.reuse_tail();
                }
                if let Some(until) = keep_until {
                    builder = builder.keep_until(until);
                }
                if let Some(session) = session {
                    builder = builder.session(session);
                }
                builder.tokens(&prompt)
            }
            Some(headroom) => {
                let request = AdmitRequest::new(id, &prompt).keys(keys).priority(priority).keep(keep);
                let mut request = request.headroom(headroom);
                if reuses_tail {
                    request = request.reuse_tail();
                }
                if let Some(until) = keep_until {
                    request = request.keep_until(until);
                }
                if let Some(session) = session {
                    request = request.session(session);
                }
                let needed = self.pool.blocks_needed(&request);
                let admitted = self.pool.admit(&request);
                if let (Ok(needed), Ok(real)) = (&needed, &admitted) {
                    assert!(*needed >= real.reserved_blocks(), "{needed} needed, {real:?}");
                }
                admitted
            }
        };
        let real = match opened {
            Ok(real) => real,
            Err(SequenceError::Alloc(AllocError::TooLarge { asked, total })) => {
                return assert!(asked > total);
            }
            Err(SequenceError::Alloc(error)) => {
                assert!(headroom.is_some(), "{error}");
                return self.is_not_admitted_rightly(&error);
            }
            Err(error) => panic!("{error}"),
        };
        let found = real.len();
        self.note(format_args!("{id}: {found} of {prompt:?} are cached, {is_told:?}"));
        match is_told {
            // The index has a place for each block.
            // An admission that lacks the block for the copy does without the tail.
            Some((held, 0)) if headroom.is_some() && found < held => {
                assert!(reuses_tail && found == (held - 1) / self.block_tokens * self.block_tokens);
            }
            Some((held, 0)) => assert_eq!(found, held, "found, and cached"),
            Some((held, _)) => assert!(found <= held),
            None => assert_eq!((found, real.announced()), (0, 0)),
        }
        let mut written = Written::new(real, prompt, salt, extra);
        written.came_to(found);
        self.sequences.push(written);
        if found > 0 {
            self.tally.hits += 1;
            self.tally.half_hits += u64::from(!found.is_multiple_of(self.block_tokens));
            let (batch, index) = (self.some_batch(), self.sequences.len() - 1);
            let blocks = self.sequences[index].real.blocks();
            let frames: Vec<usize> = blocks.map(|block| self.pool.blocks().frame(block).index()).collect();
            self.read_through(batch, index, &frames);
        }
    }

    /// Checks the refusal of an admission, which evicts no block of its own prefix.
    fn is_not_admitted_rightly(&self, error: &AllocError) {
        match *error {
            AllocError::Behind { priority, waiting, .. } => {
                assert!(waiting >= priority && self.is_in_line(waiting), "{error}");
            }
            AllocError::Exhausted { asked, .. } => {
                let counts = self.pool.blocks().counts();
                assert!(asked > counts.free() || self.is_resizing(), "{error}: {counts:?}");
            }
            _ => self.is_refused_rightly(error, false),
        }
    }

    /// Serves a prompt from beginning to end.
    pub fn serve_prompt(&mut self) {
        let before = self.sequences.len();
        self.open_prompt();
        let Some(written) = self.sequences.get(before) else { return };
        let rest = written.ids.len() - written.tokens.len();
        self.begin_batch();
        let batch = self.batches.len() - 1;
        self.append_so(batch, before, 5, rest);
        if self.rng.u8(..4) > 0 {
            self.end_batch(batch);
        }
        if self.rng.u8(..4) > 0 {
            self.counting_slices(|world| drop(world.sequences.swap_remove(before)));
        }
    }

    pub fn clear_cache(&mut self) {
        let cached = self.pool.cached_blocks().len();
        self.pool.clear_prefix_cache();
        self.note(format_args!("{cached} are no longer cached"));
        self.tally.cleared += u64::from(cached > 0);
        if self.pool.prefix_cache().is_some() {
            assert_eq!(self.pool.cached_blocks(), Vec::new());
        }
    }
}
