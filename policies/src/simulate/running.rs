//! A pool whose requests run: each holds its blocks from its start to its end.
//!
//! ```text
//! arrival   waits behind earlier requests until the blocks that it lacks are free or evictable
//! start     looks up its prompt and takes the hits; evicts what the rest and its answer need
//! filled    the rest of its prompt can be found from here; a block that another request filled
//!           meanwhile is a duplicate, and is freed at the end
//! end       its answer can be found from here; releases all blocks, the last one first
//! ```
//!
//! The blocks of running requests cannot be evicted, and take room from the cache. So hit rates are
//! lower than those of [requests that take no time](super::cache::hits), and a pool can reach them.
//! A request takes the blocks of its answer at its start and is never preempted; a pool adds them
//! one by one.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use kvpool::prefix::policy::Millis;

use super::cache::Cache;
use super::leading;
use super::prompts::{Prompt, Prompts};
use crate::evictable::Position;

/// The life of a block.
#[derive(Clone, Copy, Default)]
struct Block {
    is_cached: bool,
    owners: u32,
}

/// A running request.
struct Running {
    /// Whether each of its blocks is cached, and not a duplicate.
    is_shared: Vec<bool>,
    /// Its blocks that were hits.
    found: usize,
    context: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Filled,
    Ended,
}

struct Pool<'a, C> {
    prompts: &'a [Prompt],
    cache: C,
    blocks: Vec<Block>,
    free: usize,
    running: Vec<Option<Running>>,
    events: BinaryHeap<Reverse<(u64, Event, u32)>>,
    hits: usize,
}

/// Returns the hits in a pool of `capacity` blocks.
pub(super) fn hits(prompts: &Prompts, capacity: usize, cache: impl Cache) -> usize {
    Pool::new(prompts, capacity, cache).run(capacity)
}

impl<'a, C: Cache> Pool<'a, C> {
    fn new(prompts: &'a Prompts, capacity: usize, cache: C) -> Self {
        Self {
            prompts: &prompts.prompts,
            cache,
            blocks: vec![Block::default(); prompts.numbers()],
            free: capacity,
            running: prompts.prompts.iter().map(|_| None).collect(),
            events: BinaryHeap::new(),
            hits: 0,
        }
    }

    fn run(mut self, capacity: usize) -> usize {
        let fits = |&(_, prompt): &(u32, &Prompt)| prompt.blocks.len() + prompt.answer.len() <= capacity;
        let mut arrivals = (0..).zip(self.prompts).filter(fits).peekable();
        let mut waiting = VecDeque::new();
        loop {
            let arrival = arrivals.peek().map(|(_, prompt)| prompt.at_ms);
            let event = self.events.peek().map(|Reverse((at_ms, ..))| *at_ms);
            let now = match (arrival, event) {
                (None, None) => break,
                (Some(arrival), Some(event)) => arrival.min(event),
                (at_ms, None) | (None, at_ms) => at_ms.unwrap_or_default(),
            };
            while let Some(&Reverse((at_ms, event, request))) = self.events.peek()
                && at_ms <= now
            {
                self.events.pop();
                match event {
                    Event::Filled => self.fill(request),
                    Event::Ended => self.end(request, Millis(now)),
                }
            }
            while let Some((request, _)) = arrivals.next_if(|(_, prompt)| prompt.at_ms <= now) {
                waiting.push_back(request);
            }
            while let Some(&request) = waiting.front()
                && self.start(request, now)
            {
                waiting.pop_front();
            }
        }
        self.hits
    }

    /// Starts a request, unless it lacks blocks.
    fn start(&mut self, request: u32, now: u64) -> bool {
        let prompt = &self.prompts[request as usize];
        let found = leading(&prompt.blocks, |block| self.blocks[block].is_cached);
        let missing = prompt.blocks.len() + prompt.answer.len() - found;
        let (hits, rest) = prompt.blocks.split_at(found);
        let evictable = hits.iter().filter(|&&block| self.blocks[block as usize].owners == 0).count();
        if missing > self.free + self.cache.len() - evictable {
            return false;
        }
        self.hits += found;
        let context = self.cache.looked_up(request, &prompt.blocks, found, Millis(now));
        for &number in hits {
            let block = &mut self.blocks[number as usize];
            if block.owners == 0 {
                self.cache.remove(number);
            }
            block.owners += 1;
            self.cache.hit(number);
        }
        while self.free < missing {
            let block = self.cache.evict(Millis(now)).expect("enough blocks are evictable");
            self.blocks[block as usize].is_cached = false;
            self.free += 1;
        }
        self.free -= missing;
        let mut is_shared = vec![false; prompt.blocks.len() + prompt.answer.len()];
        is_shared[..found].fill(true);
        self.running[request as usize] = Some(Running { is_shared, found, context });
        let computed = prompt.prompt_ms * rest.len() as u64 / prompt.blocks.len().max(1) as u64;
        self.events.push(Reverse((now + computed, Event::Filled, request)));
        self.events.push(Reverse((now + computed + prompt.answer_ms, Event::Ended, request)));
        true
    }

    /// Makes the computed part of a prompt visible.
    fn fill(&mut self, request: u32) {
        let prompt = &self.prompts[request as usize];
        let running = self.running[request as usize].as_mut().expect("it runs");
        let computed = prompt.blocks.iter().zip(&mut running.is_shared).skip(running.found);
        computed.for_each(|(&block, is_shared)| *is_shared = share(&mut self.blocks, &mut self.cache, block));
    }

    /// Releases the blocks of a request.
    fn end(&mut self, request: u32, now: Millis) {
        let prompt = &self.prompts[request as usize];
        let Running { mut is_shared, context, .. } = self.running[request as usize].take().expect("it runs");
        let (_, of_answer) = is_shared.split_at_mut(prompt.blocks.len());
        for (&block, is_shared) in prompt.answer.iter().zip(of_answer) {
            *is_shared = share(&mut self.blocks, &mut self.cache, block);
        }
        let chain = is_shared.len() as u32;
        let blocks = prompt.blocks.iter().chain(&prompt.answer);
        for ((&number, is_shared), depth) in
            blocks.zip(is_shared).zip(0..).collect::<Vec<_>>().into_iter().rev()
        {
            let block = &mut self.blocks[number as usize];
            if !is_shared {
                self.free += 1;
                continue;
            }
            block.owners -= 1;
            if block.owners == 0 {
                self.cache.file(number, Position { depth, chain, context }, now);
            }
        }
    }
}

/// Makes a block visible that its owner filled; false if another one is.
fn share<C: Cache>(blocks: &mut [Block], cache: &mut C, number: u32) -> bool {
    let block = &mut blocks[number as usize];
    let is_first = !block.is_cached;
    if is_first {
        *block = Block { is_cached: true, owners: 1 };
        cache.filled(number);
    }
    is_first
}
