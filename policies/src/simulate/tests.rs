//! Contenders on generated prompts.

use super::*;

fn prompts(requests: &[&[u64]]) -> Prompts {
    Prompts::of((0u64..).zip(requests.iter().copied()))
}

fn contender(name: &str) -> Contender {
    name.parse().unwrap()
}

fn hits(name: &str, prompts: &Prompts, blocks: usize) -> usize {
    (contender(name).hit_rate(prompts, blocks, Requests::AtOnce).unwrap() * prompts.total() as f64).round()
        as usize
}

#[test]
fn names_lead_to_contenders() {
    for one in Contender::all() {
        assert_eq!(one.name().parse(), Ok(one));
    }
    assert_eq!(Contender::LRU.name(), "lru");
    assert!("mru".parse::<Contender>().unwrap_err().contains("lru, priority, s3-fifo"));
}

#[test]
fn with_full_capacity_all_contenders_have_equal_hits() {
    let prompts = prompts(&[&[1, 2, 3], &[1, 2, 4], &[5], &[1, 2, 3, 6], &[5, 7, 2]]);
    assert_eq!((prompts.distinct(), prompts.total()), (8, 14));
    for one in Contender::all() {
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
        let bound = contender("clairvoyant").hit_rate(&prompts, blocks, Requests::AtOnce);
        for one in Contender::all() {
            assert!(
                one.hit_rate(&prompts, blocks, Requests::AtOnce) <= bound,
                "{one} of {blocks}: {requests:?}"
            );
        }
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
    assert_eq!((all.len(), all[0].len(), all[0][0].len(), done.into_inner()), (2, 5, 3, 30));
    assert_eq!(all[0], all[1]);
    let rates = &all[0];
    let (text, picture) = (chart(rates), draw(&[("a & b".to_owned(), rates.clone())]));
    for one in Contender::all() {
        assert!(text.contains(one.name()) && picture.contains(one.name()), "{one}");
    }
    assert!(text.contains("12.5 %") && text.contains("100 %"), "{text}");
    assert!(picture.contains("a &amp; b"));
    let running = measure(&[&prompts], &contenders, &[0.5], Requests::Running, || ());
    let names: Vec<_> = running[0].iter().map(|policy| policy[0].contender.name()).collect();
    assert_eq!(names, ["lru", "priority", "clairvoyant"]);
    assert_eq!(chart(&[]).lines().count(), 13, "no rates are not a panic");
}

fn arrival<'a>(at_ms: u64, prompt: &'a [u64], answer: &'a [u64], answer_ms: u64) -> Arrival<'a> {
    Arrival { at_ms, prompt, answer, own: 0, prompt_ms: 10, answer_ms }
}

fn running_hits(name: &str, arrivals: &[Arrival<'_>], blocks: usize) -> usize {
    let prompts = Prompts::of_arrivals(arrivals.iter().copied());
    let rate = contender(name).hit_rate(&prompts, blocks, Requests::Running).unwrap();
    (rate * prompts.total() as f64).round() as usize
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
    for name in ["lru", "priority", "clairvoyant"] {
        assert_eq!(running_hits(name, &requests, 5), 3, "{name}: 1 and 2 are evicted for 5 and 6");
        assert_eq!(running_hits(name, &requests, 6), 4, "{name}: 2 and 3 are");
        assert_eq!(running_hits(name, &requests, 8), 5, "{name}");
    }
    assert_eq!(contender("sieve").hit_rate(&Prompts::default(), 1, Requests::Running), None);
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
        let rate =
            |name| contender(name).hit_rate(&prompts, prompts.capacity(share), Requests::Running).unwrap();
        assert!(rate("lru") > 0.0 && rate("clairvoyant") > rate("lru"), "{share}");
    }
}
