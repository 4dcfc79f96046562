//! The storms over models whose layers differ: every logit is that of the contiguous reference.
//! `KVPOOL_ENGINE_SEED` sets the first seed.

use kvpool::{AdmitRequest, SequenceId, Tokens};
use kvpool_engine::hybrid::frames::Paged;
use kvpool_engine::hybrid::model::LayerShape;
use kvpool_engine::hybrid::storm::{HybridReport, HybridStorm, forks, states};

fn run(name: &'static str, shapes: fn() -> Vec<LayerShape>, blocks: usize) -> Vec<HybridReport> {
    let first = std::env::var("KVPOOL_ENGINE_SEED").map_or(1, |seed| seed.parse().expect("a number"));
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_time().build().unwrap();
    let storm = |seed| {
        let storm = HybridStorm { seed, requests: 120, workers: 3, blocks, has_chaos: true };
        let report = storm.run(name, shapes(), runtime.handle()).unwrap();
        println!("{report:?}");
        assert!(report.is_right(), "seed {seed}: {report:?}");
        assert!(report.counts.logits_compared > 5_000, "seed {seed}: {report:?}");
        report
    };
    (first..first + 3).map(storm).collect()
}

#[test]
fn every_logit_is_the_same_with_states_and_drafts() {
    let reports = run("states", states, 128);
    let sum = |count: fn(&HybridReport) -> u64| reports.iter().map(count).sum::<u64>();
    let happened = [
        sum(|report| report.counts.hit_tokens),
        sum(|report| report.counts.states_restored),
        sum(|report| report.counts.states_from_drafts),
        sum(|report| report.counts.drafts_in_part),
        sum(|report| report.counts.drafts_rejected),
        sum(|report| report.counts.checkpoints),
        sum(|report| report.counts.waited),
        sum(|report| report.counts.preempted),
        sum(|report| report.counts.blocks_given_up),
        sum(|report| report.counts.abandoned_batches),
        sum(|report| report.moved_blocks as u64),
    ];
    assert!(happened.iter().all(|&count| count > 0), "{happened:?}");
}

#[test]
fn every_logit_is_the_same_with_forks_and_drafts() {
    let reports = run("forks", forks, 84);
    let sum = |count: fn(&HybridReport) -> u64| reports.iter().map(count).sum::<u64>();
    let happened = [
        sum(|report| report.counts.hit_tokens),
        sum(|report| report.counts.waited),
        sum(|report| report.counts.preempted),
        sum(|report| report.counts.forks),
        sum(|report| report.counts.copied_blocks),
        sum(|report| report.counts.drafts_in_part),
        sum(|report| report.counts.drafts_rejected),
        sum(|report| report.counts.drafted - report.counts.drafts_rejected),
        sum(|report| report.counts.blocks_given_up),
        sum(|report| report.counts.abandoned_batches),
        sum(|report| report.moved_blocks as u64),
    ];
    assert!(happened.iter().all(|&count| count > 0), "{happened:?}");
}

#[test]
fn forks_beside_a_state_are_refused() {
    let paged = Paged::new(&states(), 128, 24).unwrap();
    let pool = paged.pool();
    let mut sequence = pool.admit_grouped(&AdmitRequest::new(SequenceId(1), &[1, 2, 3])).unwrap();
    let mut batch = pool.begin_batch();
    batch.append_grouped(&mut sequence, Tokens::Announced(3)).unwrap();
    batch.finish();
    let refused = sequence.fork(SequenceId(2)).unwrap_err();
    assert!(refused.to_string().contains("a pool without states"), "{refused}");
    drop(sequence);
    pool.audit().unwrap();
}
