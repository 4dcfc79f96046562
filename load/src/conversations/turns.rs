//! Conversations whose turns can each be generated from a seed and a number.
//!
//! So a node that takes over a sequence knows its text from the sequence's id. Turns are numbered
//! in the order in which [`OPEN`] conversations alternate:
//!
//! | number | conversation | turn |
//! |---|---|---|
//! | `n` | `n / (OPEN * TURNS) * OPEN + n % OPEN` | `n / OPEN % TURNS` |
//!
//! Lengths are those of [`Conversations`](super::Conversations). System prompts and documents are
//! the same for all seeds, so that sequences of different nodes share blocks: the documents are the
//! cluster's prefixes that do not fit into one node's cache. Arrival times are zero.

use std::time::Duration;

use rand::{Rng, RngExt, SeedableRng};
use rand_distr::{Distribution, Zipf};
use rand_pcg::Pcg64Mcg;

use super::{
    ANSWER_TOKENS, CONTEXT_TOKENS_MAX, DOCUMENT_SHARE, DOCUMENT_TOKENS, MESSAGE_TOKENS, SYSTEM_PROMPT_SKEW,
    SYSTEM_PROMPTS, SYSTEM_TOKENS,
};
use crate::request::{HASH_BLOCK_TOKENS, Request};

const OPEN: u64 = 32;

const TURNS: u64 = 5;

/// Number of documents shared by conversations of all seeds, and the exponent of their popularity.
/// Each follows the system prompt of its number.
const DOCUMENTS: u64 = 64;
const DOCUMENT_SKEW: f64 = 0.6;

/// Hash ids per text: more than the longest has blocks.
const HASH_IDS: u64 = 1024;

/// Generators of the lengths of system prompts and documents, distinct from all seeds, which have
/// 21 bits.
const SYSTEM: u64 = 1 << 63;
const DOCUMENT: u64 = 1 << 62;

/// Returns the turn of this number in the conversations of a seed.
pub fn turn(seed: u32, number: u32) -> Request {
    let number = u64::from(number);
    let conversation = number / (OPEN * TURNS) * OPEN + number % OPEN;
    let mut rng = rng(u64::from(seed) << 32 | conversation);
    let drawn = |rng: &mut Pcg64Mcg, count: u64, skew: f64| {
        Zipf::new(count as f64, skew).expect("a positive count and skew").sample(rng) as u64 - 1
    };
    let mut system = drawn(&mut rng, SYSTEM_PROMPTS as u64, SYSTEM_PROMPT_SKEW);
    let own = rng.next_u64();
    let document = rng.random_bool(DOCUMENT_SHARE).then(|| drawn(&mut rng, DOCUMENTS, DOCUMENT_SKEW));
    if let Some(document) = document {
        system = document % SYSTEM_PROMPTS as u64;
    }
    let system_tokens = SYSTEM_TOKENS.draw_tokens(&mut self::rng(SYSTEM | system));
    let mut prompt = system_tokens;
    if let Some(document) = document {
        prompt += DOCUMENT_TOKENS.draw_tokens(&mut self::rng(DOCUMENT | document));
    }
    let shared_tokens = prompt;
    let mut draw = || (MESSAGE_TOKENS.draw_tokens(&mut rng), ANSWER_TOKENS.draw_tokens(&mut rng));
    let (message, mut answer) = draw();
    prompt += message;
    for _ in 0..number / OPEN % TURNS {
        let (message, next) = draw();
        if prompt + answer + message > CONTEXT_TOKENS_MAX {
            break;
        }
        prompt += answer + message;
        answer = next;
    }
    // The end of a shared text that does not fill a block differs between conversations, or
    // documents.
    let of_system = u64::from(system_tokens / HASH_BLOCK_TOKENS);
    let shared = u64::from(shared_tokens / HASH_BLOCK_TOKENS);
    let blocks = u64::from((prompt + answer).div_ceil(HASH_BLOCK_TOKENS));
    let id = |block| match document {
        _ if block < of_system => system * HASH_IDS + block,
        Some(document) if block < shared => (SYSTEM_PROMPTS as u64 + document) * HASH_IDS + block,
        _ => own.wrapping_add(block),
    };
    Request {
        arrival: Duration::ZERO,
        input_tokens: prompt,
        output_tokens: answer,
        hash_ids: (0..blocks).map(id).collect(),
        hashed_tokens: prompt + answer,
        turn: None,
    }
}

fn rng(of: u64) -> Pcg64Mcg {
    Pcg64Mcg::seed_from_u64(of)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn common(a: &Request, b: &Request) -> usize {
        a.hash_ids.iter().zip(&b.hash_ids).take_while(|(a, b)| a == b).count()
    }

    #[test]
    fn turns_of_a_conversation_repeat_what_was_said() {
        let mut grown = 0;
        for first in 0..OPEN as u32 {
            let turns: Vec<_> = (0..TURNS as u32).map(|turn| first + turn * OPEN as u32).collect();
            for pair in turns.windows(2) {
                let (before, after) = (turn(7, pair[0]), turn(7, pair[1]));
                assert!(after.tokens() >= before.tokens());
                assert_eq!(common(&before, &after), before.hash_ids.len());
                grown += u32::from(after.tokens() > before.tokens());
            }
        }
        assert!(grown > 100, "{grown}");
    }

    #[test]
    fn conversations_share_system_prompts_and_documents_also_between_seeds() {
        let all: Vec<_> =
            (0..3).flat_map(|seed| (0..OPEN as u32).map(move |n| (seed, turn(seed, n)))).collect();
        let system_blocks = (SYSTEM_TOKENS.max as u32 / HASH_BLOCK_TOKENS) as usize;
        let (mut shared, mut documents) = (0, 0);
        for (place, (seed, a)) in all.iter().enumerate() {
            for (other, b) in &all[..place] {
                let common = common(a, b);
                assert!(common < a.hash_ids.len().max(b.hash_ids.len()), "each has a part of its own");
                // Every id after the system prompt belongs to a document of both.
                let is_shared = |id: &u64| *id < (SYSTEM_PROMPTS as u64 + DOCUMENTS) * HASH_IDS;
                assert!(a.hash_ids[..common].iter().all(is_shared), "{a:?} {b:?}");
                shared += usize::from(common > 0);
                documents += usize::from(seed != other && common > system_blocks);
            }
            assert_eq!(a.hash_ids.len(), a.tokens().div_ceil(u64::from(HASH_BLOCK_TOKENS)) as usize);
        }
        assert!(shared > 100 && documents > 3, "{shared} {documents}");
    }

    #[test]
    fn a_turn_depends_on_its_seed_and_number_alone() {
        for number in [0, 1, 31, 32, 160, 9999, u32::MAX >> 1] {
            assert_eq!(turn(3, number).hash_ids, turn(3, number).hash_ids);
        }
        assert_ne!(turn(3, 5).hash_ids, turn(4, 5).hash_ids);
    }
}
