//! The pool's LRU beside an exact one: the same prompts, looked up and released in the same order, on the conversation trace.
//!
//! The pool's eviction is concurrent and its queue puts itself in order only when it is met, so that equality is not a matter of
//! course. What is compared is the hit rate over the whole trace, at a size of which most blocks are evicted.

mod common;

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::thread;

use kvpool::prefix::PrefixConfig;
use kvpool::prefix::policy::PolicyKind;
use kvpool::storage::{Dtype, KvLayout};
use kvpool::{Pool, SequenceId};
use kvpool_cli::replay::Texts;
use kvpool_cli::trace::{HASH_BLOCK_TOKENS, HashIds, ReadOptions, Request, Trace};

const BLOCK_TOKENS: usize = 16;

/// The deviation that is allowed, of the exact hit rate.
const DEVIATION: f64 = 0.01;

fn conversation_trace() -> Option<Trace> {
    let path = common::published("mooncake_conversation.jsonl")?;
    // Unoptimized, the whole of it takes minutes.
    let limit = cfg!(debug_assertions).then_some(1000);
    let options = ReadOptions { hash_ids: HashIds::Required, limit, ..ReadOptions::default() };
    Some(Trace::load(&path, &options).unwrap())
}

/// What happened to a request.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    LookedUp(u32),
    Released(u32),
}

/// Blocks that were looked up, and those that were hits.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
struct Rate {
    blocks: u64,
    hits: u64,
}

impl Rate {
    fn share(self) -> f64 {
        self.hits as f64 / self.blocks as f64
    }
}

/// Serves the trace on so many threads, each request after the other, with an answer that is nobody else's.
fn served_by_pool(trace: &Trace, capacity: usize, threads: usize) -> (Rate, Vec<Event>) {
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(4).dtype(Dtype::F16);
    let layout = layout.block_tokens(BLOCK_TOKENS).build().unwrap();
    let cache = PrefixConfig::new().policy(PolicyKind::Lru);
    let pool = Pool::builder(layout).blocks(capacity).threads(threads).without_storage().prefix_cache(cache);
    let pool = pool.build().unwrap();
    let texts = Texts::of(&trace.requests);
    let (next, stamps) = (AtomicUsize::new(0), AtomicU64::new(0));
    let stamp = || stamps.fetch_add(1, Relaxed);
    let serve = || {
        let (mut events, mut ids) = (Vec::new(), Vec::new());
        loop {
            let index = next.fetch_add(1, Relaxed);
            let Some(request) = trace.requests.get(index) else { break };
            let (tokens, prompt) = (request.tokens() as usize, request.input_tokens as usize);
            ids.clear();
            texts.text(index as u32, request).ids(tokens, &mut ids);
            events.push((stamp(), Event::LookedUp(index as u32)));
            let mut sequence = pool.sequence(SequenceId(index as u64)).tokens(&ids[..prompt]).unwrap();
            let mut batch = pool.begin_batch();
            let missing = prompt - sequence.len();
            batch.append(&mut sequence, missing).unwrap();
            if tokens > prompt {
                batch.append_tokens(&mut sequence, &ids[prompt..]).unwrap();
            }
            batch.finish();
            events.push((stamp(), Event::Released(index as u32)));
        }
        events
    };
    let mut events = thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|_| scope.spawn(serve)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect::<Vec<_>>()
    });
    events.sort_unstable();
    pool.audit().unwrap();
    let stats = pool.prefix_cache().unwrap().stats();
    assert!(stats.evicted_blocks > stats.registered_blocks / 2, "{stats:?}");
    let rate = Rate { blocks: stats.lookup_blocks, hits: stats.hit_blocks };
    (rate, events.into_iter().map(|(_, event)| event).collect())
}

/// What a block holds, by number: one for each 16 tokens and all before them.
type Content = u32;

/// An answer's: nobody else has it, and nobody looks it up.
const OWN: Content = Content::MAX;

/// Another block holds the same: of no use to anybody else.
const COPY: Content = Content::MAX - 1;

/// Of a content that no block holds.
const NOWHERE: u32 = u32::MAX;

/// A cache that evicts exactly the block that was released longest ago.
struct ExactLru {
    free: usize,
    /// Of each content that is looked up: owners of the block that holds it, and when it was released last.
    blocks: Vec<(u32, u32)>,
    /// In the order of releases; stale where the block was released again, taken, or evicted.
    released: VecDeque<(Content, u32)>,
    now: u32,
}

impl ExactLru {
    fn new(capacity: usize, contents: usize) -> Self {
        Self { free: capacity, blocks: vec![(NOWHERE, 0); contents], released: VecDeque::new(), now: 0 }
    }

