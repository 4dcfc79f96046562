//! Random operations on two pools, against a model of where each sequence is and of its tokens:
//! every sequence is in the model's pool, with its bytes; hits have the bytes of the looked-up
//! tokens; and after each step both pools pass an audit.

use std::collections::BTreeMap;
use std::time::Instant;

use kvpool::prefix::PrefixKeys;
use kvpool::storage::{Arrangement, KvPlanes};
use kvpool::{Pool, Sequence, SequenceError, SequenceId, TransferError};
use proptest::prelude::*;

use super::kv::{cached, check, extend, is_idle, pool, prompt, sized, store};

const BLOCKS: usize = 24;

/// One step; the first field is the pool that performs it.
#[derive(Clone, Debug)]
enum Step {
    /// A prompt of a family, with this many tokens.
    Admit(usize, u32, usize),
    /// Append this many tokens.
    Append(u8, usize),
    Truncate(u8, usize),
    Fork(u8),
    Close(u8),
    Migrate(u8),
    Replicate(u8),
    Offload(usize, usize),
    BringBack(usize, u32, usize),
    Clear(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let side = 0..2usize;
    prop_oneof![
        4 => (side.clone(), 0..4u32, 1..40usize).prop_map(|(side, family, tokens)| Step::Admit(side, family, tokens)),
        3 => (any::<u8>(), 1..9usize).prop_map(|(which, tokens)| Step::Append(which, tokens)),
        1 => (any::<u8>(), 0..40usize).prop_map(|(which, length)| Step::Truncate(which, length)),
        1 => any::<u8>().prop_map(Step::Fork),
        3 => any::<u8>().prop_map(Step::Close),
        4 => any::<u8>().prop_map(Step::Migrate),
        2 => any::<u8>().prop_map(Step::Replicate),
        3 => (side.clone(), 1..16usize).prop_map(|(side, blocks)| Step::Offload(side, blocks)),
        3 => (side.clone(), 0..4u32, 1..40usize).prop_map(|(side, family, tokens)| Step::BringBack(side, family, tokens)),
        1 => side.prop_map(Step::Clear),
    ]
}

struct Open {
    side: usize,
    sequence: Sequence,
    tokens: Vec<u32>,
}

#[derive(Default)]
struct Model {
    open: BTreeMap<u64, Open>,
    next: u64,
}

impl Model {
    fn pick(&self, which: u8) -> Option<u64> {
        self.open.keys().nth(usize::from(which) % self.open.len().max(1)).copied()
    }

