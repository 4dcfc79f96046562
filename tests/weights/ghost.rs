//! Random operations, with a ghost of each token of each block: which weights it was computed with,
//! and whether all tokens before it were computed with the same.

use std::collections::HashMap;

use kvpool::prefix::{PrefixKeys, Weights};
use kvpool::{Batch, BlockId, Pool, Sequence, SequenceId, Tokens, VersionRange, WeightsVersion};
use kvpool_testkit::prompts::prompt;

/// What a token was computed with; nothing: with several weights.
type Ghost = Option<Weights>;

const ADAPTERS: [Option<&[u8]>; 3] = [None, Some(b"one"), Some(b"two")];

struct Flight {
    batch: Batch,
    weights: [Weights; 3],
}

struct Open {
    sequence: Sequence,
    adapter: usize,
    tokens: Vec<u32>,
}

struct World {
    pool: Pool,
    random: fastrand::Rng,
    ghosts: HashMap<(BlockId, usize), Ghost>,
    flights: Vec<Flight>,
    open: Vec<Open>,
    next: u64,
    hits: usize,
}

impl World {
    fn now(&self) -> [Weights; 3] {
        ADAPTERS.map(|adapter| self.pool.prefix_cache().unwrap().weights(adapter))
    }

    fn slot(sequence: &Sequence, position: usize) -> (BlockId, usize) {
        let block_tokens = sequence.block_tokens();
        (sequence.blocks().nth(position / block_tokens).unwrap(), position % block_tokens)
    }

    fn admit(&mut self) {
        let adapter = self.random.usize(..3);
        let keys = ADAPTERS[adapter].map_or(PrefixKeys::new(), |name| PrefixKeys::new().adapter(name));
        let tokens = prompt(self.random.u32(..3), self.random.usize(1..60));
        self.next += 1;
        let opening = self.pool.sequence(SequenceId(self.next)).keys(keys);
        let opening = if self.random.bool() { opening.reuse_tail() } else { opening };
        let Ok(sequence) = opening.tokens(&tokens) else { return };
        let now = self.now()[adapter];
        for position in 0..sequence.len() {
            let ghost = self.ghosts[&Self::slot(&sequence, position)];
            assert_eq!(ghost, Some(now), "token {position} of a hit of {}", sequence.len());
        }
        self.hits += sequence.len();
        self.open.push(Open { sequence, adapter, tokens });
    }

    fn append(&mut self) {
        let (Some(at), Some(flight)) = (self.any(self.open.len()), self.any(self.flights.len())) else {
            return;
        };
        let (Open { sequence, adapter, tokens }, flight) = (&mut self.open[at], &mut self.flights[flight]);
        let count = self.random.usize(1..12);
        // Some of the announced tokens, or more.
        let of_answer = [count as u32; 12];
        let (known, length) = (sequence.announced(), sequence.len());
        let (new, ids) = match known - length.min(known) {
            0 => (Tokens::Ids(&of_answer[..count]), &of_answer[..count]),
            left => (Tokens::Announced(count.min(left)), &[][..]),
        };
        let Ok(appended) = flight.batch.append(sequence, new) else { return };
        tokens.extend_from_slice(ids);
        if let Some(copied) = appended.copied {
            for offset in 0..sequence.block_tokens() {
                if let Some(&ghost) = self.ghosts.get(&(copied.from, offset)) {
                    self.ghosts.insert((copied.to, offset), ghost);
                }
            }
        }
        for position in appended.tokens {
            let before = position.checked_sub(1).map(|at| self.ghosts[&Self::slot(sequence, at)]);
            let own = flight.weights[*adapter];
            let ghost = if before.is_none_or(|before| before == Some(own)) { Some(own) } else { None };
            self.ghosts.insert(Self::slot(sequence, position), ghost);
        }
        self.check(at);
    }

