//! The free list of an engine without a pool, as a baseline for the placement of blocks: it serves
//! the same requests with the same tokens, in the same order.
//!
//! It is vLLM's block manager: single blocks come from the front of one queue, and freed ones go to
//! its end, the last block of a sequence first. With a prefix cache, full blocks have a key that
//! depends on all tokens up to their end. A freed block keeps its key until it is allocated again,
//! so evictions follow exact LRU order; a hit removes it from the queue.
//!
//! Only the placement is simulated, not bytes or time. The list follows the pool step by step: a
//! sequence has blocks here for the tokens that it has there, regardless of cache hits.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use kvpool_load::{Content, Text};

/// The identity of a full block: the content of its last token, and its index.
type Key = (Content, usize);

pub struct SharedList {
    block_tokens: usize,
    list: Mutex<FreeList>,
}

/// Blocks, numbered from 0 like frames in tables.
struct FreeList {
    block_tokens: usize,
    blocks: usize,
    queue: VecDeque<i32>,
    /// Blocks that were added because none was free.
    added: usize,
    cache: Option<Cache>,
}

#[derive(Default)]
struct Cache {
    cached: HashMap<Key, i32>,
    blocks: Vec<Block>,
}

#[derive(Clone, Default)]
struct Block {
    references: u32,
    /// Stale queue entries, before the last one, of releases that a hit undid.
    stale: u32,
    key: Option<Key>,
}

#[derive(Clone, Default, Debug)]
pub struct Listed {
    pub blocks: Vec<i32>,
    /// Number of full blocks, which the cache has seen.
    full: usize,
}

impl SharedList {
    /// Creates a list of free blocks, with a prefix cache if it `caches`.
    pub fn new(blocks: usize, block_tokens: usize, caches: bool) -> Self {
        Self { block_tokens, list: Mutex::new(FreeList::new(blocks, block_tokens, caches)) }
    }

    /// Grows a sequence to this many tokens. One without blocks begins with the cached part of its
    /// prompt; returns the number of these blocks, otherwise 0.
    pub fn grow(&self, listed: &mut Listed, text: &Text, tokens: usize, prompt_tokens: usize) -> u64 {
        let block_tokens = self.block_tokens;
        if tokens.div_ceil(block_tokens) <= listed.blocks.len() && tokens / block_tokens <= listed.full {
            return 0;
        }
        let mut list = self.lock();
        let is_new = listed.blocks.is_empty();
        let hits = if is_new { list.begin(listed, text, prompt_tokens / block_tokens) } else { 0 };
        list.grow(listed, text, tokens);
        hits as u64
    }

    pub fn free(&self, listed: Listed) {
        self.lock().free(listed);
    }

    /// Returns the number of blocks that were added because none was free.
    ///
    /// The list serves what the pool served, but may find fewer blocks of open sequences.
    pub fn added(&self) -> usize {
        self.lock().added
    }

    fn lock(&self) -> MutexGuard<'_, FreeList> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FreeList {
    fn new(blocks: usize, block_tokens: usize, caches: bool) -> Self {
        let cache = caches.then(|| Cache { blocks: vec![Block::default(); blocks], ..Cache::default() });
        Self { block_tokens, blocks, queue: (0..blocks as i32).collect(), added: 0, cache }
    }

    /// Begins a sequence with the cached ones of the leading `prompt_blocks`; returns their number.
    fn begin(&mut self, listed: &mut Listed, text: &Text, prompt_blocks: usize) -> usize {
        let Some(Cache { cached, blocks }) = &mut self.cache else { return 0 };
        let keys = (0..prompt_blocks).map(|place| key(text, place, self.block_tokens));
        listed.blocks.extend(keys.map_while(|key| cached.get(&key)));
        listed.full = listed.blocks.len();
        for &number in &listed.blocks {
            let block = &mut blocks[number as usize];
            block.stale += u32::from(block.references == 0);
            block.references += 1;
        }
        listed.full
    }

    /// Allocates the blocks for this many tokens, and caches the full ones.
    fn grow(&mut self, listed: &mut Listed, text: &Text, tokens: usize) {
        while listed.blocks.len() < tokens.div_ceil(self.block_tokens) {
            listed.blocks.push(self.allocate());
        }
        let new = listed.full..tokens / self.block_tokens;
        listed.full = new.start.max(new.end);
        let Some(Cache { cached, blocks }) = &mut self.cache else { return };
        for place in new {
            let (key, number) = (key(text, place, self.block_tokens), listed.blocks[place]);
            // Of equal blocks computed concurrently, the first is found.
            if *cached.entry(key).or_insert(number) == number {
                blocks[number as usize].key = Some(key);
            }
        }
    }

