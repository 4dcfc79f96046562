//! Admission of prompts of 1,000 tokens: kvpool compared with kvbm-logical and an exact LRU behind
//! a mutex, in one run.

use kvpool_benches::reuse::{Case, Engine, Figures, Kvpool, Locked, Prompts, Requests, Turns, verify};
use kvpool_peers::KvbmReuse;

type Whole = KvbmReuse<true>;
type Hashed = KvbmReuse<false>;

const TURNS: Turns<4> = Turns::new([Kvpool::NAME, Locked::NAME, Whole::NAME, Hashed::NAME]);
const ROUNDS: usize = 21;

fn admit(threads: usize, name: &str, prompts: Prompts, is_full: bool) {
    let case = Case { prompts, threads, tokens: 1_000, blocks: 65_536, block_tokens: 16, is_full };
    let ours = Requests::<Kvpool>::new(case);
    let locked = Requests::<Locked>::new(case);
    let whole = Requests::<Whole>::new(case);
    let hashed = Requests::<Hashed>::new(case);
    let lines = ["admission, us", "whole request, us", "requests per ms"];
    let lines = lines.map(|line| format!("{name}: {line}"));
    let figures = |Figures { admission, request, rate }| [admission, request, rate];
    TURNS.measure(
        ROUNDS,
        lines.each_ref().map(String::as_str),
        [
            &mut || figures(ours.round()),
            &mut || figures(locked.round()),
            &mut || figures(whole.round()),
            &mut || figures(hashed.round()),
        ],
    );
}

fn main() {
    if !std::env::args().any(|argument| argument == "--bench") {
        println!("reuse: to measure, run `cargo bench --bench reuse` here");
        return;
    }
    verify::<Kvpool>();
    verify::<Locked>();
    verify::<Whole>();
    verify::<Hashed>();
    for threads in [1, 2] {
        TURNS.head(&format!("admit 1000 tokens, {threads} threads"));
        for (name, prompts, is_full) in [
            ("cached", Prompts::Own, false),
            ("cached, the same prompt", Prompts::Same, false),
            ("not cached", Prompts::Fresh, false),
            ("not cached, evicting", Prompts::Fresh, true),
            ("half cached, evicting", Prompts::Half, true),
        ] {
            if threads > 1 || prompts != Prompts::Same {
                admit(threads, name, prompts, is_full);
            }
        }
    }
}
