//! Contenders on generated prompts.

use kvpool::SessionId;

use super::*;

fn prompts(requests: &[&[u64]]) -> Prompts {
    Prompts::of((0u64..).zip(requests.iter().copied()))
}

fn contender(name: &str) -> Contender {
    name.parse().unwrap()
}

fn hits(name: &str, prompts: &Prompts, blocks: usize) -> usize {
    (rate(name, prompts, blocks, Requests::AtOnce).hit_rate * prompts.total() as f64).round() as usize
}

fn rate(name: &str, prompts: &Prompts, blocks: usize, requests: Requests) -> Rate {
    contender(name).rate(prompts, 0.0, blocks, requests).expect("it is simulated")
}

/// The contenders that are simulated if requests take no time.
fn at_once() -> impl Iterator<Item = Contender> {
    Contender::all().filter(|one| one.is_simulated(Requests::AtOnce))
}

#[test]
fn names_lead_to_contenders() {
    for one in Contender::all() {
        assert_eq!(one.name().parse(), Ok(one));
    }
    assert_eq!(Contender::LRU.name(), "lru");
    assert!("mru".parse::<Contender>().unwrap_err().contains("lru, priority, sessions, sessions-told, "));
}

#[test]
fn with_full_capacity_all_contenders_have_equal_hits() {
    let prompts = prompts(&[&[1, 2, 3], &[1, 2, 4], &[5], &[1, 2, 3, 6], &[5, 7, 2]]);
    assert_eq!((prompts.distinct(), prompts.total()), (8, 14));
    for one in at_once() {
        assert_eq!(hits(one.name(), &prompts, 8), 6, "{one}: a block after a miss is no hit");
    }
}

#[test]
fn lru_keeps_the_beginning_of_the_latest_prompts() {
    let prompts = prompts(&[&[1, 2, 3], &[4, 5], &[1, 2], &[4], &[4, 5]]);
    // With 3 blocks, 1 stays of the first prompt. Then 1, 2 and 4; then 4, 1, 2; then 4, 5 and 1.
    assert_eq!(hits("lru", &prompts, 3), 1 + 1 + 1);
}

#[test]
fn no_contender_exceeds_the_clairvoyant_bound() {
    let mut random = 1u64;
    let mut random = |below: u64| {
        random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (random >> 33) % below
    };
    let chats = (0..400).map(|_| {
        let (chat, turns) = (random(32), random(8));
        (0..=turns).map(|turn| chat * 8 + turn).collect()
    });
    let chats: Vec<Vec<u64>> = chats.collect();
    assert_bound(&chats, &[1, 2, 5, 20, 60, 150]);
    // The same few ids, after others each time.
    for _ in 0..200 {
        let shuffled = (0..6).map(|_| {
            let (first, step) = (random(5), random(4) + 1);
            (0..=random(3)).map(|place| (first + step * place) % 5).collect()
        });
        assert_bound(&shuffled.collect::<Vec<Vec<u64>>>(), &[1, 2, 3, 4]);
    }
}

fn assert_bound(requests: &[Vec<u64>], capacities: &[usize]) {
    let requests: Vec<&[u64]> = requests.iter().map(Vec::as_slice).collect();
    let prompts = prompts(&requests);
    for &blocks in capacities {
        let bound = hits("clairvoyant", &prompts, blocks);
        for one in at_once() {
            assert!(hits(one.name(), &prompts, blocks) <= bound, "{one} of {blocks}: {requests:?}");
        }
        assert_eq!(hits("sessions", &prompts, blocks), hits("lru", &prompts, blocks), "{requests:?}");
    }
}

#[test]
fn an_id_after_another_block_is_another_block() {
    let prompts = prompts(&[&[1, 5], &[2, 5], &[1, 5]]);
    assert_eq!((prompts.distinct(), prompts.total()), (4, 6));
}

#[test]
fn charts_and_pictures_show_every_policy() {
    let prompts = prompts(&[&[1, 2, 3], &[1, 2, 4], &[5], &[1, 2, 3, 6]]);
    let contenders: Vec<Contender> = Contender::all().collect();
    let done = AtomicUsize::new(0);
    let counted = || _ = done.fetch_add(1, Relaxed);
    let all = measure(&[&prompts, &prompts], &contenders, &[0.125, 0.5, 1.0], Requests::AtOnce, counted);
    assert_eq!((all.len(), all[0].len(), all[0][0].len(), done.into_inner()), (2, 6, 3, 36));
    assert_eq!(all[0], all[1]);
    let rates = &all[0];
    let (text, picture) = (chart(rates), draw(&[("a & b".to_owned(), rates.clone())]));
    for one in at_once() {
        assert!(text.contains(one.name()) && picture.contains(one.name()), "{one}");
    }
    assert!(text.contains("12.5 %") && text.contains("100 %"), "{text}");
    assert!(picture.contains("a &amp; b"));
    let running = measure(&[&prompts], &contenders, &[0.5], Requests::Running, || ());
    let names: Vec<_> = running[0].iter().map(|policy| policy[0].contender.name()).collect();
    assert_eq!(names, ["lru", "priority", "sessions", "clairvoyant"]);
    assert_eq!(chart(&[]).lines().count(), 13, "no rates are not a panic");
}

