//! The tokens of a request: the ids by which the cache finds prefixes, and the content that
//! determines their bytes.
//!
//! A trace has no tokens, but an id per piece of a prompt, such as 512 tokens: equal ids mean equal
//! prefixes. Tokens are generated so that requests have exactly the common prefixes of the trace.
//!
//! | tokens | id |
//! |---|---|
//! | tokens with a hash id in the trace | number of the hash id · offset in its piece |
//! | all others | top bit set · the request |
//!
//! Prompts have hash ids, and so have answers in generated conversations, because the next turn
//! repeats them. Answers of real traces have none: only the request itself has their tokens, and
//! finds them again after a preemption.
//!
//! The [`Content`] of a token is chained over the same numbers, so a block of another text has
//! other bytes, which are detected on reading.

use std::collections::HashMap;
use std::ops::Range;

use crate::content::Content;
use crate::request::{HASH_BLOCK_TOKENS, Request};

/// The bit in the ids of tokens without a hash id.
const OWN: u32 = 1 << 31;

/// Returns the number of distinct hash id numbers. Beyond it numbers repeat, and with them texts.
const fn numbers(piece_tokens: u32) -> usize {
    (OWN / piece_tokens) as usize
}

/// The numbers of a trace's hash ids, and the length of a piece.
pub struct Texts {
    numbers: HashMap<u64, u32>,
    piece_tokens: u32,
}

impl Texts {
    /// Numbers the hash ids of a trace's requests, each of which covers `piece_tokens` tokens.
    pub fn of(requests: &[Request], piece_tokens: u32) -> Self {
        let mut numbers = HashMap::new();
        for hash_id in requests.iter().flat_map(|request| &request.hash_ids) {
            let next = (numbers.len() % self::numbers(piece_tokens)) as u32;
            numbers.entry(*hash_id).or_insert(next);
        }
        Self { numbers, piece_tokens }
    }

    /// Returns the text of one of these requests, by its index in the trace.
    pub fn text(&self, index: u32, request: &Request) -> Text {
        Text::of(index, request, self.piece_tokens, |hash_id| self.numbers[&hash_id])
    }
}

/// The tokens of one request.
#[derive(Clone, Debug)]
pub struct Text {
    /// Tokens of the pieces.
    known: usize,
    /// Tokens of each piece but the last.
    piece_tokens: usize,
    /// Number and content of each piece.
    pieces: Vec<(u32, Content)>,
    /// Id and content of all tokens after the pieces.
    own: (u32, Content),
}

impl Text {
    /// Returns the text of an attempt at a request without a prefix cache. Attempts share no token,
    /// so stale bytes are detected.
    pub fn of_attempt(request: u32, attempt: u32) -> Self {
        let own = (OWN | request, Content::of_attempt(request, attempt));
        Self { known: 0, piece_tokens: 1, pieces: Vec::new(), own }
    }

    /// Returns the text of a request of generated conversations, whose hash ids are numbers.
    pub fn of_conversation(index: u32, request: &Request) -> Self {
        let number = |hash_id| (hash_id % numbers(HASH_BLOCK_TOKENS) as u64) as u32;
        Self::of(index, request, HASH_BLOCK_TOKENS, number)
    }

    fn of(index: u32, request: &Request, piece_tokens: u32, number: impl Fn(u64) -> u32) -> Self {
        let mut content = Content::BEGIN;
        let pieces = request.hash_ids.iter().map(|&hash_id| {
            let number = number(hash_id);
            content = content.then(number);
            (number, content)
        });
        let pieces: Vec<_> = pieces.collect();
        let own = OWN | index;
        let (known, piece_tokens) = (request.hashed_tokens as usize, piece_tokens as usize);
        Self { known, piece_tokens, pieces, own: (own, content.then(own)) }
    }

    /// Returns the id of one token.
    pub fn id(&self, token: usize) -> u32 {
        if token < self.known {
            let piece = self.pieces[token / self.piece_tokens].0 as usize;
            (piece * self.piece_tokens + token % self.piece_tokens) as u32
        } else {
            self.own.0
        }
    }

    /// Returns the content of one token.
    pub fn content(&self, token: usize) -> Content {
        if token < self.known { self.pieces[token / self.piece_tokens].1 } else { self.own.1 }
    }

    /// Appends the ids of the first `tokens` tokens.
    pub fn ids(&self, tokens: usize, out: &mut Vec<u32>) {
        out.extend((0..tokens).map(|token| self.id(token)));
    }

    /// Splits a range of tokens where their content changes.
    pub fn parts(&self, tokens: Range<usize>) -> impl Iterator<Item = (Content, Range<usize>)> {
        let mut at = tokens.start;
        std::iter::from_fn(move || {
            let start = at;
            let (content, end) = if start < self.known {
                let piece = start / self.piece_tokens;
                (self.pieces[piece].1, ((piece + 1) * self.piece_tokens).min(self.known))
            } else {
                (self.own.1, usize::MAX)
            };
            at = end.min(tokens.end);
            (start < at).then_some((content, start..at))
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
    fn texts_have_the_common_prefixes_of_the_trace() {
        let requests = [
            request(&[70, 80, 90], 1100, 1100),
            request(&[70, 80, 95], 1100, 1100),
            request(&[70, 80], 1000, 1000),
            request(&[70, 80, 90], 1100, 1100),
            request(&[80], 300, 300),
            request(&[], 0, 1100),
            request(&[], 0, 1100),
        ];
        let texts = Texts::of(&requests, HASH_BLOCK_TOKENS);
        let all: Vec<Vec<u32>> =
            (0..).zip(&requests).map(|(i, request)| ids(&texts.text(i, request), 1200)).collect();
        let with_first: Vec<usize> = all.iter().map(|other| common(&all[0], other)).collect();
        assert_eq!(with_first, [1200, 1024, 1000, 1100, 0, 0, 0], "no other request has its answer");
        assert_eq!(common(&all[5], &all[6]), 0);
    }

    /// Two requests have equal bytes at a token exactly if they have equal tokens up to it.
    #[test]
    fn content_depends_on_all_tokens_before() {
        let requests =
            [request(&[1, 2, 3], 1300, 1300), request(&[1, 4, 3], 1300, 1300), request(&[1, 2], 900, 900)];
        let texts = Texts::of(&requests, HASH_BLOCK_TOKENS);
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
    fn parts_are_cut_at_pieces_and_at_the_end_of_the_known_tokens() {
        let request = request(&[7, 8], 600, 600);
        let text = Texts::of(std::slice::from_ref(&request), HASH_BLOCK_TOKENS).text(0, &request);
        let cuts: Vec<_> = text.parts(500..700).map(|(_, part)| part).collect();
        assert_eq!(cuts, [500..512, 512..600, 600..700]);
        assert_eq!(text.parts(5..5).count(), 0);
        let text = Texts::of(std::slice::from_ref(&request), 300).text(0, &request);
        let cuts: Vec<_> = text.parts(200..700).map(|(_, part)| part).collect();
        assert_eq!(cuts, [200..300, 300..600, 600..700]);
        let whole: Vec<_> = Text::of_attempt(1, 2).parts(0..9999).map(|(_, part)| part).collect();
        assert_eq!(whole, vec![0..9999; 1]);
    }
}