    fn free(&mut self, listed: Listed) {
        let freed = listed.blocks.into_iter().rev();
        match &mut self.cache {
            None => self.queue.extend(freed),
            Some(cache) => self.queue.extend(freed.filter(|&number| {
                let block = &mut cache.blocks[number as usize];
                block.references -= 1;
                block.references == 0
            })),
        }
    }

    fn allocate(&mut self) -> i32 {
        while let Some(number) = self.queue.pop_front() {
            if self.cache.as_mut().is_none_or(|cache| cache.take(number)) {
                return number;
            }
        }
        (self.blocks, self.added) = (self.blocks + 1, self.added + 1);
        if let Some(cache) = &mut self.cache {
            cache.blocks.push(Block { references: 1, ..Block::default() });
        }
        self.blocks as i32 - 1
    }
}

impl Cache {
    /// Evicts the block at the front of the queue for a new owner; false if the entry is stale.
    fn take(&mut self, number: i32) -> bool {
        let block = &mut self.blocks[number as usize];
        if block.stale > 0 {
            block.stale -= 1;
            return false;
        }
        block.references = 1;
        block.key.take().map(|key| self.cached.remove(&key));
        true
    }
}

fn key(text: &Text, place: usize, block_tokens: usize) -> Key {
    (text.content((place + 1) * block_tokens - 1), place)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvpool_load::{Request, Texts};
    use std::time::Duration;

    fn texts(ids: &[&[u64]]) -> Vec<Text> {
        let request = |ids: &&[u64]| Request {
            hash_ids: ids.to_vec(),
            hashed_tokens: 4 * ids.len() as u32,
            ..Request::new(Duration::ZERO, 4 * ids.len() as u32, 8)
        };
        let requests: Vec<_> = ids.iter().map(request).collect();
        let texts = Texts::of(&requests, 4);
        (0..).zip(&requests).map(|(index, request)| texts.text(index, request)).collect()
    }

    fn open(list: &mut FreeList, text: &Text, prompt_blocks: usize, tokens: usize) -> (Listed, usize) {
        let mut listed = Listed::default();
        let hits = list.begin(&mut listed, text, prompt_blocks);
        list.grow(&mut listed, text, tokens);
        (listed, hits)
    }

    /// Blocks of four tokens, in a list of six.
    #[test]
    fn the_coldest_block_is_evicted_first_and_a_hit_leaves_the_queue() {
        let texts = texts(&[&[1, 2], &[1, 2, 3], &[7, 8, 9], &[1, 2]]);
        let mut list = FreeList::new(6, 4, true);
        let (first, hits) = open(&mut list, &texts[0], 2, 9);
        assert_eq!((&first.blocks[..], hits), (&[0, 1, 2][..], 0), "two full blocks, and one token");
        list.free(first);
        // The queue is 3 4 5 2 1 0, and the two full blocks are found.
        let (second, hits) = open(&mut list, &texts[1], 3, 12);
        assert_eq!((&second.blocks[..], hits), (&[0, 1, 3][..], 2));
        let (third, hits) = open(&mut list, &texts[2], 3, 12);
        assert_eq!((&third.blocks[..], hits), (&[4, 5, 2][..], 0));
        list.free(second);
        // 3, 1, 0 are free: the list evicts 3 and 1, and only 0 is found.
        let (other, _) = open(&mut list, &texts[2], 0, 8);
        assert_eq!(other.blocks, [3, 1], "equal to those of the third, which stay the cached ones");
        let (fourth, hits) = open(&mut list, &texts[3], 2, 8);
        assert_eq!((&fourth.blocks[..], hits, list.added), (&[0, 6][..], 1, 1), "one more than there are");
        list.free(third);
        assert_eq!(open(&mut list, &texts[2], 3, 12).1, 3);
    }

    #[test]
    fn without_a_cache_blocks_are_used_in_turn() {
        let text = Text::of_attempt(0, 0);
        let mut list = FreeList::new(4, 4, false);
        let (a, _) = open(&mut list, &text, 1, 8);
        let (b, _) = open(&mut list, &text, 1, 4);
        list.free(a);
        let (c, hits) = open(&mut list, &text, 2, 12);
        assert_eq!((&b.blocks[..], &c.blocks[..], hits), (&[2][..], &[3, 1, 0][..], 0));
        let list = SharedList { block_tokens: 4, list: Mutex::new(list) };
        let mut d = c.clone();
        assert_eq!((list.grow(&mut d, &text, 12, 8), list.added()), (0, 0), "it has them");
        list.grow(&mut d, &text, 13, 8);
        assert_eq!((&d.blocks[..], list.added()), (&[3, 1, 0, 4][..], 1));
    }
}
