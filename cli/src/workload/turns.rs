//! Conversations of which every turn can be made by itself, from a seed and its number.
//!
//! A node that takes over a sequence so knows its text from the sequence's id alone. Turns are
//! numbered in the order in which [`OPEN`] conversations at a time take turns:
//!
//! | number | conversation | turn |
//! |---|---|---|
//! | `n` | `n / (OPEN * TURNS) * OPEN + n % OPEN` | `n / OPEN % TURNS` |
//!
//! Lengths are those of [`Conversations`](super::Conversations). System prompts are the same for all
//! seeds, so that sequences of different nodes share blocks. Times of arrival are zero.

use std::time::Duration;

use rand::{Rng, RngExt, SeedableRng};
use rand_distr::{Distribution, Zipf};
use rand_pcg::Pcg64Mcg;

use super::{
    ANSWER_TOKENS, CONTEXT_TOKENS_MAX, DOCUMENT_SHARE, DOCUMENT_TOKENS, MESSAGE_TOKENS, SYSTEM_PROMPT_SKEW,
    SYSTEM_PROMPTS, SYSTEM_TOKENS,
};
use crate::trace::{HASH_BLOCK_TOKENS, Request};

/// Conversations that take turns.
const OPEN: u64 = 32;

/// Turns of each conversation.
const TURNS: u64 = 5;

/// Hash ids of one text: more than the longest has blocks.
const HASH_IDS: u64 = 1024;

/// The generator of the system prompts' lengths. No conversation has it: seeds have 32 bits.
const SYSTEM: u64 = 1 << 63;

/// Returns the turn of this number in the conversations of a seed.
pub fn turn(seed: u32, number: u32) -> Request {
    let number = u64::from(number);
    let conversation = number / (OPEN * TURNS) * OPEN + number % OPEN;
    let mut rng = rng(u64::from(seed) << 32 | conversation);
    let popularity = Zipf::new(SYSTEM_PROMPTS as f64, SYSTEM_PROMPT_SKEW).expect("a positive count and skew");
    let system = popularity.sample(&mut rng) as u64 - 1;
    let system_tokens = SYSTEM_TOKENS.draw_tokens(&mut self::rng(SYSTEM | system));
    let own = rng.next_u64();
    let mut prompt = system_tokens;
    if rng.random_bool(DOCUMENT_SHARE) {
        prompt += DOCUMENT_TOKENS.draw_tokens(&mut rng);
    }
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
    // The end of a system prompt that fills no block of its own differs between conversations.
    let shared = u64::from(system_tokens / HASH_BLOCK_TOKENS);
    let blocks = u64::from((prompt + answer).div_ceil(HASH_BLOCK_TOKENS));
    let id = |block| if block < shared { system * HASH_IDS + block } else { own.wrapping_add(block) };
    Request {
        arrival: Duration::ZERO,
        input_tokens: prompt,
        output_tokens: answer,
        hash_ids: (0..blocks).map(id).collect(),
        hashed_tokens: prompt + answer,
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
    fn conversations_differ_behind_the_system_prompt_also_between_seeds() {
        let first = |seed, number| turn(seed, number);
        let all: Vec<_> = (0..3).flat_map(|seed| (0..OPEN as u32).map(move |n| first(seed, n))).collect();
        let system_blocks = (SYSTEM_TOKENS.max as u32 / HASH_BLOCK_TOKENS) as usize;
        let mut shared = 0;
        for (place, a) in all.iter().enumerate() {
            for b in &all[..place] {
                assert!(common(a, b) <= system_blocks, "{a:?} {b:?}");
                shared += usize::from(common(a, b) > 0);
            }
            assert_eq!(a.hash_ids.len(), a.tokens().div_ceil(u64::from(HASH_BLOCK_TOKENS)) as usize);
        }
        assert!(shared > 100, "{shared}");
    }

    #[test]
    fn a_turn_depends_on_its_seed_and_number_alone() {
        for number in [0, 1, 31, 32, 160, 9999, u32::MAX >> 1] {
            assert_eq!(turn(3, number).hash_ids, turn(3, number).hash_ids);
        }
        assert_ne!(turn(3, 5).hash_ids, turn(4, 5).hash_ids);
    }
}