    /// A sequence reports one range if, and only if, all of its tokens have the same weights.
    fn check(&self, at: usize) {
        let Open { sequence, .. } = &self.open[at];
        let ranges: Vec<_> = sequence.versions().collect();
        let Some(last) = sequence.len().checked_sub(1) else { return assert!(ranges.is_empty()) };
        let is_unknown = ranges.iter().any(|range| range.adapter.is_none());
        assert_eq!(ranges[0].from, 0);
        let rises = |pair: &[VersionRange]| {
            pair[0].from < pair[1].from
                && (pair[0].model, pair[0].adapter) != (pair[1].model, pair[1].adapter)
        };
        assert!(ranges.windows(2).all(rises), "{ranges:?}");
        match self.ghosts[&Self::slot(sequence, last)] {
            Some(weights) => {
                let is_of = |range: &VersionRange| of_known(range, weights);
                assert!(ranges.iter().all(is_of), "{ranges:?}, all {weights:?}");
                assert!(ranges.len() == 1 || is_unknown, "{ranges:?}, all {weights:?}");
            }
            None => assert!(ranges.len() > 1 || is_unknown, "{ranges:?}, several"),
        }
    }

    fn any(&mut self, count: usize) -> Option<usize> {
        (count > 0).then(|| self.random.usize(..count))
    }

    fn step(&mut self) {
        match self.random.u32(..100) {
            0..25 => self.admit(),
            25..60 => self.append(),
            60..70 if self.flights.len() < 3 => {
                self.flights.push(Flight { batch: self.pool.begin_batch(), weights: self.now() });
            }
            60..78 => {
                if let Some(at) = self.any(self.flights.len()) {
                    let flight = self.flights.swap_remove(at);
                    if self.random.u32(..6) > 0 {
                        flight.batch.finish();
                    }
                }
            }
            78..83 => {
                self.pool.begin_version(WeightsVersion(self.random.u64(..3))).unwrap();
            }
            83..87 => {
                let name = ADAPTERS[self.random.usize(1..3)].unwrap();
                self.pool.begin_adapter_version(name, WeightsVersion(self.random.u64(..3))).unwrap();
            }
            87..90 => {
                if let Some(at) = self.any(self.open.len()) {
                    self.next += 1;
                    let Open { sequence, adapter, tokens } = &self.open[at];
                    if let Ok(sequence) = sequence.fork(SequenceId(self.next)) {
                        let fork = Open { sequence, adapter: *adapter, tokens: tokens.clone() };
                        self.open.push(fork);
                    }
                }
            }
            90..93 => {
                if let Some(at) = self.any(self.open.len()) {
                    let Open { sequence, tokens, .. } = &mut self.open[at];
                    let length = self.random.usize(..=sequence.len());
                    sequence.truncate(length).unwrap();
                    tokens.truncate(sequence.announced());
                    self.check(at);
                }
            }
            _ => {
                if let Some(at) = self.any(self.open.len()) {
                    self.open.swap_remove(at);
                }
            }
        }
    }
}

/// An adapter's version may be unknown.
fn of_known(reported: &VersionRange, own: Weights) -> bool {
    reported.model == own.model && reported.adapter.is_none_or(|adapter| adapter == own.adapter)
}

#[test]
fn no_hit_has_a_token_of_other_weights() {
    let seeds = std::env::var("KVPOOL_WEIGHTS_SEED").ok().map(|seed| seed.parse().expect("a number"));
    let count = if cfg!(debug_assertions) { 20 } else { 300 };
    let mut hits = 0;
    for seed in seeds.map_or(0..count, |seed: u64| seed..seed + 1) {
        eprintln!("KVPOOL_WEIGHTS_SEED={seed}");
        let block_tokens = [1, 2, 3, 16][seed as usize % 4];
        let layout = kvpool::KvLayout::builder().layers(1).kv_heads(1).head_dim(1).block_tokens(block_tokens);
        let pool = Pool::builder(layout.build().unwrap()).blocks(60 + 300 / block_tokens).threads(1);
        let pool = pool.prefix_cache(kvpool::PrefixConfig::new()).build().unwrap();
        let mut world = World {
            pool,
            random: fastrand::Rng::with_seed(seed),
            ghosts: HashMap::new(),
            flights: Vec::new(),
            open: Vec::new(),
            next: 0,
            hits: 0,
        };
        (0..400).for_each(|_| world.step());
        world.flights.drain(..).for_each(|flight| flight.batch.finish());
        world.open.clear();
        world.pool.audit().unwrap();
        hits += world.hits;
    }
    assert!(seeds.is_some() || hits > 50 * count as usize, "only {hits} tokens were hit");
}
