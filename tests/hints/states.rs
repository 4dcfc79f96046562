//! Hints in pools with several lists and with states: what a later request continues behind is kept.

use super::*;

/// Bytes of a block.
const BLOCK: u64 = 32;

struct Bench {
    pool: Pool,
    until: Millis,
}

fn bench(change: impl FnOnce(kvpool::PoolBuilder) -> kvpool::PoolBuilder, limits: HintLimits) -> Bench {
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(1).block_tokens(4).build().unwrap();
    let cache = PrefixConfig::new().tolerance(0.0);
    let builder = Pool::builder(layout).blocks(100).threads(1).magazine_blocks(4).without_storage();
    let pool = change(builder.prefix_cache(cache).hints(limits)).build().unwrap();
    let until = Millis(pool.prefix_cache().unwrap().now().0 + 60_000);
    Bench { pool, until }
}

impl Bench {
    /// Runs a request of a session, which keeps a checkpoint behind its 32 tokens.
    fn run(&self, number: u32, closes: bool) -> Option<kvpool::GroupedSequence> {
        let tokens = prompt(number, 33);
        let session = SessionId(number.into());
        let request = AdmitRequest::new(SequenceId(number.into()), &tokens).session(session);
        let mut sequence = self.pool.admit_grouped(&request).unwrap();
        let mut batch = self.pool.begin_batch();
        let missing = 32 - sequence.len();
        batch.append_grouped(&mut sequence, Tokens::Announced(missing)).unwrap();
        batch.checkpoint(&mut sequence).unwrap();
        batch.finish();
        (!closes).then_some(sequence)
    }

    fn hint(&self, number: u64, action: Action) -> Outcome {
        self.pool.hint(&Hint::new(Target::Session(SessionId(number)), action))
    }

    /// Evicts this many blocks, and returns the tokens that each session's next request hits.
    fn hits_after(&self, evicted: usize) -> [usize; 2] {
        drop(self.pool.allocate(AllocRequest::new(self.pool.free_blocks() + evicted)).unwrap());
        [1, 2].map(|number| {
            let tokens = prompt(number, 33);
            self.pool.admit_grouped(&AdmitRequest::new(SequenceId(9), &tokens)).map_or(0, |hit| hit.len())
        })
    }
}

/// A checkpoint goes where the blocks of tokens go, before which it is worth nothing.
#[test]
fn hints_on_a_session_reach_its_checkpoints() {
    let pin = |bench: &Bench| Action::Pin { until: bench.until };
    let retain = |bench: &Bench| Action::Retain { priority: CachePriority::Normal, until: bench.until };
    for (is_open, action) in [(false, &pin as &dyn Fn(&Bench) -> Action), (true, &retain), (false, &retain)] {
        let bench = bench(|builder| builder.states([10]), HintLimits::new().pinned_bytes(30 * BLOCK));
        let open = bench.run(1, !is_open);
        let first = if is_open {
            // Granted by an earlier request.
            drop(open);
            let outcome = bench.hint(1, action(&bench));
            bench.run(1, true);
            outcome
        } else {
            bench.hint(1, action(&bench))
        };
        assert_eq!(first, Outcome::Accepted { blocks: 18 });
        bench.run(2, true);
        // Those of the second session, which were used last.
        assert_eq!(bench.hits_after(18), [32, 0]);
        bench.pool.audit().unwrap();
    }
    for action in [Action::Demote, Action::Release] {
        let bench = bench(|builder| builder.states([10]), HintLimits::new());
        bench.run(1, true);
        bench.run(2, true);
        assert_eq!(bench.hint(2, action), Outcome::Accepted { blocks: 18 });
        assert_eq!(bench.hits_after(18), [32, 0]);
        bench.pool.audit().unwrap();
    }
}

/// A request that is open keeps its blocks, but no longer its checkpoint: its close does the rest.
#[test]
fn a_hint_during_a_request_is_for_its_blocks_too() {
    for action in [Action::Demote, Action::Release] {
        let bench = bench(|builder| builder.states([10]), HintLimits::new());
        bench.run(1, true);
        bench.run(2, true);
        let tokens = prompt(2, 34);
        let request = AdmitRequest::new(SequenceId(2), &tokens).session(SessionId(2));
        let mut sequence = bench.pool.admit_grouped(&request).unwrap();
        assert_eq!(sequence.len(), 32);
        let mut batch = bench.pool.begin_batch();
        batch.append_grouped(&mut sequence, Tokens::Announced(1)).unwrap();
        batch.finish();
        assert_eq!(bench.hint(2, action), Outcome::Deferred { blocks: 8 });
        drop(sequence);
        assert_eq!(bench.hits_after(18), [32, 0]);
        bench.pool.audit().unwrap();
    }
}