    fn has(&self, block: Content) -> bool {
        block != OWN && self.blocks[block as usize].0 != NOWHERE
    }

    /// Takes references on the leading blocks that are there, of the first `most`, and blocks for the others.
    fn look_up(&mut self, blocks: &mut [Content], most: usize) -> u64 {
        let hits = blocks[..most].iter().take_while(|&&block| self.has(block)).count();
        for &block in &blocks[..hits] {
            self.blocks[block as usize].0 += 1;
        }
        for block in &mut blocks[hits..] {
            self.make_room();
            if self.has(*block) {
                *block = COPY;
            } else if *block != OWN {
                self.blocks[*block as usize] = (1, 0);
            }
        }
        hits as u64
    }

    fn make_room(&mut self) {
        while self.free == 0 {
            let (block, at) = self.released.pop_front().expect("a request for each thread fits");
            if block == OWN {
                self.free += 1;
            } else if self.blocks[block as usize] == (0, at) {
                self.blocks[block as usize].0 = NOWHERE;
                self.free += 1;
            }
        }
        self.free -= 1;
    }

    /// The end of the prefix first. Of an answer the blocks that are full are kept too: who knows.
    fn release(&mut self, blocks: &[Content], full: usize) {
        for (place, &block) in blocks.iter().enumerate().rev() {
            self.now += 1;
            if block == COPY || block == OWN && place >= full {
                self.free += 1;
                continue;
            }
            if block != OWN {
                let (owners, at) = &mut self.blocks[block as usize];
                *owners -= 1;
                *at = self.now;
                if *owners > 0 {
                    continue;
                }
            }
            self.released.push_back((block, self.now));
        }
    }
}

/// The blocks of each request, by what they hold, and how many contents there are.
fn contents(trace: &Trace) -> (Vec<Vec<Content>>, usize) {
    const PIECE: usize = HASH_BLOCK_TOKENS as usize / BLOCK_TOKENS;
    // Numbers of texts of whole hash ids, by the text before the last id and that id.
    let mut texts: HashMap<(usize, u64), usize> = HashMap::new();
    let mut of = |request: &Request| {
        let mut text = 0;
        let mut blocks = Vec::new();
        for &hash_id in &request.hash_ids {
            let next = texts.len() + 1;
            text = *texts.entry((text, hash_id)).or_insert(next);
            blocks.extend((text * PIECE..(text + 1) * PIECE).map(|block| block as Content));
        }
        blocks.truncate(request.input_tokens as usize / BLOCK_TOKENS);
        blocks.resize((request.tokens() as usize).div_ceil(BLOCK_TOKENS), OWN);
        blocks
    };
    let blocks = trace.requests.iter().map(&mut of).collect();
    (blocks, (texts.len() + 1) * PIECE)
}

fn served_exactly(trace: &Trace, capacity: usize, events: &[Event]) -> Rate {
    let (mut blocks, contents) = contents(trace);
    let (mut lru, mut rate) = (ExactLru::new(capacity, contents), Rate::default());
    for event in events {
        match *event {
            Event::LookedUp(index) => {
                let prompt = trace.requests[index as usize].input_tokens as usize;
                rate.blocks += (prompt / BLOCK_TOKENS) as u64;
                // The last token of a prompt must be computed.
                rate.hits += lru.look_up(&mut blocks[index as usize], (prompt - 1) / BLOCK_TOKENS);
            }
            Event::Released(index) => {
                let tokens = trace.requests[index as usize].tokens() as usize;
                lru.release(&blocks[index as usize], tokens / BLOCK_TOKENS);
            }
        }
    }
    rate
}

#[test]
fn the_pools_lru_hits_as_often_as_an_exact_one() {
    let Some(trace) = conversation_trace() else { return };
    let shape = |blocks: usize| blocks / if cfg!(debug_assertions) { 8 } else { 1 };
    let capacity = shape(200_000);
    for threads in [1, 2] {
        let (pool, events) = served_by_pool(&trace, capacity, threads);
        let exact = served_exactly(&trace, capacity, &events);
        assert_eq!(pool.blocks, exact.blocks);
        assert!(exact.hits > 0);
        let deviation = pool.share() / exact.share() - 1.0;
        eprintln!(
            "{threads} threads, {capacity} blocks: {:.3} % of blocks hit, exactly {:.3} %: {:+.3} %",
            100.0 * pool.share(),
            100.0 * exact.share(),
            100.0 * deviation
        );
        // While a thread is stopped inside a batch, nothing that was released since is evicted, so that the order is
        // the exact one only between batches. A busy machine stops one of two threads often.
        let allowed = if threads == 1 { DEVIATION } else { 5.0 * DEVIATION };
        assert!(deviation.abs() <= allowed, "{pool:?} beside {exact:?} on {threads} threads");
    }
}