    fn add(&mut self, side: usize, sequence: Sequence, tokens: Vec<u32>) {
        self.open.insert(sequence.id().0, Open { side, sequence, tokens });
    }
}

fn is_full(error: &TransferError) -> bool {
    matches!(error, TransferError::Alloc(_))
}

/// Opens a prompt, also with a part of a cached block, and computes its uncached tokens.
fn serve(pool: &Pool, id: u64, tokens: &[u32]) -> Result<Sequence, SequenceError> {
    let mut sequence = pool.sequence(SequenceId(id)).reuse_tail().tokens(tokens)?;
    let cached = sequence.len();
    let mut batch = pool.begin_batch();
    extend(&mut batch, &mut sequence, &tokens[cached..])?;
    batch.finish();
    Ok(sequence)
}

async fn apply(model: &mut Model, pools: &[Pool; 2], step: Step) {
    match step {
        Step::Admit(side, family, tokens) => {
            let tokens = prompt(family, tokens);
            model.next += 1;
            match serve(&pools[side], model.next, &tokens) {
                Ok(sequence) => model.add(side, sequence, tokens),
                Err(error) => assert!(matches!(error, SequenceError::Alloc(_)), "{error}"),
            }
        }
        Step::Append(which, count) => {
            let Some(id) = model.pick(which) else { return };
            let open = model.open.get_mut(&id).unwrap();
            let first = open.tokens.len();
            // Tokens that only this sequence has.
            let fresh: Vec<u32> =
                (0..count as u32).map(|token| 1 << 30 | (id as u32) << 12 | token).collect();
            let mut batch = pools[open.side].begin_batch();
            // All its tokens are known, wherever it was truncated and whichever pools it was in.
            match batch.append(&mut open.sequence, &fresh) {
                Ok(_) => {
                    store(&mut batch, &mut open.sequence, first, &fresh);
                    open.tokens.extend(fresh);
                }
                Err(error) => assert!(matches!(error, SequenceError::Alloc(_)), "{error}"),
            }
            batch.finish();
        }
        Step::Truncate(which, length) => {
            let Some(id) = model.pick(which) else { return };
            let open = model.open.get_mut(&id).unwrap();
            let length = length.min(open.tokens.len());
            open.sequence.truncate(length).unwrap();
            open.tokens.truncate(length);
        }
        Step::Fork(which) => {
            let Some(id) = model.pick(which) else { return };
            model.next += 1;
            let open = &model.open[&id];
            let fork = open.sequence.fork(SequenceId(model.next)).unwrap();
            model.add(open.side, fork, open.tokens.clone());
        }
        Step::Close(which) => drop(model.pick(which).map(|id| model.open.remove(&id))),
        Step::Migrate(which) => {
            let Some(Open { side, sequence, tokens }) =
                model.pick(which).and_then(|id| model.open.remove(&id))
            else {
                return;
            };
            let lengths = (sequence.len(), sequence.committed(), sequence.id());
            // Without a wait for room.
            let (to, now) = (&pools[1 - side], Instant::now());
            let outcome = pools[side].migrate(sequence, to).until(now).await;
            let (side, sequence) = match outcome {
                Ok((sequence, report)) => {
                    assert_eq!(report.shared_blocks + report.carried.blocks, sequence.block_count());
                    (1 - side, sequence)
                }
                Err(failed) => {
                    assert!(is_full(&failed.error), "{failed}");
                    (side, *failed.sequence)
                }
            };
            assert_eq!(lengths, (sequence.len(), sequence.committed(), sequence.id()));
            model.add(side, sequence, tokens);
        }
        Step::Replicate(which) => {
            let Some(id) = model.pick(which) else { return };
            let open = &model.open[&id];
            // The id is open there from then on, and closed at once.
            match pools[open.side].replicate(&open.sequence, &pools[1 - open.side]).await {
                Ok((replica, _)) => check(&pools[1 - open.side], &replica, &open.tokens),
                Err(error) => assert!(is_full(&error), "{error}"),
            }
        }
        Step::Offload(side, blocks) => {
            let before = [0, 1, 2, 3].map(|family| cached(&pools[side], &prompt(family, 40)));
            match pools[side].offload(&pools[1 - side], blocks).await {
                Ok(report) => {
                    let gone = report.evicted_blocks + report.leaving_blocks + report.warm_blocks;
                    assert_eq!(report.carried.blocks + report.present_blocks, gone, "{report:?}");
                    assert!(gone <= blocks && report.warm_blocks == 0, "no look-up happens: {report:?}");
                    assert_eq!(report.leaving_blocks, 0, "no batch is in flight");
                }
                Err(error) => {
                    assert!(is_full(&error), "{error}");
                    let after = [0, 1, 2, 3].map(|family| cached(&pools[side], &prompt(family, 40)));
                    assert_eq!(before, after);
                }
            }
        }
        Step::BringBack(side, family, tokens) => {
            let tokens = prompt(family, tokens);
            let before = cached(&pools[side], &tokens);
            match pools[side].bring_back(&pools[1 - side], &PrefixKeys::new(), &tokens).await {
                Ok(report) => {
                    // The last block is not looked up if the prompt ends with it.
                    let block_tokens = pools[side].layout().block_tokens();
                    let found = report.cached_blocks.min((tokens.len() - 1) / block_tokens);
                    assert!(cached(&pools[side], &tokens) == found && found >= before, "{report:?}");
                }
                Err(error) => assert!(is_full(&error), "{error}"),
            }
        }
        Step::Clear(side) => {
            pools[side].clear_prefix_cache();
        }
    }
}

fn run(steps: Vec<Step>, block_tokens: usize) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    // Room for the same number of tokens, roughly.
    let blocks = BLOCKS * if block_tokens < 4 { 4 / block_tokens } else { 1 };
    let forms = [(Arrangement::LayerFirst, KvPlanes::Separate), (Arrangement::BlockFirst, KvPlanes::Joined)];
    let pools = forms.map(|(arrangement, parts)| pool(sized(block_tokens, arrangement, parts), blocks));
    let mut model = Model::default();
    for step in steps {
        runtime.block_on(apply(&mut model, &pools, step));
        for (side, pool) in pools.iter().enumerate() {
            let here = || model.open.values().filter(|open| open.side == side);
            assert_eq!(pool.sequence_count(), here().count());
            let owned: std::collections::BTreeSet<_> =
                here().flat_map(|open| open.sequence.blocks()).collect();
            let report = pool.audit().unwrap();
            assert_eq!((report.owned, report.held), (owned.len(), 0), "{report:?}");
            here().for_each(|open| {
                assert_eq!(open.sequence.len(), open.tokens.len());
                check(pool, &open.sequence, &open.tokens);
            });
            for family in 0..4 {
                cached(pool, &prompt(family, 40));
            }
        }
    }
    drop(model);
    pools.iter().for_each(is_idle);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 2 } else { 160 }, ..ProptestConfig::default() })]

    #[test]
    fn sequences_and_cached_blocks_are_where_they_should_be(
        steps in prop::collection::vec(step(), 1..40),
        block_tokens in prop::sample::select(vec![1, 2, 3, 4, 16]),
    ) {
        run(steps, block_tokens);
    }
}
