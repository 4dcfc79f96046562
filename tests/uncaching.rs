//! Blocks that are taken out of the prefix cache by their hashes, whoever holds them.
#![cfg(not(kvpool_loom))]

use std::collections::{BTreeSet, HashMap};

use kvpool::prefix::{BlockHash, HashKey, KvEvent, KvEvents, PrefixConfig};
use kvpool::storage::{Elements, ElementsMut, KvLayout};
use kvpool::{
    AllocRequest, Appended, Batch, BlockId, Dtype, Pool, Preempt, Sequence, SequenceError, SequenceId, Tokens,
};
use kvpool_testkit::prompts::{BLOCK_TOKENS, admit, pool, pool_of, prompt};
use kvpool_testkit::rng::Rng;
use kvpool_testkit::steps::append;

/// Returns the number of tokens that a request with this prompt would be given.
fn found(pool: &Pool, prompt: &[u32]) -> usize {
    pool.sequence(SequenceId(u64::MAX)).tokens(prompt).unwrap().len()
}

/// Computing the prompt again makes it findable, and every block is there at the end.
fn recovers(pool: &Pool, prompt: &[u32]) {
    drop(admit(pool, u64::MAX, prompt));
    assert_eq!(found(pool, prompt), (prompt.len() - 1) / BLOCK_TOKENS * BLOCK_TOKENS);
    assert_eq!((pool.audit().unwrap().owned, pool.available_blocks()), (0, pool.total_blocks()));
}

#[test]
fn a_block_in_use_is_not_found_any_more() {
    let pool = pool(100);
    let long = prompt(1, 42);
    let (held, _) = admit(&pool, 1, &long);
    let uncached = pool.uncache(held.block_hashes());
    assert_eq!((uncached.evicted_blocks, uncached.kept_blocks), (0, 10));
    assert_eq!((found(&pool, &long), held.len()), (0, 42));
    assert_eq!(pool.prefix_cache().unwrap().stats().uncached_blocks, 10);
    let again = pool.uncache(held.block_hashes());
    assert_eq!((again.evicted_blocks, again.kept_blocks), (0, 0), "they are not cached");
    drop(held);
    assert_eq!((found(&pool, &long), pool.free_blocks()), (0, 100));
    recovers(&pool, &long);
}

/// A batch is about to register the block, or the sequence is, after several batches.
#[test]
fn a_block_that_is_registered_later_is_not_found() {
    for kind in 0..4 {
        let pool = pool(100);
        let long = prompt(1, 42);
        let mut sequence = pool.sequence(SequenceId(1)).tokens(&long).unwrap();
        let other = pool.begin_batch();
        let mut batch = pool.begin_batch();
        let mut second: Option<Batch> = None;
        match kind {
            0 => drop(batch.append(&mut sequence, 42).unwrap()),
            1 => {
                // Two writers of one block, in flight together.
                batch.append(&mut sequence, 6).unwrap();
                let mut later = pool.begin_batch();
                later.append(&mut sequence, 36).unwrap();
                second = Some(later);
            }
            2 => drop(batch.append(&mut sequence, Tokens::Draft(42)).unwrap()),
            _ => drop(batch.append(&mut sequence, 6).unwrap()),
        }
        let hashes = sequence.block_hashes().to_vec();
        assert_eq!(hashes.len(), 10);
        let uncached = pool.uncache(&hashes);
        assert_eq!((uncached.evicted_blocks, uncached.kept_blocks), (0, 0));
        if kind == 3 {
            // Half of the second block was written before.
            batch.append(&mut sequence, 36).unwrap();
        }
        second.into_iter().for_each(Batch::finish);
        drop(other);
        batch.finish();
        sequence.commit(42).unwrap();
        assert_eq!(found(&pool, &long), 0, "{kind}");
        drop(sequence);
        assert_eq!(found(&pool, &long), 0, "{kind}");
        recovers(&pool, &long);
    }
}

/// Tokens that are appended after the call are new, whatever the sequence was opened for before.
#[test]
fn what_is_computed_after_the_call_is_found() {
    let pool = pool(100);
    let long = prompt(1, 42);
    let mut sequence = pool.sequence(SequenceId(1)).tokens(&long).unwrap();
    pool.uncache(sequence.block_hashes());
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, 20).unwrap();
    pool.uncache(&sequence.block_hashes()[5..]);
    batch.append(&mut sequence, 22).unwrap();
    batch.finish();
    drop(sequence);
    recovers(&pool, &long);
    assert_eq!(found(&pool, &long), 40);
}

