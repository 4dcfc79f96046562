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
//! Requests arrive at their times, or in a *closed loop*: a number of sessions run at a time, the
//! next request of a session arrives when its think time after the end of the last one is over, and
//! where a session ends, the next one begins.
//!
//! The blocks of running requests cannot be evicted, and take room from the cache. So hit rates are
//! lower than those of [requests that take no time](super::cache::hits), and a pool can reach them.
//! A request takes the blocks of its answer at its start and is never preempted; a pool adds them
//! one by one. Requests larger than the pool are served elsewhere.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use kvpool::prefix::policy::Millis;

use super::cache::Cache;
use super::leading;
use super::prompts::{Prompt, Prompts};
use super::turns::Turns;
use crate::evictable::Position;

/// The life of a block.
#[derive(Clone, Copy, Default)]
struct Block {
    is_cached: bool,
    was_filled: bool,
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
    ServedElsewhere,
    Arrived,
}

/// What becomes of the blocks of prompts.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Counts {
    pub hits: usize,
    /// Blocks that were computed before, and not found.
    pub recomputed: usize,
}

/// Sessions in a closed loop.
#[derive(Clone, Copy)]
pub(super) struct Loop {
    pub at_a_time: usize,
    /// The order of sessions.
    pub order: u64,
    /// Whether the cache is told when a session returns, and whether it is over.
    pub tells_returns: bool,
    pub tells_ends: bool,
}

struct Pool<'a, C> {
    prompts: &'a [Prompt],
    cache: C,
    blocks: Vec<Block>,
    capacity: usize,
    free: usize,
    running: Vec<Option<Running>>,
    events: BinaryHeap<Reverse<(u64, Event, u32)>>,
    /// In a closed loop: the order of requests, and the first ones of sessions that have not begun.
    turns: Option<(Loop, Turns, VecDeque<u32>)>,
    counts: Counts,
}

/// Returns the counts in a pool of `capacity` blocks.
pub(super) fn counts(
    prompts: &Prompts,
    capacity: usize,
    sessions: Option<Loop>,
    cache: impl Cache,
) -> Counts {
    let mut pool = Pool {
        prompts: &prompts.prompts,
        cache,
        blocks: vec![Block::default(); prompts.numbers()],
        capacity,
        free: capacity,
        running: prompts.prompts.iter().map(|_| None).collect(),
        events: BinaryHeap::new(),
        turns: sessions.map(|sessions| {
            let turns = prompts.turns();
            let starts = turns.starts(sessions.order).into();
            (sessions, turns, starts)
        }),
        counts: Counts::default(),
    };
    match sessions {
        None => {
            let arrivals = prompts.prompts.iter().zip(0..);
            pool.events
                .extend(arrivals.map(|(prompt, request)| Reverse((prompt.at_ms, Event::Arrived, request))));
        }
        Some(sessions) => (0..sessions.at_a_time).for_each(|_| pool.begin_session(0)),
    }
    pool.run();
    pool.counts
}

impl<C: Cache> Pool<'_, C> {
    fn begin_session(&mut self, now: u64) {
        let start = self.turns.as_mut().and_then(|(.., starts)| starts.pop_front());
        self.events.extend(start.map(|request| Reverse((now, Event::Arrived, request))));
    }

    fn run(&mut self) {
        let mut waiting = VecDeque::new();
        while let Some(&Reverse((now, ..))) = self.events.peek() {
            while let Some(&Reverse((at_ms, event, request))) = self.events.peek()
                && at_ms <= now
            {
                self.events.pop();
                let prompt = &self.prompts[request as usize];
                match event {
                    Event::Filled => self.fill(request),
                    Event::Ended => self.end(request, now),
                    Event::ServedElsewhere => self.go_on(request, now),
                    Event::Arrived if prompt.blocks.len() + prompt.answer.len() > self.capacity => {
                        let at_ms = now + prompt.prompt_ms + prompt.answer_ms;
                        self.events.push(Reverse((at_ms, Event::ServedElsewhere, request)));
                    }
                    Event::Arrived => waiting.push_back(request),
                }
            }
            while let Some(&request) = waiting.front()
                && self.start(request, now)
            {
                waiting.pop_front();
            }
        }
    }

    /// Sends the requests that wait for the end of this one.
    fn go_on(&mut self, request: u32, now: u64) {
        let Some((_, turns, _)) = &mut self.turns else { return };
        let arrive = |at_ms, request| self.events.push(Reverse((at_ms, Event::Arrived, request)));
        if turns.ended(request, now, arrive) {
            self.begin_session(now);
        }
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
        self.counts.hits += found;
        self.counts.recomputed +=
            rest.iter().filter(|&&block| self.blocks[block as usize].was_filled).count();
        let session = prompt.turn.map(|turn| turn.session);
        let context = self.cache.looked_up(request, session, &prompt.blocks, found, Millis(now));
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
    fn end(&mut self, request: u32, now: u64) {
        let prompt = &self.prompts[request as usize];
        let Running { mut is_shared, context, .. } = self.running[request as usize].take().expect("it runs");
        let (_, of_answer) = is_shared.split_at_mut(prompt.blocks.len());
        for (&block, is_shared) in prompt.answer.iter().zip(of_answer) {
            *is_shared = share(&mut self.blocks, &mut self.cache, block);
        }
        let (chain, mut session, mut returns_at) = (is_shared.len() as u32, None, None);
        if let Some((sessions, turns, _)) = &self.turns {
            session = turns.session(request);
            returns_at = turns.returns_at(request, now).filter(|&Millis(at)| {
                if at == u64::MAX { sessions.tells_ends } else { sessions.tells_returns }
            });
        }
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
                let at = Position { depth, chain, context, session, returns_at };
                self.cache.file(number, at, Millis(now));
            }
        }
        self.go_on(request, now);
    }
}

/// Makes a block visible that its owner filled; false if another one is.
fn share<C: Cache>(blocks: &mut [Block], cache: &mut C, number: u32) -> bool {
    let block = &mut blocks[number as usize];
    let is_first = !block.is_cached;
    if is_first {
        *block = Block { is_cached: true, was_filled: true, owners: 1 };
        cache.filled(number);
    }
    is_first
}
