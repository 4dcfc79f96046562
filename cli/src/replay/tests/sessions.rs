//! Sessions in a closed loop.

use kvpool::SessionId;
use kvpool_load::Turn;

use super::*;

const AT_ONCE: SessionOptions = SessionOptions { at_once: 2, costs: Costs::USUAL, tells_returns: true };

/// A turn whose prompt has this many pieces of 64 tokens, from the first of its session on.
fn turn(session: u64, parent: Option<u64>, think_ms: u64, pieces: u64) -> Request {
    let turn = Turn {
        session: SessionId(session),
        parent: parent.map(SessionId),
        think: Duration::from_millis(think_ms),
    };
    let (tokens, hash_ids) = (64 * pieces as u32, (0..pieces).map(|piece| 1000 * session + piece).collect());
    Request { turn: Some(turn), hash_ids, hashed_tokens: tokens, ..Request::new(Duration::ZERO, tokens, 10) }
}

fn of_sessions(requests: impl IntoIterator<Item = Request>) -> Trace {
    Trace { hash_tokens: 64, ..trace(requests) }
}

fn run_sessions(pool: &ReplayPool, trace: &Trace, threads: usize, sessions: SessionOptions) -> Outcome {
    replay(pool, trace, &Options::new(trace, threads).with_sessions(trace, sessions), go_on)
}

/// Sessions of three turns, each second one with a subagent.
fn agents(sessions: u64) -> Trace {
    of_sessions((0..sessions).flat_map(|session| {
        let id = 2 * session;
        let subagent = (session % 2 == 0).then(|| turn(id + 1, Some(id), 2, 1 + session % 3));
        let turns = [0, 1, 2].map(|more| turn(id, None, 30 * session, 2 + more + session % 4));
        let [first, second, third] = turns;
        [Some(first), subagent, Some(second), Some(third)].into_iter().flatten()
    }))
}

#[test]
fn times_follow_the_cost_model() {
    let trace = of_sessions([turn(0, None, 0, 1), turn(0, None, 500, 2), turn(1, None, 0, 1)]);
    let costs = Costs::USUAL.prefill_rate(1000).answer_token(Duration::from_millis(5));
    let outcome =
        run_sessions(&caching(100, Fault::None), &trace, 1, SessionOptions { at_once: 1, costs, ..AT_ONCE });
    assert!(outcome.is_sound(3), "{outcome:?}");
    assert_eq!(outcome.sessions, Some((2, Ended { sessions: 2, subagents: 0 })));
    // 5 + 64 ms; of the second prompt, 64 tokens are cached.
    let first = &outcome.tally.first_token;
    assert_eq!((first.count(), first.at(0.0) / 1_000_000, first.at(1.0) / 1_000_000), (3, 68, 69));
    // Three prompts and answers of ten tokens, and a think time.
    assert_eq!(outcome.virtual_time, Duration::from_millis(3 * (69 + 50) + 500));
    assert_eq!((outcome.tally.prompt_tokens, outcome.tally.recomputed_tokens), (256, 0));
}

/// A request waits while another one's prompt is computed.
#[test]
fn the_first_token_waits_in_the_queue() {
    let trace = of_sessions([turn(0, None, 0, 4), turn(1, None, 0, 4)]);
    let options = Options { step_tokens: 256, ..Options::new(&trace, 1) }.with_sessions(&trace, AT_ONCE);
    let outcome = replay(&caching(100, Fault::None), &trace, &options, go_on);
    let first = &outcome.tally.first_token;
    // 10 ms, and 10 us a token; the second step also decodes a token of the first request.
    let [earlier, later] = [0.5, 1.0].map(|share| first.at(share) / 10_000);
    assert!((1256 - 2..=1256 + 2).contains(&earlier), "{earlier}");
    assert!((1256 + 1266 - 3..=1256 + 1266 + 3).contains(&later), "{later}");
}

/// The pool holds one of the sessions, which evict each other's prompts.
#[test]
fn evicted_prompts_are_recomputed() {
    let trace = of_sessions([
        turn(0, None, 0, 4),
        turn(1, None, 1000, 4),
        turn(0, None, 2000, 4),
        turn(1, None, 2000, 4),
    ]);
    let run = |blocks| run_sessions(&caching(blocks, Fault::None), &trace, 1, AT_ONCE);
    let [small, large] = [17, 100].map(run);
    assert!(small.is_sound(4) && large.is_sound(4), "{small:?} {large:?}");
    // All but the last block, in which the last token is computed again.
    assert_eq!((large.tally.recomputed_tokens, large.tally.hit_blocks), (0, 30));
    assert_eq!(small.tally.recomputed_tokens, 480 - 16 * small.tally.hit_blocks);
    assert!(small.tally.hit_blocks < 30, "{small:?}");
}

/// Also if threads preempt each other, and some requests are larger than the pool.
#[test]
fn every_session_ends() {
    let mut trace = agents(30);
    trace.requests.insert(5, turn(7, None, 0, 60));
    let requests = trace.requests.len() as u64;
    for blocks in [30, 40, 400] {
        for threads in [1, 2, 3] {
            for at_once in [1, 4, 100] {
                let options = SessionOptions { at_once, ..AT_ONCE };
                let outcome = run_sessions(&caching(blocks, Fault::None), &trace, threads, options);
                let what = format!("{blocks} blocks, {threads} threads, {at_once} at once: {outcome:?}");
                assert!(outcome.is_sound(requests as usize), "{what}");
                let too_large = u64::from(blocks < 240);
                assert_eq!(outcome.tally.rejected, too_large, "{what}");
                assert_eq!(outcome.tally.first_token.count(), requests - too_large, "{what}");
                let ended = Ended { sessions: 31, subagents: 15 };
                assert_eq!(outcome.sessions, Some((31, ended)), "{what}");
            }
        }
    }
}

#[test]
fn a_replay_on_one_thread_is_the_same_each_time() {
    let trace = agents(20);
    let at_once = SessionOptions { at_once: 8, ..AT_ONCE };
    let run = || {
        let tally = run_sessions(&caching(50, Fault::None), &trace, 1, at_once).tally;
        (tally.hit_blocks, tally.recomputed_tokens, tally.preempted, tally.first_token.mean())
    };
    let first = run();
    assert!(first.1 > 0, "{first:?}");
    assert_eq!(first, run());
}

/// Think times are hours, and answers a second: a thread without work must not run ahead.
#[test]
fn threads_agree_on_the_time() {
    let turns = |session| (0..4).map(move |pieces| turn(session, None, 3_600_000 * session, 1 + pieces));
    let trace = of_sessions((0..6).flat_map(turns));
    for threads in [1, 2, 4] {
        let options = SessionOptions { at_once: 6, ..AT_ONCE };
        let outcome = run_sessions(&caching(500, Fault::None), &trace, threads, options);
        let longest = Duration::from_nanos(outcome.tally.first_token.at(1.0));
        assert!(longest < Duration::from_millis(100), "{threads} threads: {longest:?}");
        // Five sixths of the mean think time of 2.5 hours, and four think times of the last
        // session.
        let hours = outcome.virtual_time.as_secs() / 3600;
        assert_eq!(hours, 22, "{threads} threads");
    }
}
