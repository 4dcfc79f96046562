//! The pool's LRU beside an exact one, on the conversation trace: the same prompts, looked up and
//! released in the same order.
//!
//! The pool's eviction is concurrent and its queues are ordered lazily, so equal hit rates are not
//! a matter of course. The test compares the hit rates over the whole trace, at a capacity at which
//! most blocks are evicted.

use std::collections::{HashMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::thread;

use kvpool::prefix::PrefixConfig;
use kvpool::prefix::policy::PolicyKind;
use kvpool::storage::{Dtype, KvLayout};
use kvpool::{Pool, SequenceId};
use kvpool_cli::trace::{HashIds, ReadOptions, Trace};
use kvpool_load::{HASH_BLOCK_TOKENS, Request, Texts};
use kvpool_testkit::steps::begin_with;

const BLOCK_TOKENS: usize = 16;

/// The allowed deviation from the exact hit rate.
const DEVIATION: f64 = 0.01;

fn conversation_trace() -> Option<Trace> {
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/traces");
    let folder = std::env::var_os("KVPOOL_TRACES").map_or_else(beside, PathBuf::from);
    let path = folder.join("mooncake_conversation.jsonl");
    if !path.is_file() {
        eprintln!("SKIPPED: {} is not there; KVPOOL_TRACES names its directory", path.display());
        return None;
    }
    // The whole trace takes minutes in a build without optimizations.
    let limit = cfg!(debug_assertions).then_some(1000);
    let options = ReadOptions { hash_ids: HashIds::Required, limit, ..ReadOptions::default() };
    Some(Trace::load(&path, &options).unwrap())
}

/// An event of a request.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    LookedUp(u32),
    Released(u32),
}

/// Blocks looked up, and hits.
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

/// Serves the trace on `threads` threads; no two requests share tokens of their answers.
fn served_by_pool(trace: &Trace, capacity: usize, threads: usize) -> (Rate, Vec<Event>) {
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(4).dtype(Dtype::F16);
    let layout = layout.block_tokens(BLOCK_TOKENS).build().unwrap();
    let cache = PrefixConfig::new().policy(PolicyKind::Lru);
    let pool = Pool::builder(layout).blocks(capacity).threads(threads).without_storage().prefix_cache(cache);
    let pool = pool.build().unwrap();
    let texts = Texts::of(&trace.requests, trace.hash_tokens);
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
            let missing = prompt - sequence.len();
            begin_with(&pool, |batch| batch.append(&mut sequence, missing)).0.finish();
            if tokens > prompt {
                begin_with(&pool, |batch| batch.append(&mut sequence, &ids[prompt..])).0.finish();
            }
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

/// The number of a block's content: 16 tokens and all before them.
type Content = u32;

/// The content of an answer: no request looks it up.
const OWN: Content = Content::MAX;

/// A copy of another block's content: never a hit.
const COPY: Content = Content::MAX - 1;

/// Marks a content that no block holds.
const NOWHERE: u32 = u32::MAX;

/// A cache that evicts exactly the least recently released block.
struct ExactLru {
    free: usize,
    /// For each content: owners of the block that holds it, and the time of its last release.
    blocks: Vec<(u32, u32)>,
    /// In the order of releases; stale if the block was released again, taken, or evicted.
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

    /// Takes references on the leading cached blocks, of the first `most`, and allocates the
    /// others.
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

    /// Releases blocks, the end of the prefix first. Full blocks of an answer are cached too.
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

/// Returns the contents of the blocks of each request, and the number of contents.
fn contents(trace: &Trace) -> (Vec<Vec<Content>>, usize) {
    const PIECE: usize = HASH_BLOCK_TOKENS as usize / BLOCK_TOKENS;
    // Numbers of texts of whole hash ids, by the text before the last id, and that id.
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
fn the_pools_lru_has_the_hit_rate_of_an_exact_one() {
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
        // While a thread is descheduled inside a batch, blocks released since are not evicted, so
        // the order is exact only between batches. On a busy machine this happens often.
        let allowed = if threads == 1 { DEVIATION } else { 5.0 * DEVIATION };
        // The capacity is smaller: the pool keeps frames free, ahead of need (at most a 32nd), in
        // holes (at most an eighth), and those that running sequences spare. A sixteenth is enough
        // here.
        let least = served_exactly(&trace, capacity - capacity / 16, &events);
        let lowest = least.share() / exact.share() - 1.0;
        eprintln!("with a sixteenth less room exactly {:+.3} %", 100.0 * lowest);
        assert!(
            (lowest - allowed..=allowed).contains(&deviation),
            "{pool:?} beside {exact:?} and {least:?} on {threads} threads"
        );
    }
}