#[test]
fn the_unfinished_last_block_is_not_found() {
    let pool = pool(100);
    let short = prompt(1, 10);
    let mut sequence = pool.sequence(SequenceId(1)).reuse_tail().tokens(&short).unwrap();
    append(&pool, &mut sequence, 10);
    pool.uncache(&sequence.block_hashes()[1..]);
    drop(sequence);
    let found = pool.sequence(SequenceId(2)).reuse_tail().tokens(&prompt(1, 12)).unwrap();
    assert_eq!(found.len(), 4);
}

#[test]
fn every_block_of_the_hash_is_uncached() {
    let pool = pool(100);
    let long = prompt(1, 42);
    let open = |id: u64| pool.sequence(SequenceId(id)).tokens(&long).unwrap();
    let mut sequences = [open(1), open(2), open(3)];
    let mut batch = pool.begin_batch();
    for sequence in &mut sequences {
        batch.append(sequence, 42).unwrap();
    }
    batch.finish();
    let hashes = sequences[0].block_hashes().to_vec();
    let [one, two, three] = sequences;
    drop(one);
    assert_eq!(pool.stats().evictable, 10);
    let free = pool.free_blocks();
    let uncached = pool.uncache(&[&hashes[..], &hashes[..]].concat());
    assert_eq!((uncached.evicted_blocks, uncached.kept_blocks), (10, 20));
    assert_eq!((found(&pool, &long), pool.free_blocks()), (0, free + 10));
    drop((two, three));
    recovers(&pool, &long);
}

/// The most references that a block can have leave no room for one of the call's own.
#[test]
fn a_block_with_the_most_references_is_uncached() {
    let pool = pool(4);
    let (one, _) = admit(&pool, 0, &prompt(1, 4));
    let mut forks = Vec::new();
    let full = loop {
        match one.fork(SequenceId(1 + forks.len() as u64)) {
            Ok(fork) => forks.push(fork),
            Err(error) => break error,
        }
    };
    assert!(forks.len() > 1_000, "{full}");
    assert_eq!(pool.uncache(one.block_hashes()).kept_blocks, 1);
    forks.pop();
    assert_eq!(found(&pool, &prompt(1, 5)), 0);
    drop((one, forks));
    recovers(&pool, &prompt(1, 5));
}

#[tokio::test]
async fn a_block_that_was_moved_or_swapped_is_not_found() {
    let same_key = || pool_of(100, PrefixConfig::new().key(HashKey::from_bytes([7; 32])));
    let [pool, host] = [same_key(), same_key()];
    let long = prompt(1, 42);
    let fill: Vec<_> = (0..40).map(|_| pool.allocate(AllocRequest::new(1)).unwrap()).collect();
    let (held, _) = admit(&pool, 1, &long);
    pool.uncache(held.block_hashes());
    drop(fill);
    pool.defragment().await.unwrap();
    assert_eq!(found(&pool, &long), 0);
    drop(held);
    recovers(&pool, &long);
    let (held, _) = admit(&pool, 1, &long);
    pool.uncache(&held.block_hashes()[..1]);
    let swapped = pool.preempt(held, Preempt::Swap(&host)).await.unwrap().swapped.unwrap();
    drop(swapped.sequence);
    assert_eq!(found(&host, &long), 0);
}

/// The bytes of an import were read before the call.
#[test]
fn what_arrives_is_not_found() {
    let (pool, long) = (pool(20), prompt(1, 9));
    let (sequence, _) = admit(&pool, 1, &long);
    let hashes = sequence.block_hashes().to_vec();
    let export = pool.export_prefix(&hashes).unwrap();
    let bytes: Vec<Vec<u8>> = (0..2).map(|place| export.packed(place).unwrap()).collect();
    drop((export, sequence));
    pool.evict_cached(0);
    let mut import = pool.import_prefix(0, &hashes).unwrap();
    import.write(0, None, &bytes[0]).unwrap();
    pool.uncache(&hashes[..1]);
    import.write(1, None, &bytes[1]).unwrap();
    drop(import.commit().unwrap());
    assert_eq!((found(&pool, &long), pool.has_cached(&hashes)), (0, vec![false, true]));
    pool.audit().unwrap();
}

/// The hashes of old calls are dropped: what was written before them is not found.
#[test]
fn old_calls_are_remembered_in_part() {
    let pool = pool(100);
    let long = prompt(1, 42);
    let mut sequence = pool.sequence(SequenceId(1)).tokens(&long).unwrap();
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, 42).unwrap();
    pool.uncache(sequence.block_hashes());
    let others: Vec<BlockHash> = (0..1 << 16).map(|n| BlockHash::new(n, n as u64)).collect();
    pool.uncache(&others);
    batch.finish();
    drop(sequence);
    assert_eq!(found(&pool, &long), 0);
    recovers(&pool, &long);
}

