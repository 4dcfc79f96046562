//! The storm with a tiny model: the paged engine against the contiguous one, and the contiguous one
//! against a decoder of one sequence.

use kvpool::prefix::PrefixConfig;
use kvpool::testing::wait_for_threads;
use kvpool::{Pool, SequenceError, SequenceId};
use kvpool_engine::cache::{Admission, Candidate, KvCache};
use kvpool_engine::config::ModelConfig;
use kvpool_engine::contiguous::Contiguous;
use kvpool_engine::engine::Engine;
use kvpool_engine::error::{EngineError, SubmitError};
use kvpool_engine::model::{Model, Network, Segment};
use kvpool_engine::paged::Paged;
use kvpool_engine::request::{Event, Job, Rank, Request, Sampling};
use kvpool_engine::storm::Storm;
use kvpool_engine::weights::Weights;
use kvpool_engine::worker::Limits;
use std::sync::Arc;
use tokio::sync::mpsc::unbounded_channel;

fn model(tokens_max: usize) -> Model {
    let config = ModelConfig::tiny();
    let weights = Weights::random(&config, 3);
    Model::new(config, weights, tokens_max)
}

fn storm(seed: u64) -> Storm {
    Storm {
        seed,
        requests: 150,
        workers: 3,
        slots: 4,
        tokens_max: 96,
        block_tokens: 4,
        step_tokens: 12,
        has_chaos: true,
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_time().build().unwrap()
}

#[test]
fn every_logit_is_the_same_in_a_storm() {
    let (mut preempted, mut swapped, mut recomputed, mut resizes, mut moved) = (0, 0, 0, 0, 0);
    for seed in 1..=4 {
        let report = runtime().block_on(storm(seed).run(model(96))).unwrap();
        println!("{report:?}");
        assert!(report.is_right(), "seed {seed}: {report:?}");
        assert_eq!((report.first_append_failures, report.cache.swaps_refused), (0, 0), "seed {seed}");
        assert!(report.completed > 100 && report.cancelled > 0 && report.tokens > 1_000, "{report:?}");
        assert!(
            report.forks > 0 && report.drafts_accepted > 0 && report.cache.prefix_hit_tokens > 0,
            "{report:?}"
        );
        preempted += report.preempted;
        swapped += report.cache.swapped;
        recomputed += report.cache.recomputed;
        resizes += report.chaos.resizes;
        moved += report.chaos.moved_blocks;
    }
    assert!(preempted > 0 && swapped > 0 && recomputed > 0, "{preempted} {swapped} {recomputed}");
    assert!(resizes > 0 && moved > 0, "{resizes} {moved}");
}

/// Decodes one answer without a scheduler, one token at a time.
fn decode(model: &Model, request: &Request, answer: u32) -> Vec<Event> {
    let (events, mut stream) = unbounded_channel();
    let rank = Rank { can_wait: true, arrival: 1, answer };
    let tokens_max = request.prompt.len() + request.tokens;
    let (tokens, sampling) = (request.prompt.clone(), request.sampling);
    let mut job = Job { rank, tokens, tokens_max, forks: 0, sampling, drafts: 0, events };
    let cache = Contiguous::new(model.config(), 1, tokens_max);
    let candidate = Candidate { id: SequenceId(1), is_urgent: false, tokens: &[], tokens_max };
    let Ok(Admission::Granted(mut slot)) = cache.admit(candidate, None) else { panic!("no slot") };
    for position in 0.. {
        let tokens = &job.tokens[position..=position];
        let segment = Segment { cache: &mut slot, tokens, first: position, logits: 1 };
        let logits = model.forward(&cache, &mut (), &mut [segment]).unwrap();
        if position + 1 == job.tokens.len() {
            job.push(&logits);
            if job.is_done(None) {
                break;
            }
        }
    }
    drop(job);
    std::iter::from_fn(|| stream.try_recv().ok()).collect()
}

#[test]
fn batches_chunks_drafts_and_forks_change_no_bit() {
    let model = Arc::new(model(96));
    let plan = Storm { requests: 25, ..storm(9) }.plan(64);
    let cache = Contiguous::new(model.config(), 4, 96);
    let engine = Engine::start(cache, model.clone(), 2, Limits { jobs: 3, step_tokens: 16 }, 96);
    let streams: Vec<_> =
        plan.iter().map(|planned| engine.submit(planned.request.clone()).unwrap()).collect();
    engine.shut_down().unwrap();
    for (planned, mut stream) in plan.iter().zip(streams) {
        let events: Vec<Event> = std::iter::from_fn(|| stream.try_recv().ok()).collect();
        for answer in 0..planned.request.answers {
            let is_of = |event: &&Event| matches!(event, Event::Token { answer: of, .. } if *of == answer);
            let tokens: Vec<Event> = events.iter().filter(is_of).copied().collect();
            assert_eq!(tokens, decode(&model, &planned.request, answer));
            assert!(events.contains(&Event::Finished { answer }));
        }
    }
}

#[test]
fn bad_requests_are_refused() {
    let model = Arc::new(model(96));
    let cache = Contiguous::new(model.config(), 1, 96);
    let engine = Engine::start(cache, model, 1, Limits { jobs: 1, step_tokens: 16 }, 96);
    let good = Request {
        prompt: vec![1, 2],
        tokens: 3,
        answers: 1,
        sampling: Sampling { temperature: 0.0, seed: 1 },
        drafts: 0,
        is_urgent: false,
    };
    let refusal = |request: Request| engine.submit(request).unwrap_err();
    assert_eq!(refusal(Request { prompt: Vec::new(), ..good.clone() }), SubmitError::EmptyPrompt);
    let token = SubmitError::Token { token: 64, vocab: 64 };
    assert_eq!(refusal(Request { prompt: vec![1, 64], ..good.clone() }), token);
    let nothing = |tokens, answers| SubmitError::Nothing { tokens, answers, answers_max: 16 };
    assert_eq!(refusal(Request { tokens: 0, ..good.clone() }), nothing(0, 1));
    assert_eq!(refusal(Request { answers: 0, ..good.clone() }), nothing(3, 0));
    assert_eq!(refusal(Request { answers: 17, ..good.clone() }), nothing(3, 17));
    let long = SubmitError::TooLong { prompt: 2, tokens: 95, max: 96 };
    assert_eq!(refusal(Request { tokens: 95, ..good.clone() }), long);
    let mut stream = engine.submit(good).unwrap();
    engine.shut_down().unwrap();
    assert_eq!(std::iter::from_fn(|| stream.try_recv().ok()).count(), 4);
}

/// A network that fails, or panics, in its third step.
struct Failing {
    model: Model,
    steps: std::sync::atomic::AtomicUsize,
    panics: bool,
}

impl Network for Failing {
    fn vocab(&self) -> usize {
        self.model.vocab()
    }

    fn end(&self) -> Option<u32> {
        None
    }

    fn forward<C: KvCache>(
        &self,
        cache: &C,
        step: &mut C::Step,
        segments: &mut [Segment<'_, C::Sequence>],
    ) -> Result<Vec<f32>, EngineError> {
        if self.steps.fetch_add(1, std::sync::atomic::Ordering::Relaxed) < 2 {
            return self.model.forward(cache, step, segments);
        }
        assert!(!self.panics, "the network panics");
        Err(EngineError::Sequence(SequenceError::NoStorage))
    }
}

#[test]
fn a_worker_that_fails_ends_all_streams_and_frees_all_blocks() {
    for (panics, steps) in [(false, 0), (true, 0), (false, 2), (true, 2)] {
        let layout = ModelConfig::tiny().layout(4).unwrap();
        let pool = Pool::builder(layout).blocks(100).prefix_cache(PrefixConfig::new()).build().unwrap();
        let network = Arc::new(Failing { model: model(96), steps: steps.into(), panics });
        let cache = Paged::new(pool.clone(), ModelConfig::tiny().kv_row(), 8, None);
        let engine = Engine::start(cache, network, 2, Limits { jobs: 2, step_tokens: 16 }, 96);
        let plan = Storm { requests: 10, ..storm(2) }.plan(64);
        let streams: Vec<_> =
            plan.iter().filter_map(|planned| engine.submit(planned.request.clone()).ok()).collect();
        let error = engine.shut_down().map(|_| ()).unwrap_err();
        let is_expected = match error {
            EngineError::Panicked => panics,
            EngineError::Sequence(SequenceError::NoStorage) => !panics,
            _ => false,
        };
        assert!(is_expected, "{error}");
        for mut stream in streams {
            while stream.try_recv().is_ok() {}
            assert!(stream.is_closed());
        }
        wait_for_threads(&pool, 0);
        pool.audit().unwrap();
        assert_eq!((pool.available_blocks(), pool.sequence_count()), (100, 0));
        // Tokens of steps that failed are not cached.
        assert!(steps < 2 || pool.free_blocks() == 100, "{} blocks", pool.free_blocks());
    }
}