fn arrival<'a>(at_ms: u64, prompt: &'a [u64], answer: &'a [u64], answer_ms: u64) -> Arrival<'a> {
    Arrival { at_ms, prompt, answer, own: 0, prompt_ms: 10, answer_ms, turn: None }
}

fn running_hits(name: &str, arrivals: &[Arrival<'_>], blocks: usize) -> usize {
    let prompts = Prompts::of_arrivals(arrivals.iter().copied());
    (rate(name, &prompts, blocks, Requests::Running).hit_rate * prompts.total() as f64).round() as usize
}

#[test]
fn a_running_request_holds_its_blocks() {
    // While the second runs, only two of five blocks are for the cache and the third.
    let requests = [
        arrival(0, &[1, 2], &[3], 10),
        arrival(100, &[7, 8], &[9], 1000),
        arrival(200, &[5, 6], &[], 10),
        arrival(2000, &[1, 2], &[], 10),
        arrival(3000, &[7, 8, 9], &[], 10),
    ];
    for name in ["lru", "priority", "sessions", "clairvoyant"] {
        assert_eq!(running_hits(name, &requests, 5), 3, "{name}: 1 and 2 are evicted for 5 and 6");
        assert_eq!(running_hits(name, &requests, 6), 4, "{name}: 2 and 3 are");
        assert_eq!(running_hits(name, &requests, 8), 5, "{name}");
    }
    assert_eq!(contender("sieve").rate(&Prompts::default(), 0.0, 1, Requests::Running), None);
}

#[test]
fn a_prompt_is_found_once_it_is_computed() {
    let at = |at_ms| [arrival(0, &[1, 2], &[], 1000), arrival(at_ms, &[1, 2], &[], 10)];
    assert_eq!([5, 10, 500].map(|at_ms| running_hits("lru", &at(at_ms), 10)), [0, 2, 2]);
}

#[test]
fn a_request_waits_for_its_blocks() {
    let requests =
        [arrival(0, &[1, 2, 3], &[], 1000), arrival(1, &[4, 5, 6], &[], 10), arrival(2, &[1, 2, 3], &[], 10)];
    assert_eq!(running_hits("lru", &requests, 5), 2, "the third comes after the second");
    assert_eq!(running_hits("lru", &requests, 2), 0, "no request fits");
}

/// Chats, and prompts that never return, more than fit.
#[test]
fn no_policy_exceeds_the_bound_on_running_requests() {
    let mut random = 1u64;
    let mut random = |below: u64| {
        random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        (random >> 33) % below
    };
    let texts = (0..2000u64).map(|number| {
        let (text, turns) = if random(3) == 0 { (100 + number, 10) } else { (random(100), random(10)) };
        (number, (0..=turns).map(|turn| text * 11 + turn).collect::<Vec<_>>(), 10 + random(500))
    });
    let texts: Vec<_> = texts.collect();
    let arrivals =
        (texts.iter()).map(|(number, text, answer_ms)| arrival(number * 20, text, &[], *answer_ms));
    let prompts = Prompts::of_arrivals(arrivals);
    for share in [0.02, 0.05, 0.2] {
        let rate = |name| rate(name, &prompts, prompts.capacity(share), Requests::Running).hit_rate;
        assert!(rate("lru") > 0.0 && rate("clairvoyant") > rate("lru"), "{share}");
    }
}

/// A request of a session: the blocks `first..=last`, and the think time before it.
fn turn<'a>(session: u64, parent: Option<u64>, think_ms: u64, prompt: &'a [u64]) -> Arrival<'a> {
    let (session, parent) = (SessionId(session), parent.map(SessionId));
    let turn = Some(Turn { session, parent, think_ms });
    Arrival { prompt, prompt_ms: 10, answer_ms: 100, turn, ..Arrival::default() }
}

