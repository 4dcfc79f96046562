//! Contenders on prompts made by hand, and on the conversation trace where that is at hand.

use std::path::PathBuf;

use super::*;
use crate::trace::{HashIds, ReadOptions, Trace};

fn prompts(requests: &[&[u64]]) -> Prompts {
    Prompts::of((0u64..).zip(requests.iter().copied()))
}

fn contender(name: &str) -> Contender {
    name.parse().unwrap()
}

fn hits(name: &str, prompts: &Prompts, blocks: usize) -> usize {
    (contender(name).hit_rate(prompts, blocks) * prompts.total() as f64).round() as usize
}

#[test]
fn names_lead_to_contenders() {
    for one in Contender::all() {
        assert_eq!(one.name().parse(), Ok(one));
    }
    assert_eq!([Contender::LRU, Contender::FORESIGHT].map(Contender::name), ["lru", "foresight"]);
    assert!("mru".parse::<Contender>().unwrap_err().contains("lru, priority, foresight, s3-fifo"));
}

#[test]
fn with_room_for_all_everybody_hits_what_can_be_hit() {
    let prompts = prompts(&[&[1, 2, 3], &[1, 2, 4], &[5], &[1, 2, 3, 6], &[5, 7, 2]]);
    assert_eq!((prompts.distinct(), prompts.total()), (8, 14));
    for one in Contender::all() {
        assert_eq!(hits(one.name(), &prompts, 8), 6, "{one}: a block after a miss is no hit");
    }
}

#[test]
fn lru_keeps_the_beginning_of_the_latest() {
    let prompts = prompts(&[&[1, 2, 3], &[4, 5], &[1, 2], &[4], &[4, 5]]);
    // 3 blocks: 1 stays of the first. Then 1, 2 and 4; then 4, 1, 2; then 4, 5 and 1.
    assert_eq!(hits("lru", &prompts, 3), 1 + 1 + 1);
}

#[test]
fn nobody_beats_who_knows_the_future() {
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
        let bound = contender("clairvoyant").hit_rate(&prompts, blocks);
        for one in Contender::all() {
            assert!(one.hit_rate(&prompts, blocks) <= bound, "{one} of {blocks}: {requests:?}");
        }
    }
}

#[test]
fn an_id_behind_another_block_is_another_block() {
    let prompts = prompts(&[&[1, 5], &[2, 5], &[1, 5]]);
    assert_eq!((prompts.distinct(), prompts.total()), (4, 6));
}

#[test]
fn a_trace_without_hashes_has_no_prompts() {
    let text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:00,10,1\n";
    let trace = Trace::read("azure".into(), text.as_bytes(), &ReadOptions::default()).unwrap();
    assert_eq!(Prompts::new(&trace), None);
}

#[test]
fn charts_and_pictures_show_every_policy() {
    let prompts = prompts(&[&[1, 2, 3], &[1, 2, 4], &[5], &[1, 2, 3, 6]]);
    let rates: Vec<Vec<Rate>> = Contender::all()
        .map(|contender| {
            let rate = |share| {
                let blocks = prompts.capacity(share);
                Rate { contender, share, blocks, hit_rate: contender.hit_rate(&prompts, blocks) }
            };
            [0.125, 0.5, 1.0].map(rate).to_vec()
        })
        .collect();
    let (text, picture) = (chart(&rates), draw(&[("a & b".to_owned(), rates.clone())]));
    for one in Contender::all() {
        assert!(text.contains(one.name()) && picture.contains(one.name()), "{one}");
    }
    assert!(text.contains("12.5 %") && text.contains("100 %"), "{text}");
    assert!(picture.contains("a &amp; b"));
    assert_eq!(chart(&[]).lines().count(), 13, "nothing measured is no panic");
}

/// The conversation trace; without it, says so.
fn conversation() -> Option<Prompts> {
    let folder = std::env::var_os("KVPOOL_TRACES").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/traces")),
        PathBuf::from,
    );
    let path = folder.join("mooncake_conversation.jsonl");
    if !path.exists() {
        eprintln!("SKIPPED: {} is not there", path.display());
        return None;
    }
    let options = ReadOptions { hash_ids: HashIds::Required, ..ReadOptions::default() };
    Prompts::new(&Trace::load(&path, &options).expect("a trace"))
}

/// At 5 %, where LRU is the best of those to compare with: the comparison is what others measured, and ours beats it.
#[test]
fn the_conversation_trace_comes_to_what_is_documented() {
    let Some(prompts) = conversation() else { return };
    assert_eq!((prompts.requests(), prompts.total(), prompts.distinct()), (12_031, 288_500, 182_790));
    let rate = |name: &str| contender(name).hit_rate(&prompts, prompts.capacity(0.05));
    for (name, measured) in [("lru", 0.196), ("s3-fifo", 0.187), ("sieve", 0.128), ("clairvoyant", 0.366)] {
        assert!((rate(name) - measured).abs() < 0.0015, "{name}: {}", rate(name));
    }
    assert!(rate("foresight") > 0.22, "{}", rate("foresight"));
}
