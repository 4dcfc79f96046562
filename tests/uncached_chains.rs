//! Blocks that were computed from an uncached one: not found, unless they were cached at that time.
#![cfg(not(any(kvpool_loom, miri)))]

use std::collections::{HashMap, HashSet};

use kvpool::prefix::{BlockHash, PrefixConfig};
use kvpool::storage::{Elements, ElementsMut};
use kvpool::{
    AdmitRequest, Appended, Batch, BlockId, Dtype, KvLayout, Pool, Sequence, SequenceError, SequenceId,
    Tokens,
};
use kvpool_testkit::prompts::{admit, pool as cached_pool, prompt};
use kvpool_testkit::rng::Rng;

/// The third block is uncached while the batch is in flight that fills the others, or the rest.
#[test]
fn a_batch_in_flight_registers_nothing_behind_it() {
    for begun in [0, 20] {
        for closes in [false, true] {
            let (pool, long) = (cached_pool(100), prompt(1, 42));
            let mut sequence = pool.sequence(SequenceId(1)).tokens(&long).unwrap();
            if begun > 0 {
                let mut batch = pool.begin_batch();
                batch.append(&mut sequence, Tokens::Announced(begun)).unwrap();
                batch.finish();
            }
            let mut batch = pool.begin_batch();
            batch.append(&mut sequence, Tokens::Announced(42 - begun)).unwrap();
            let hashes = sequence.block_hashes().to_vec();
            pool.uncache(&hashes[2..3]);
            let sequence = if closes { None } else { Some(sequence) };
            batch.finish();
            let first_new = begun / 4;
            assert!(!pool.has_cached(&hashes[first_new.max(2)..]).contains(&true), "from {begun}, {closes}");
            drop(sequence);
            assert!(!pool.has_cached(&hashes[first_new.max(2)..]).contains(&true), "from {begun}, {closes}");
            // Computed again, they are found.
            drop(admit(&pool, 2, &long));
            assert_eq!(pool.sequence(SequenceId(3)).tokens(&long).unwrap().len(), 40);
            pool.audit().unwrap();
        }
    }
}

/// A sequence in the same batch that holds no wrong block is found, at the latest when it is closed.
#[test]
fn other_sequences_of_the_batch_are_found() {
    for closes_first in [false, true] {
        let (pool, wrong, right) = (cached_pool(100), prompt(1, 42), prompt(2, 42));
        let mut first = pool.sequence(SequenceId(1)).tokens(&wrong).unwrap();
        let mut second = pool.sequence(SequenceId(2)).tokens(&right).unwrap();
        let mut batch = pool.begin_batch();
        batch.append(&mut first, 42).unwrap();
        batch.append(&mut second, 42).unwrap();
        pool.uncache(&first.block_hashes()[2..3]);
        // What is promised after the call is registered at once.
        let mut third = pool.sequence(SequenceId(3)).tokens(&prompt(3, 42)).unwrap();
        batch.append(&mut third, 42).unwrap();
        if closes_first {
            drop(second);
            batch.finish();
        } else {
            batch.finish();
            let mut batch = pool.begin_batch();
            batch.append(&mut second, &[7; 20]).unwrap();
            batch.finish();
            drop(second);
        }
        assert!(!pool.has_cached(third.block_hashes()).contains(&false));
        drop((first, third));
        let found = |prompt: &[u32]| pool.sequence(SequenceId(9)).tokens(prompt).unwrap().len();
        assert_eq!((found(&wrong), found(&right)), (0, 40));
        pool.audit().unwrap();
    }
}

