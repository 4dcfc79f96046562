//! The tokens of a request: an id for each, by which the cache finds prefixes, and the content that its
//! bytes depend on.
//!
//! A trace says which prompts begin alike by an id for each 512 tokens, and has no tokens. So they are
//! generated: two requests have equal tokens exactly as far as the trace says so.
//!
//! | tokens | id |
//! |---|---|
//! | those with a hash id in the trace | number of the hash id · place among its 512 tokens |
//! | all others | top bit set · the request |
//!
//! The first are of prompts, and of answers in generated conversations, because the next turn repeats
//! them. The others are the answers of real traces, of which nothing is known: no other request has
//! them, and their own request finds them again after a preemption.
//!
//! Ids and bytes agree: the [`Content`] of a token is chained over the same numbers. A block of another
//! text has other bytes, which shows when it is read.

use std::collections::HashMap;
use std::ops::Range;

use super::content::Content;
use crate::trace::{HASH_BLOCK_TOKENS, Request};

/// Tokens of a piece of text that has a hash id.
const PIECE_TOKENS: usize = HASH_BLOCK_TOKENS as usize;

/// The ids of tokens that no hash id stands for.
const OWN: u32 = 1 << 31;

/// Distinct numbers of hash ids. Beyond that numbers repeat, and with them texts.
const NUMBERS: usize = OWN as usize / PIECE_TOKENS;

/// The numbers of a trace's hash ids.
pub struct Texts(HashMap<u64, u32>);

impl Texts {
    /// Those of these requests.
    pub fn of(requests: &[Request]) -> Self {
        let mut numbers = HashMap::new();
        for hash_id in requests.iter().flat_map(|request| &request.hash_ids) {
            let next = (numbers.len() % NUMBERS) as u32;
            numbers.entry(*hash_id).or_insert(next);
        }
        Self(numbers)
    }

    /// The text of one of these requests, at its place in the trace.
    pub fn text(&self, index: u32, request: &Request) -> Text {
        let mut content = Content::BEGIN;
        let pieces = request.hash_ids.iter().map(|hash_id| {
            let number = self.0[hash_id];
            content = content.then(number);
            (number, content)
        });
        let pieces: Vec<_> = pieces.collect();
        let own = OWN | index;
        Text { known: request.hashed_tokens as usize, pieces, own: (own, content.then(own)) }
    }
}

/// The tokens of one request.
#[derive(Clone, Debug)]
pub struct Text {
    /// Tokens that the pieces are.
    known: usize,
    /// The number of each piece, and the content of its tokens.
    pieces: Vec<(u32, Content)>,
    /// The same of all tokens after them.
    own: (u32, Content),
}

impl Text {
    /// Returns the text of an attempt at a request without a prefix cache. No two attempts have a token
    /// in common, so that bytes of the first are not taken for the second's.
    pub fn of_attempt(request: u32, attempt: u32) -> Self {
        Self { known: 0, pieces: Vec::new(), own: (OWN | request, Content::of_attempt(request, attempt)) }
    }

    /// The id of one token.
    pub fn id(&self, token: usize) -> u32 {
        let (number, offset) = self.at(token);
        number + offset
    }

    /// Adds the ids of the first `tokens` tokens.
    pub fn ids(&self, tokens: usize, out: &mut Vec<u32>) {
        out.reserve(tokens);
        for piece in self.split(0..tokens) {
            let first = self.id(piece.start);
            if piece.start < self.known {
                out.extend(first..first + piece.len() as u32);
            } else {
                out.extend(std::iter::repeat_n(first, piece.len()));
            }
        }
    }

    /// Cuts a range of tokens where their content changes.
    pub fn parts(&self, tokens: Range<usize>) -> impl Iterator<Item = (Content, Range<usize>)> {
        self.split(tokens).map(|part| {
            let content =
                if part.start < self.known { self.pieces[part.start / PIECE_TOKENS].1 } else { self.own.1 };
            (content, part)
        })
    }