fn in_sessions(name: &str, arrivals: &[Arrival<'_>], blocks: usize, at_a_time: usize) -> (usize, usize) {
    let prompts = Prompts::of_arrivals(arrivals.iter().copied());
    let rate = rate(name, &prompts, blocks, Requests::Sessions { at_a_time, orders: 1 });
    let count = |rate: f64| (rate * prompts.total() as f64).round() as usize;
    (count(rate.hit_rate), count(rate.recomputed.expect("in sessions")))
}

const OF_SESSIONS: [&str; 5] = ["lru", "sessions", "sessions-told", "sessions-told-ends", "clairvoyant"];

#[test]
fn a_session_continues_after_its_think_time_and_the_next_one_after_its_end() {
    let arrivals = [
        turn(1, None, 0, &[1, 2]),
        turn(2, None, 0, &[11, 12]),
        turn(1, None, 1000, &[1, 2, 3]),
        turn(2, None, 1000, &[11, 12, 13]),
    ];
    for name in OF_SESSIONS {
        assert_eq!(in_sessions(name, &arrivals, 3, 1), (4, 0), "{name}: one after the other");
        assert_eq!(in_sessions(name, &arrivals, 6, 2), (4, 0), "{name}: side by side");
    }
    assert!(in_sessions("lru", &arrivals, 3, 2).1 > 0, "not enough for both");
    let prompts = Prompts::of_arrivals(arrivals.into_iter());
    assert_eq!(prompts.sessions(), 2);
}

#[test]
fn the_session_that_returns_last_is_evicted() {
    // The third begins when the first ends. Only the second returns.
    let arrivals = [
        turn(1, None, 0, &[1, 2]),
        turn(2, None, 0, &[11, 12]),
        turn(3, None, 0, &[21, 22]),
        turn(1, None, 3_000, &[1, 2]),
        turn(2, None, 900_000, &[11, 12]),
    ];
    let recomputed = |name| in_sessions(name, &arrivals, 4, 2).1;
    assert_eq!([recomputed("lru"), recomputed("sessions-told-ends"), recomputed("clairvoyant")], [2, 0, 0]);
    // All wait. The first returns before the second.
    let arrivals = [
        turn(1, None, 0, &[1, 2]),
        turn(2, None, 0, &[11, 12]),
        turn(3, None, 0, &[21, 22]),
        turn(1, None, 3_000, &[1, 2]),
        turn(2, None, 900_000, &[11, 12]),
        turn(3, None, 2_000, &[21, 22]),
    ];
    let recomputed = |name| in_sessions(name, &arrivals, 4, 3).1;
    assert_eq!(["sessions-told", "sessions-told-ends", "clairvoyant"].map(recomputed), [2, 2, 2]);
}

#[test]
fn a_subagent_runs_between_two_turns_of_its_parent() {
    let arrivals = [
        turn(1, None, 0, &[1, 2]),
        turn(7, Some(1), 50, &[1, 30]),
        turn(7, Some(1), 50, &[1, 30, 31]),
        turn(1, None, 100, &[1, 2, 3]),
        turn(2, None, 0, &[50]),
    ];
    let prompts = Prompts::of_arrivals(arrivals.into_iter());
    let mut turns = prompts.turns();
    assert_eq!((prompts.sessions(), turns.starts(0)), (2, vec![0, 4]));
    assert_eq!(turns.returns_at(0, 10), None, "it waits for the subagent");
    let mut arrived = Vec::new();
    let mut ended = |request, now| turns.ended(request, now, |at_ms, request| arrived.push((at_ms, request)));
    assert!(!ended(0, 10) && !ended(1, 100) && !ended(2, 200));
    assert!(ended(3, 400) && ended(4, 500));
    assert_eq!(arrived, [(60, 1), (150, 2), (300, 3)]);
    for name in OF_SESSIONS {
        assert_eq!(in_sessions(name, &arrivals, 20, 1), (1 + 2 + 2, 0), "{name}");
    }
}

#[test]
fn orders_are_permutations() {
    let arrivals: Vec<_> = (0..20).map(|session| turn(session, None, 0, &[])).collect();
    let turns = Prompts::of_arrivals(arrivals.into_iter()).turns();
    let (first, mut second) = (turns.starts(0), turns.starts(1));
    assert!(first.is_sorted() && second != first && second != turns.starts(2));
    second.sort_unstable();
    assert_eq!(first, second);
}

/// A request larger than the pool is served elsewhere, and its session goes on.
#[test]
fn a_session_outgrows_the_pool() {
    let arrivals = [turn(1, None, 0, &[1, 2]), turn(1, None, 10, &[1, 2, 3, 4]), turn(1, None, 10, &[1, 2])];
    assert_eq!(in_sessions("lru", &arrivals, 3, 1), (2, 0));
}