/// A request that began behind a checkpoint, which is uncached meanwhile, is closed like others.
#[test]
fn an_uncached_checkpoint_of_a_pinned_session() {
    let bench = bench(|builder| builder.states([10]), HintLimits::new().pinned_bytes(90 * BLOCK));
    bench.run(1, true);
    bench.hint(1, Action::Pin { until: bench.until });
    let tokens = prompt(1, 38);
    for appends in [false, true] {
        let request = AdmitRequest::new(SequenceId(1), &tokens).session(SessionId(1));
        let mut sequence = bench.pool.admit_grouped(&request).unwrap();
        let mut batch = bench.pool.begin_batch();
        if appends {
            let missing = 36 - sequence.len();
            batch.append_grouped(&mut sequence, Tokens::Announced(missing)).unwrap();
            batch.checkpoint(&mut sequence).unwrap();
        }
        let hashes: Vec<_> = bench.pool.cached_blocks().into_iter().map(|(_, hash)| hash).collect();
        bench.pool.uncache(&hashes);
        drop(sequence);
        batch.finish();
        bench.run(1, true);
    }
    bench.pool.audit().unwrap();
}

/// What one session may keep is for its checkpoints too, of this request and of later ones.
#[test]
fn the_limit_of_a_session_bounds_its_checkpoints() {
    for (limit, most) in [(6, 6), (14, 14), (25, 25), (40, 28), (90, 28)] {
        let limits = HintLimits::new().session_bytes(limit * BLOCK).pinned_bytes(90 * BLOCK);
        let bench = bench(|builder| builder.states([10]), limits);
        bench.run(1, true);
        bench.hint(1, Action::Pin { until: bench.until });
        for turn in 1..4 {
            let tokens = prompt(1, 33 + 4 * turn);
            let request = AdmitRequest::new(SequenceId(1), &tokens).session(SessionId(1));
            let mut sequence = bench.pool.admit_grouped(&request).unwrap();
            let mut batch = bench.pool.begin_batch();
            let missing = 32 + 4 * turn - sequence.len();
            batch.append_grouped(&mut sequence, Tokens::Announced(missing)).unwrap();
            batch.finish();
            drop(sequence);
            let pinned = bench.pool.sessions()[0].pinned_bytes / BLOCK;
            assert!(pinned <= most, "{pinned} of {limit} in turn {turn}");
        }
        bench.pool.audit().unwrap();
    }
}

/// A budget that is too small for blocks and checkpoint is told.
#[test]
fn a_budget_is_for_checkpoints_too() {
    let bench = bench(|builder| builder.states([10]), HintLimits::new().pinned_bytes(12 * BLOCK));
    bench.run(1, true);
    let outcome = bench.hint(1, Action::Pin { until: bench.until });
    assert!(matches!(outcome, Outcome::Clipped { blocks: 12, limit: Limit::PinnedBytes, .. }), "{outcome:?}");
    let limited = self::bench(|builder| builder.states([10]), HintLimits::new().session_bytes(14 * BLOCK));
    limited.run(1, true);
    let outcome = limited.hint(1, Action::Retain { priority: CachePriority::High, until: limited.until });
    assert!(
        matches!(outcome, Outcome::Clipped { blocks: 14, limit: Limit::SessionBytes, .. }),
        "{outcome:?}"
    );
}

/// Lists whose blocks have other numbers of tokens get what each of them needs.
#[test]
fn tokens_of_unequal_blocks_are_kept_in_every_list() {
    for (limits, blocks) in
        [(HintLimits::new().pinned_bytes(20 * BLOCK), 20), (HintLimits::new().pinned_bytes(12 * BLOCK), 12)]
    {
        for is_session in [false, true] {
            let bench = bench(|builder| builder.groups([None, None]).list_tokens([4, 16]), limits);
            let tokens = prompt(1, 65);
            let request = AdmitRequest::new(SequenceId(1), &tokens).session(SessionId(1));
            let mut sequence = bench.pool.admit_grouped(&request).unwrap();
            let mut batch = bench.pool.begin_batch();
            batch.append_grouped(&mut sequence, Tokens::Announced(64)).unwrap();
            batch.finish();
            let pin = Action::Pin { until: bench.until };
            let target = match is_session {
                true => Target::Session(SessionId(1)),
                false => Target::Tokens(SequenceId(1), 0..64),
            };
            let sequence = (!is_session).then_some(sequence);
            let outcome = bench.pool.hint(&Hint::new(target, pin));
            drop(sequence);
            let granted = match outcome {
                Outcome::Deferred { blocks }
                | Outcome::Accepted { blocks }
                | Outcome::Clipped { blocks, .. } => blocks,
                other => panic!("{other:?}"),
            };
            assert_eq!(granted, blocks, "{outcome:?}");
            let free = bench.pool.free_blocks();
            let most = bench.pool.allocate(AllocRequest::new(free + 20 - blocks)).unwrap();
            assert_eq!(bench.pool.metrics().evictions.retained, 0, "{blocks} are pinned");
            drop(most);
            bench.pool.audit().unwrap();
        }
    }
}
