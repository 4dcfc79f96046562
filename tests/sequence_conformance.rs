//! Sequences against a naive model that keeps every token in a vector: outputs for kernels, bytes,
//! and the state after a failed operation.

use std::sync::Arc;

use kvpool::block::{Blocks, BlocksConfig};
use kvpool::sequence::Sequences;
use kvpool::storage::{Dtype, HostStorage, KvLayout, Storage};
use kvpool::{Batch, BlockTable, CsrTable, DeviceId, Sequence, SequenceError, SequenceId, Tokens};
use proptest::prelude::*;

#[derive(Clone, Debug)]
enum Step {
    Open,
    Append {
        which: usize,
        tokens: usize,
    },
    /// The launch of the step fails: its batch is dropped.
    Fail {
        which: usize,
        tokens: usize,
    },
    Draft {
        which: usize,
        tokens: usize,
    },
    Commit {
        which: usize,
        part: usize,
    },
    Truncate {
        which: usize,
        part: usize,
    },
    Fork {
        which: usize,
    },
    Drop {
        which: usize,
    },
    /// Ends the oldest overlapping batch, or begins one.
    Overlap {
        end: bool,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let which = 0usize..8;
    prop_oneof![
        2 => Just(Step::Open),
        6 => (which.clone(), 1usize..40).prop_map(|(which, tokens)| Step::Append { which, tokens }),
        2 => (which.clone(), 1usize..40).prop_map(|(which, tokens)| Step::Fail { which, tokens }),
        3 => (which.clone(), 1usize..12).prop_map(|(which, tokens)| Step::Draft { which, tokens }),
        2 => (which.clone(), 0usize..=100).prop_map(|(which, part)| Step::Commit { which, part }),
        3 => (which.clone(), 0usize..=100).prop_map(|(which, part)| Step::Truncate { which, part }),
        2 => which.clone().prop_map(|which| Step::Fork { which }),
        1 => which.prop_map(|which| Step::Drop { which }),
        2 => any::<bool>().prop_map(|end| Step::Overlap { end }),
    ]
}

/// A sequence, and the K of each of its tokens.
struct Twin {
    real: Sequence,
    tokens: Vec<f32>,
    committed: usize,
}

fn build(blocks: usize, block_tokens: usize, has_null_block: bool) -> (Blocks, Sequences) {
    let frames = blocks + has_null_block as usize;
    let config = BlocksConfig {
        frames,
        frames_max: frames,
        segment_frames: 64,
        magazine_blocks: 2,
        threads: 1,
        has_null_block,
        reserve: 0,
        device: DeviceId::Host,
    };
    let layout =
        KvLayout::builder().layers(1).kv_heads(1).head_dim(1).block_tokens(block_tokens).dtype(Dtype::F32);
    let storage = HostStorage::new(layout.build().unwrap(), frames, frames).unwrap();
    let blocks = Blocks::new(config, None);
    let storage = Some(Arc::new(storage) as Arc<dyn Storage>);
    // SAFETY: made here, for these blocks.
    let sequences = unsafe { Sequences::new(blocks.clone(), storage, block_tokens) };
    (blocks, sequences)
}

/// Every output, recomputed token by token.
fn check(batch: &mut Batch, blocks: &Blocks, twins: &[Twin], block_tokens: usize) {
    let all = || twins.iter().map(|twin| &twin.real);
    let frames =
        |twin: &Twin| -> Vec<i32> { twin.real.blocks().map(|id| blocks.frame(id).get() as i32).collect() };
    let padding = blocks.null_block().map_or(-1, |id| blocks.frame(id).get() as i32);
    let (mut table, mut csr, mut lengths) = (BlockTable::with_width(3), CsrTable::new(), vec![5]);
    batch.block_table(all(), &mut table).unwrap();
    batch.csr_table(all(), &mut csr).unwrap();
    batch.lengths(all(), &mut lengths).unwrap();
    assert_eq!(lengths, twins.iter().map(|twin| twin.tokens.len() as i32).collect::<Vec<_>>());
    assert_eq!(table.lengths(), lengths);
    let width = twins.iter().map(|twin| twin.tokens.len().div_ceil(block_tokens)).max().unwrap_or(0).max(3);
    assert_eq!(
        (table.rows(), table.width(), table.entries().len()),
        (twins.len(), width, twins.len() * width)
    );
    assert_eq!((csr.indptr.len(), csr.last_page_len.len()), (twins.len() + 1, twins.len()));
    for (row, twin) in twins.iter().enumerate() {
        let mut expected = frames(twin);
        assert_eq!(expected.len(), twin.tokens.len().div_ceil(block_tokens));
        assert_eq!(csr.indices[csr.indptr[row] as usize..csr.indptr[row + 1] as usize], expected);
        let pages = expected.len();
        let last = twin.tokens.len() - pages.saturating_sub(1) * block_tokens;
        assert_eq!(csr.last_page_len[row] as usize, last);
        expected.resize(width, padding);
        assert_eq!(table.row(row), expected);
        assert_eq!((twin.real.len(), twin.real.committed()), (twin.tokens.len(), twin.committed));
        let slots: Vec<i64> = (0..twin.tokens.len())
            .map(|t| expected[t / block_tokens] as i64 * block_tokens as i64 + (t % block_tokens) as i64)
            .collect();
        let from = twin.tokens.len() / 3;
        let mut mapped = vec![-7];
        batch.slot_mapping(&twin.real, from..twin.tokens.len(), &mut mapped).unwrap();
        assert_eq!(mapped[1..], slots[from..]);
        let (mut k, mut v) = (vec![0.0f32; twin.tokens.len()], vec![0.0f32; twin.tokens.len()]);
        batch.load(&twin.real, 0, 0..twin.tokens.len(), (&mut k).into(), (&mut v).into()).unwrap();
        assert_eq!(k, twin.tokens);
    }
}

fn run(steps: &[Step], block_tokens: usize, has_null_block: bool) {
    let (blocks, sequences) = build(60 / block_tokens.min(4), block_tokens, has_null_block);
    let mut twins: Vec<Twin> = Vec::new();
    let mut overlapping: Vec<Batch> = Vec::new();
    let (mut next, mut stamp) = (0u64, 0.0f32);
    let mut id = || {
        next += 1;
        SequenceId(next)
    };
    for step in steps {
        let mut batch = Batch::begin(&sequences);
        let held = twins.len();
        match *step {
            Step::Open => {
                let real = sequences.open(id()).unwrap();
                twins.push(Twin { real, tokens: Vec::new(), committed: 0 });
            }
            Step::Append { which, tokens } | Step::Draft { which, tokens } if held > 0 => {
                let twin = &mut twins[which % held];
                let is_final = matches!(step, Step::Append { .. });
                let grown = match is_final {
                    true => batch.append(&mut twin.real, tokens),
                    false => batch.append(&mut twin.real, Tokens::Draft(tokens)),
                };
                match grown {
                    Ok(appended) => {
                        assert_eq!(appended.tokens, twin.tokens.len()..twin.tokens.len() + tokens);
                        let k: Vec<f32> = (0..tokens).map(|i| stamp + i as f32).collect();
                        stamp += tokens as f32;
                        batch.store(&mut twin.real, 0, appended.tokens, (&k).into(), (&k).into()).unwrap();
                        twin.tokens.extend(k);
                        if is_final {
                            twin.committed = twin.tokens.len();
                        }
                    }
                    Err(SequenceError::Alloc(_)) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            Step::Fail { which, tokens } if held > 0 => {
                let twin = &mut twins[which % held];
                match batch.append(&mut twin.real, tokens) {
                    Ok(appended) => {
                        let k = vec![f32::NAN; tokens];
                        batch.store(&mut twin.real, 0, appended.tokens, (&k).into(), (&k).into()).unwrap();
                        // Earlier drafts became final.
                        twin.committed = twin.tokens.len();
                    }
                    Err(SequenceError::Alloc(_)) => {}
                    Err(error) => panic!("{error}"),
                }
                drop(std::mem::replace(&mut batch, Batch::begin(&sequences)));
                assert_eq!(twin.real.committed(), twin.committed);
                twin.real.commit(0).unwrap();
            }
            Step::Commit { which, part } if held > 0 => {
                let twin = &mut twins[which % held];
                let length = twin.tokens.len() * part / 100;
                twin.real.commit(length).unwrap();
                twin.committed = twin.committed.max(length);
            }
            Step::Truncate { which, part } if held > 0 => {
                let twin = &mut twins[which % held];
                let length = twin.tokens.len() * part / 100;
                twin.real.truncate(length).unwrap();
                twin.tokens.truncate(length);
                twin.committed = twin.committed.min(length);
            }
            Step::Fork { which } if held > 0 => {
                let twin = &twins[which % held];
                let real = twin.real.fork(id()).unwrap();
                let fork = Twin { real, tokens: twin.tokens.clone(), committed: twin.committed };
                twins.push(fork);
            }
            Step::Drop { which } if held > 0 => drop(twins.swap_remove(which % held)),
            Step::Overlap { end: true } if !overlapping.is_empty() => overlapping.remove(0).finish(),
            Step::Overlap { end: false } => overlapping.push(Batch::begin(&sequences)),
            _ => {}
        }
        check(&mut batch, &blocks, &twins, block_tokens);
        batch.finish();
    }
    overlapping.into_iter().for_each(Batch::finish);
    let distinct: std::collections::BTreeSet<_> = twins.iter().flat_map(|twin| twin.real.blocks()).collect();
    let reserved: usize = twins.iter().map(|twin| twin.real.reserved_blocks()).sum();
    assert_eq!(blocks.counts().used(), distinct.len() + reserved);
    drop(twins);
    assert_eq!((sequences.count(), blocks.counts().free()), (0, blocks.total()));
    blocks.audit().unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if cfg!(miri) { 4 } else { 128 }, failure_persistence: None, ..Default::default() })]

    #[test]
    fn a_sequence_is_its_tokens(
        steps in prop::collection::vec(step(), 1..80),
        block_tokens in prop::sample::select(vec![1usize, 2, 3, 4, 7, 16]),
        has_null_block in any::<bool>(),
    ) {
        run(&steps, block_tokens, has_null_block);
    }
}