    fn at(&self, token: usize) -> (u32, u32) {
        if token < self.known {
            (self.pieces[token / PIECE_TOKENS].0 * HASH_BLOCK_TOKENS, token as u32 % HASH_BLOCK_TOKENS)
        } else {
            (self.own.0, 0)
        }
    }

    fn split(&self, tokens: Range<usize>) -> impl Iterator<Item = Range<usize>> {
        let (mut at, known) = (tokens.start, self.known);
        std::iter::from_fn(move || {
            let start = at;
            let end = if start < known {
                ((start / PIECE_TOKENS + 1) * PIECE_TOKENS).min(known)
            } else {
                usize::MAX
            };
            at = end.min(tokens.end);
            (start < at).then_some(start..at)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::{HashMap, HashSet};
    use std::time::Duration;

    fn request(hash_ids: &[u64], hashed_tokens: u32, input_tokens: u32) -> Request {
        let hash_ids = hash_ids.to_vec();
        Request { hash_ids, hashed_tokens, ..Request::new(Duration::ZERO, input_tokens, 40) }
    }

    fn ids(text: &Text, tokens: usize) -> Vec<u32> {
        let mut ids = Vec::new();
        text.ids(tokens, &mut ids);
        assert!(ids.iter().zip(0..).all(|(&id, token)| id == text.id(token)));
        ids
    }

    fn common(a: &[u32], b: &[u32]) -> usize {
        a.iter().zip(b).take_while(|(a, b)| a == b).count()
    }

    #[test]
    fn texts_are_alike_as_far_as_the_trace_says() {
        let requests = [
            request(&[70, 80, 90], 1100, 1100),
            request(&[70, 80, 95], 1100, 1100),
            request(&[70, 80], 1000, 1000),
            request(&[70, 80, 90], 1100, 1100),
            request(&[80], 300, 300),
            request(&[], 0, 1100),
            request(&[], 0, 1100),
        ];
        let texts = Texts::of(&requests);
        let all: Vec<Vec<u32>> =
            (0..).zip(&requests).map(|(i, request)| ids(&texts.text(i, request), 1200)).collect();
        let with_first: Vec<usize> = all.iter().map(|other| common(&all[0], other)).collect();
        assert_eq!(with_first, [1200, 1024, 1000, 1100, 0, 0, 0], "no other request has its answer");
        assert_eq!(common(&all[5], &all[6]), 0);
    }

    /// What begins alike has equal bytes, and what does not has not, at every token.
    #[test]
    fn content_goes_with_the_tokens_before() {
        let requests =
            [request(&[1, 2, 3], 1300, 1300), request(&[1, 4, 3], 1300, 1300), request(&[1, 2], 900, 900)];
        let texts = Texts::of(&requests);
        let mut contents: HashMap<Vec<u32>, Content> = HashMap::new();
        let mut distinct = HashSet::new();
        for (index, request) in (0..).zip(&requests) {
            let text = texts.text(index, request);
            let ids = ids(&text, 1400);
            for (content, part) in text.parts(100..1400) {
                for token in part.step_by(50) {
                    let found = *contents.entry(ids[..=token].to_vec()).or_insert(content);
                    assert_eq!(found, content, "token {token} of request {index}");
                    distinct.insert((token, format!("{content:?}")));
                }
            }
        }
        assert_eq!(distinct.len(), contents.len());
    }

    #[test]
    fn parts_are_cut_at_pieces_and_at_the_end_of_what_is_known() {
        let text = Texts(HashMap::from([(7, 0), (8, 1)])).text(0, &request(&[7, 8], 600, 600));
        let cuts: Vec<_> = text.parts(500..700).map(|(_, part)| part).collect();
        assert_eq!(cuts, [500..512, 512..600, 600..700]);
        assert_eq!(text.parts(5..5).count(), 0);
        let whole: Vec<_> = Text::of_attempt(1, 2).parts(0..9999).map(|(_, part)| part).collect();
        assert_eq!(whole, vec![0..9999; 1]);
    }
}