/// As a sequence of one list, one of several groups registers what its batch left out when it is
/// closed, whether or not its last blocks are full.
#[test]
fn a_sequence_of_several_groups_registers_what_a_batch_left_out() {
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(1).block_tokens(4).build().unwrap();
    let builder = Pool::builder(layout).blocks(200).without_storage().threads(1);
    let pool = builder.prefix_cache(PrefixConfig::new()).groups([None, None]).build().unwrap();
    for tokens in [10, 12, 13] {
        let all: Vec<u32> = (0..14).map(|token| token + 100 * tokens).collect();
        let request = AdmitRequest::new(SequenceId(1), &all);
        let mut sequence = pool.admit_grouped(&request).unwrap();
        let mut batch = pool.begin_batch();
        batch.append_grouped(&mut sequence, Tokens::Announced(tokens as usize)).unwrap();
        pool.uncache(&[BlockHash::new(7, 7)]);
        batch.finish();
        drop(sequence);
        let again = pool.admit_grouped(&request).unwrap();
        assert_eq!(again.len(), tokens as usize / 4 * 4, "{tokens} tokens");
    }
    pool.audit().unwrap();
}

/// A wrong block of one group: no group caches what the batch in flight computes.
#[test]
fn a_batch_in_flight_of_several_groups() {
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(1).block_tokens(4).build().unwrap();
    let builder = Pool::builder(layout).blocks(200).without_storage().threads(1);
    let pool = builder.prefix_cache(PrefixConfig::new()).groups([None, None]).build().unwrap();
    let all: Vec<u32> = (0..80).collect();
    for way in 0..4 {
        let prompt: Vec<u32> = [way].into_iter().chain(0..39).collect();
        let mut sequence = pool.admit_grouped(&AdmitRequest::new(SequenceId(1), &prompt)).unwrap();
        let mut batch = pool.begin_batch();
        batch.append_grouped(&mut sequence, Tokens::Announced(40)).unwrap();
        let hashes = [0, 1].map(|group| sequence.group(group).block_hashes().to_vec());
        let mut sequence = Some(sequence);
        if way == 1 {
            sequence = None;
        }
        pool.uncache(&hashes[1][3..4]);
        if way == 2 {
            sequence = None;
        }
        batch.finish();
        if way == 3 {
            let mut batch = pool.begin_batch();
            batch.append_grouped(sequence.as_mut().unwrap(), &all[..12]).unwrap();
            batch.finish();
        }
        drop(sequence);
        for group in &hashes {
            assert!(!pool.has_cached(&group[4..]).contains(&true), "way {way}");
        }
        let again = pool.admit_grouped(&AdmitRequest::new(SequenceId(2), &prompt)).unwrap();
        assert!(again.len() <= 12, "way {way}: {}", again.len());
    }
    pool.audit().unwrap();
    assert_eq!(pool.stats().used, 0);
}

/// When an ancestor of a token's block was written: its hash, and the time of its oldest token.
type Ancestor = (BlockHash, u32);

/// Sequences whose tokens hold the time at which they were written, and what they were computed from.
struct Computed {
    pool: Pool,
    now: u32,
    open: Vec<Sequence>,
    batches: Vec<Batch>,
    /// By the number that a token holds.
    from: Vec<Vec<Ancestor>>,
    uncached: HashMap<BlockHash, u32>,
    /// Blocks that were cached at the time of a call.
    cached: HashSet<(u32, BlockId, BlockHash)>,
    ids: u64,
    hits: usize,
}

impl Computed {
    fn new(block_tokens: usize) -> Self {
        let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(1).dtype(Dtype::F32);
        let layout = layout.block_tokens(block_tokens).build().unwrap();
        let pool = Pool::builder(layout).blocks(80).threads(1).prefix_cache(PrefixConfig::new());
        Self {
            pool: pool.build().unwrap(),
            now: 1,
            open: Vec::new(),
            batches: Vec::new(),
            from: Vec::new(),
            uncached: HashMap::new(),
            cached: HashSet::new(),
            ids: 0,
            hits: 0,
        }
    }

    fn block_tokens(&self) -> usize {
        self.pool.layout().block_tokens()
    }

    fn load(&self, sequence: &Sequence) -> (Vec<f32>, Vec<f32>) {
        let (mut k, mut v) = (vec![0.0_f32; sequence.len()], vec![0.0_f32; sequence.len()]);
        let into: (ElementsMut<'_>, ElementsMut<'_>) = (k.as_mut_slice().into(), v.as_mut_slice().into());
        self.pool.begin_batch().load(sequence, 0, 0..sequence.len(), into.0, into.1).unwrap();
        (k, v)
    }

