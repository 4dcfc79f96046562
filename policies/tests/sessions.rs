//! The policy of sessions beside LRU, on the sessions of coding agents: on those that it was not
//! tuned on, every second file. And on conversations without sessions, where it is LRU.

use std::path::{Path, PathBuf};

use kvpool_cli::prompts::{Pace, prompts};
use kvpool_cli::trace::{HashIds, ReadOptions, Trace};
use kvpool_policies::simulate::{Contender, Prompts, Requests, measure};

/// Without optimizations, one number of sessions in one order.
const AT_A_TIME: &[usize] = if cfg!(debug_assertions) { &[16] } else { &[8, 16, 28] };
const ORDERS: u32 = if cfg!(debug_assertions) { 1 } else { 4 };

const PACE: Pace = Pace { token_ms: 15, prefill_rate: Some(10_000) };

fn published(name: &str) -> Option<PathBuf> {
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/traces");
    let path = std::env::var_os("KVPOOL_TRACES").map_or_else(beside, PathBuf::from).join(name);
    if !path.exists() {
        eprintln!("SKIPPED: {} is not there; KVPOOL_TRACES names its directory", path.display());
        return None;
    }
    Some(path)
}

/// Returns the sessions in every second file of a folder, from the second on.
fn held_out(folder: &Path) -> Prompts {
    let files = std::fs::read_dir(folder).unwrap().map(|file| file.unwrap().path());
    let mut files: Vec<PathBuf> =
        files.filter(|file| file.extension().is_some_and(|e| e == "json")).collect();
    files.sort();
    let mut all: Option<Trace> = None;
    for (file, session) in files.iter().zip(0..).skip(1).step_by(2) {
        let options = ReadOptions { hash_ids: HashIds::Required, session, ..ReadOptions::default() };
        let mut trace = Trace::load(file, &options).unwrap();
        for turn in trace.requests.iter_mut().filter_map(|request| request.turn.as_mut()) {
            turn.session.0 += session << 32;
            turn.parent.iter_mut().for_each(|parent| parent.0 += session << 32);
        }
        match &mut all {
            None => all = Some(trace),
            Some(all) => all.requests.extend(trace.requests),
        }
    }
    let mut all = all.expect("the folder has sessions");
    all.requests.sort_by_key(|request| request.arrival);
    prompts(&all, PACE)
}

/// Capacities as shares of half of the sessions: 5, 10 and 20 % of all. Mean ratios to LRU's
/// recomputed tokens that must be reached: without hints, with think times, and with ends too.
const REACHED: &[(f64, [f64; 3])] = if cfg!(debug_assertions) {
    &[(0.2, [0.93, 0.62, 0.6])]
} else {
    &[(0.1, [0.99, 0.84, 0.83]), (0.2, [0.9, 0.6, 0.42]), (0.4, [0.84, 0.43, 0.1])]
};

#[test]
fn sessions_recompute_less_than_under_lru() {
    let Some(folder) = published("agentic") else { return };
    let prompts = held_out(&folder);
    assert_eq!(prompts.sessions(), 28);
    let shares: Vec<f64> = REACHED.iter().map(|&(share, _)| share).collect();
    // By capacity and policy: the product of the ratios.
    let mut products = vec![[1.0; 3]; shares.len()];
    for &at_a_time in AT_A_TIME {
        let requests = Requests::Sessions { at_a_time, orders: ORDERS };
        let rates = measure(&[&prompts], &Contender::OF_SESSIONS, &shares, requests, || ());
        for (at, product) in products.iter_mut().enumerate() {
            let recomputed: Vec<f64> =
                rates[0].iter().map(|policy| policy[at].recomputed.expect("in sessions")).collect();
            let [lru, ours @ .., bound] = &recomputed[..] else { panic!("{recomputed:?}") };
            let ratios: Vec<f64> = ours.iter().map(|recomputed| recomputed / lru).collect();
            eprintln!(
                "{at_a_time} sessions, {:.0} %: {ratios:.3?} of LRU, the bound is {:.3}",
                50.0 * shares[at],
                bound / lru
            );
            // Up to the effects of another order of arrivals, where running requests own most
            // blocks.
            assert!(ratios.iter().all(|&ratio| ratio <= 1.01), "{ratios:?}");
            product.iter_mut().zip(&ratios).for_each(|(product, ratio)| *product *= ratio);
        }
    }
    for (product, &(share, reached)) in products.iter().zip(REACHED) {
        let means = product.map(|product| product.powf(1.0 / AT_A_TIME.len() as f64));
        let is_reached = means.iter().zip(&reached).all(|(mean, reached)| mean <= reached);
        assert!(is_reached, "{:.0} %: {means:.3?} instead of {reached:.3?}", 50.0 * share);
    }
}

#[test]
fn without_sessions_it_has_the_hits_of_lru() {
    let Some(path) = published("mooncake_conversation.jsonl") else { return };
    let limit = cfg!(debug_assertions).then_some(3000);
    let options = ReadOptions { hash_ids: HashIds::Required, limit, ..ReadOptions::default() };
    let prompts = prompts(&Trace::load(&path, &options).unwrap(), Pace { token_ms: 14, prefill_rate: None });
    let contenders = ["lru", "sessions"].map(|name| name.parse().unwrap());
    for requests in [Requests::AtOnce, Requests::Running] {
        let rates = &measure(&[&prompts], &contenders, &[0.01, 0.05, 0.2], requests, || ())[0];
        for (lru, sessions) in rates[0].iter().zip(&rates[1]) {
            assert!(lru.hit_rate > 0.0);
            assert_eq!(
                (lru.hit_rate, lru.recomputed),
                (sessions.hit_rate, sessions.recomputed),
                "{requests:?}"
            );
        }
    }
}