/// What a subscriber believes to be cached.
struct Follower {
    events: KvEvents,
    stored: BTreeSet<(BlockId, BlockHash)>,
}

impl Follower {
    fn new(pool: &Pool) -> Self {
        let events = pool.prefix_cache().unwrap().events().subscribe().unwrap();
        Self { events, stored: BTreeSet::new() }
    }

    fn check(&mut self, pool: &Pool) {
        while let Some(event) = self.events.try_recv() {
            match event.event {
                KvEvent::Stored { block, hash, .. } => assert!(self.stored.insert((block, hash)), "twice"),
                KvEvent::Removed { block, hash, .. } => {
                    assert!(self.stored.remove(&(block, hash)), "{block} was not there");
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(self.stored, pool.cached_blocks().into_iter().collect());
    }
}

#[test]
fn each_subscriber_is_told_once() {
    let pool = pool(100);
    let mut followers = [Follower::new(&pool), Follower::new(&pool)];
    let long = prompt(1, 42);
    let (held, _) = admit(&pool, 1, &long);
    followers.iter_mut().for_each(|follower| follower.check(&pool));
    pool.uncache(&held.block_hashes()[3..7]);
    assert_eq!(pool.cached_blocks().len(), 6);
    followers.iter_mut().for_each(|follower| follower.check(&pool));
    let mut late = pool.sequence(SequenceId(2)).tokens(&prompt(2, 42)).unwrap();
    let mut batch = pool.begin_batch();
    batch.append(&mut late, 42).unwrap();
    pool.uncache(&late.block_hashes()[3..7]);
    batch.finish();
    followers.iter_mut().for_each(|follower| follower.check(&pool));
    drop((held, late));
    pool.evict_cached(0);
    followers.iter_mut().for_each(|follower| follower.check(&pool));
}

/// Kept tokens are those that a sequence finds again.
#[tokio::test]
async fn tokens_that_are_not_found_are_lost() {
    let (pool, long) = (pool(100), prompt(1, 42));
    for clears in [false, true] {
        let (held, _) = admit(&pool, 1, &long);
        if clears {
            pool.clear_prefix_cache();
        } else {
            pool.uncache(&held.block_hashes()[2..]);
        }
        let preempted = pool.preempt(held, Preempt::Recompute).await.unwrap();
        assert_eq!(preempted.tokens_kept, if clears { 0 } else { 8 });
    }
}

/// Sequences whose tokens hold the time at which they were written.
struct Timed {
    pool: Pool,
    now: u32,
    open: Vec<Sequence>,
    batches: Vec<Batch>,
    /// When each hash was uncached last.
    uncached: HashMap<BlockHash, u32>,
    ids: u64,
}

impl Timed {
    fn new(block_tokens: usize) -> Self {
        let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(1).dtype(Dtype::F32);
        let layout = layout.block_tokens(block_tokens).build().unwrap();
        let pool = Pool::builder(layout).blocks(60).threads(1).prefix_cache(PrefixConfig::new());
        let pool = pool.build().unwrap();
        Self { pool, now: 1, open: Vec::new(), batches: Vec::new(), uncached: HashMap::new(), ids: 0 }
    }

    fn block_tokens(&self) -> usize {
        self.pool.layout().block_tokens()
    }

    fn open(&mut self, prompt: &[u32]) {
        self.ids += 1;
        let Ok(mut sequence) = self.pool.sequence(SequenceId(self.ids)).tokens(prompt) else { return };
        self.check(&sequence, "found");
        let missing = prompt.len() - sequence.len();
        if self.write(&mut sequence, |batch, sequence| batch.append(sequence, missing)) {
            self.open.push(sequence);
        }
    }

    /// Every block of a hash was written after the hash was uncached.
    fn check(&mut self, sequence: &Sequence, what: &str) {
        let block_tokens = self.block_tokens();
        let whole = sequence.len() / block_tokens;
        let (mut k, mut v) = (vec![0.0_f32; sequence.len()], vec![0.0_f32; sequence.len()]);
        let into: (ElementsMut<'_>, ElementsMut<'_>) = (k.as_mut_slice().into(), v.as_mut_slice().into());
        self.pool.begin_batch().load(sequence, 0, 0..sequence.len(), into.0, into.1).unwrap();
        for (place, hash) in sequence.block_hashes().iter().enumerate().take(whole) {
            let oldest =
                k[place * block_tokens..(place + 1) * block_tokens].iter().copied().fold(f32::MAX, f32::min);
            if let Some(&uncached) = self.uncached.get(hash) {
                assert!(
                    oldest > uncached as f32,
                    "{what}: block {place} of {oldest}, uncached at {uncached}"
                );
            }
        }
    }

    fn write(
        &mut self,
        sequence: &mut Sequence,
        append: impl FnOnce(&mut Batch, &mut Sequence) -> Result<Appended, SequenceError>,
    ) -> bool {
        if self.batches.is_empty() {
            self.batches.push(self.pool.begin_batch());
        }
        let at = self.now as usize % self.batches.len();
        let batch = &mut self.batches[at];
        let Ok(appended) = append(batch, sequence) else { return false };
        let row = vec![self.now as f32; appended.tokens.len()];
        let (k, v): (Elements<'_>, Elements<'_>) = ((&row).into(), (&row).into());
        batch.store(sequence, 0, appended.tokens, k, v).unwrap();
        true
    }

    fn step(&mut self, rng: &mut Rng) {
        self.now += 1;
        let of = |rng: &mut Rng, len: usize| (len > 0).then(|| rng.below(len.max(1)));
        let tokens = |rng: &mut Rng, most: usize| -> Vec<u32> {
            (0..1 + rng.below(most)).map(|_| (rng.below(8) == 0).into()).collect()
        };
        let most = 4 * self.block_tokens();
        match rng.below(16) {
            0..4 => {
                let prompt = tokens(rng, most);
                self.open(&prompt);
            }
            4..6 => {
                let Some(at) = of(rng, self.open.len()) else { return };
                let mut sequence = self.open.swap_remove(at);
                let (tokens, is_draft) = (tokens(rng, most), rng.below(4) == 0);
                self.write(&mut sequence, |batch, sequence| {
                    if is_draft {
                        batch.append(sequence, Tokens::Draft(tokens.len()))
                    } else {
                        batch.append(sequence, &tokens)
                    }
                });
                if is_draft && rng.below(2) == 0 {
                    let _ = sequence.announce(&tokens);
                    let length = sequence.len();
                    sequence.commit(length).unwrap();
                }
                self.open.push(sequence);
            }
            6..8 => {
                let Some(at) = of(rng, self.open.len()) else { return };
                let length = rng.below(self.open[at].len() + 1);
                self.open[at].truncate(length).unwrap();
            }
            8 => {
                let Some(at) = of(rng, self.open.len()) else { return };
                self.ids += 1;
                let fork = self.open[at].fork(SequenceId(self.ids)).unwrap();
                self.open.push(fork);
            }
            9..11 => {
                let Some(at) = of(rng, self.open.len()) else { return };
                drop(self.open.swap_remove(at));
            }
            11 => self.batches.push(self.pool.begin_batch()),
            12..14 => {
                let Some(at) = of(rng, self.batches.len()) else { return };
                self.batches.swap_remove(at).finish();
            }
            _ => {
                let mut hashes: Vec<BlockHash> =
                    self.pool.cached_blocks().into_iter().map(|(_, hash)| hash).collect();
                hashes.extend(self.open.iter().flat_map(|sequence| sequence.block_hashes()));
                hashes.retain(|_| rng.below(6) == 0);
                self.pool.uncache(&hashes);
                assert!(!self.pool.has_cached(&hashes).contains(&true));
                self.uncached.extend(hashes.into_iter().map(|hash| (hash, self.now)));
            }
        }
    }
}

/// Random sequences that share prompts, with batches in flight: what a lookup returns was written
/// after its hash was uncached last.
#[test]
fn what_is_found_was_written_after_the_call() {
    let (mut hits, mut calls) = (0, 0);
    for seed in 0..400 {
        let mut timed = Timed::new([1, 2, 3, 16][seed as usize % 4]);
        let mut rng = Rng(seed);
        for _ in 0..150 {
            timed.step(&mut rng);
        }
        let stats = timed.pool.prefix_cache().unwrap().stats();
        (hits, calls) = (hits + stats.hit_blocks, calls + stats.uncached_blocks);
        timed.batches.clear();
        timed.open.clear();
        let report = timed.pool.audit().unwrap();
        assert_eq!((report.owned, timed.pool.available_blocks()), (0, 60), "seed {seed}");
    }
    assert!(hits > 1_000 && calls > 1_000, "{hits} hits, {calls} blocks uncached");
}