    fn open(&mut self, prompt: &[u32]) {
        self.ids += 1;
        let Ok(mut sequence) = self.pool.sequence(SequenceId(self.ids)).tokens(prompt) else { return };
        self.hits += sequence.len();
        self.check(&sequence);
        let missing = prompt.len() - sequence.len();
        if self.write(&mut sequence, |batch, sequence| batch.append(sequence, missing)) {
            self.open.push(sequence);
        }
    }

    /// No found block was computed from one that was uncached later, unless it was cached then.
    fn check(&self, sequence: &Sequence) {
        let (times, numbers) = self.load(sequence);
        let blocks: Vec<BlockId> = sequence.blocks().collect();
        for (position, &number) in numbers.iter().enumerate() {
            let place = position / self.block_tokens();
            for (ancestor, written) in &self.from[number as usize][..place] {
                let Some(&call) = self.uncached.get(ancestor).filter(|&call| call > written) else {
                    continue;
                };
                let was_cached = times[position] < call as f32
                    && self.cached.contains(&(call, blocks[place], sequence.block_hashes()[place]));
                assert!(was_cached, "block {place} found, computed from one uncached at {call}");
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
        let Ok(appended) = append(&mut self.batches[at], sequence) else { return false };
        let count = appended.tokens.len();
        let batch = &mut self.batches[at];
        let times = vec![self.now as f32; count];
        let numbers = vec![self.from.len() as f32; count];
        let (k, v): (Elements<'_>, Elements<'_>) = ((&times).into(), (&numbers).into());
        batch.store(sequence, 0, appended.tokens, k, v).unwrap();
        let (times, block_tokens) = (self.load(sequence).0, self.block_tokens());
        let oldest = |block: &[f32]| block.iter().copied().fold(f32::MAX, f32::min) as u32;
        let ancestors = sequence.block_hashes().iter().zip(times.chunks_exact(block_tokens));
        self.from.push(ancestors.map(|(&hash, block)| (hash, oldest(block))).collect());
        true
    }

    fn step(&mut self, rng: &mut Rng) {
        self.now += 1;
        let of = |rng: &mut Rng, len: usize| (len > 0).then(|| rng.below(len.max(1)));
        let tokens = |rng: &mut Rng, most: usize| -> Vec<u32> {
            (0..1 + rng.below(most)).map(|_| (rng.below(10) == 0).into()).collect()
        };
        let most = 5 * self.block_tokens();
        match rng.below(16) {
            0..5 => {
                let prompt = tokens(rng, most);
                self.open(&prompt);
            }
            5..7 => {
                let Some(at) = of(rng, self.open.len()) else { return };
                let (mut sequence, tokens) = (self.open.swap_remove(at), tokens(rng, most));
                self.write(&mut sequence, |batch, sequence| batch.append(sequence, &tokens));
                self.open.push(sequence);
            }
            7 => {
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
                    self.open.iter().flat_map(|sequence| sequence.block_hashes()).copied().collect();
                hashes.retain(|_| rng.below(12) == 0);
                let cached = self.pool.cached_blocks();
                self.pool.uncache(&hashes);
                self.cached.extend(cached.into_iter().map(|(id, hash)| (self.now, id, hash)));
                self.uncached.extend(hashes.into_iter().map(|hash| (hash, self.now)));
            }
        }
    }
}

/// Random sequences that share prompts, with batches in flight.
#[test]
fn what_is_found_was_not_computed_from_uncached_blocks() {
    let mut hits = 0;
    for seed in 0..400 {
        let mut computed = Computed::new([1, 2, 3, 16][seed as usize % 4]);
        let mut rng = Rng(seed);
        for _ in 0..150 {
            computed.step(&mut rng);
        }
        hits += computed.hits;
        computed.batches.clear();
        computed.open.clear();
        let report = computed.pool.audit().unwrap();
        assert_eq!((report.owned, computed.pool.available_blocks()), (0, 80), "seed {seed}");
    }
    assert!(hits > 10_000, "{hits} tokens found");
}
