//! Requests, the stream of their answers, and the choice of tokens.

use tokio::sync::mpsc::UnboundedSender;

/// Maximum number of answers of one request.
pub const ANSWERS_MAX: u32 = 16;

/// A request to the engine.
#[derive(Clone, Debug)]
pub struct Request {
    /// The prompt.
    pub prompt: Vec<u32>,
    /// Number of tokens to decode for each answer.
    pub tokens: usize,
    /// Number of answers, which share the blocks of the prompt.
    pub answers: u32,
    /// How the tokens are chosen.
    pub sampling: Sampling,
    /// Number of tokens that may be drafted per step.
    pub drafts: usize,
    /// Whether it precedes requests that are not urgent.
    pub is_urgent: bool,
}

/// How tokens are chosen. The same logits always give the same token.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Sampling {
    /// 0 for the most probable token.
    pub temperature: f32,
    /// Seed of the draws.
    pub seed: u64,
}

/// A part of an answer. The stream of a request ends with the last answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Event {
    /// The next token of an answer.
    Token {
        /// Number of the answer, from 0.
        answer: u32,
        /// The token.
        token: u32,
        /// Hash of the bits of the logits from which it was chosen.
        digest: u64,
    },
    /// The end of an answer.
    Finished {
        /// Number of the answer.
        answer: u32,
    },
}

/// The order of jobs: urgent ones first, then by arrival.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Rank {
    /// False precedes true.
    pub can_wait: bool,
    /// Number of the request, in order of arrival.
    pub arrival: u64,
    /// Number of the answer.
    pub answer: u32,
}

impl Rank {
    /// Returns the id of the job's sequence.
    pub fn sequence(&self) -> kvpool::SequenceId {
        kvpool::SequenceId(self.arrival * u64::from(ANSWERS_MAX) + u64::from(self.answer))
    }
}

/// One answer in the making.
pub struct Job {
    /// Its place in the order.
    pub rank: Rank,
    /// The prompt and the decoded tokens.
    pub tokens: Vec<u32>,
    /// Number of tokens at which it ends.
    pub tokens_max: usize,
    /// Answers to be forked off when the prompt is computed.
    pub forks: u32,
    /// How its tokens are chosen.
    pub sampling: Sampling,
    /// Number of tokens that may be drafted per step.
    pub drafts: usize,
    /// Where its tokens go. A closed stream cancels the job.
    pub events: UnboundedSender<Event>,
}

impl Job {
    /// Chooses the next token, and sends it. Returns the token.
    pub fn push(&mut self, logits: &[f32]) -> u32 {
        let token = sample(logits, self.sampling, self.rank.answer, self.tokens.len());
        self.tokens.push(token);
        let event = Event::Token { answer: self.rank.answer, token, digest: digest(logits) };
        // A stream that was closed just now cancels the job before its next step.
        let _ = self.events.send(event);
        token
    }

    /// Returns whether the last token ends the answer.
    pub fn is_done(&self, end: Option<u32>) -> bool {
        self.tokens.len() >= self.tokens_max || (end.is_some() && self.tokens.last().copied() == end)
    }

    /// Returns a job for another answer, which has all tokens of this one.
    pub fn forked(&self, answer: u32) -> Self {
        Self {
            rank: Rank { answer, ..self.rank },
            tokens: self.tokens.clone(),
            forks: 0,
            events: self.events.clone(),
            ..*self
        }
    }

    /// Returns drafts for the next tokens.
    pub fn draft(&self) -> &[u32] {
        // The answer's last token is chosen, not drafted.
        let most = self.drafts.min((self.tokens_max - self.tokens.len()).saturating_sub(1));
        if self.forks > 0 { &[] } else { draft(&self.tokens, most) }
    }
}

/// Returns at most `most` drafts: the tokens that followed the last occurrence of the last two
/// tokens.
pub(crate) fn draft(tokens: &[u32], most: usize) -> &[u32] {
    let [before @ .., _, _] = tokens else { return &[] };
    if most == 0 {
        return &[];
    }
    let last = &tokens[before.len()..];
    let found = (0..before.len()).rev().find(|&at| tokens[at..at + 2] == *last);
    found.map_or(&[], |at| &tokens[at + 2..(at + 2 + most).min(tokens.len())])
}

/// Chooses the token at a position.
pub(crate) fn sample(logits: &[f32], sampling: Sampling, answer: u32, position: usize) -> u32 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if sampling.temperature <= 0.0 {
        return logits.iter().position(|&logit| logit == largest).unwrap_or(0) as u32;
    }
    let weight = |logit: f32| ((logit - largest) / sampling.temperature).exp();
    let total: f32 = logits.iter().map(|&logit| weight(logit)).sum();
    let draw = fastrand::Rng::with_seed(mix(mix(sampling.seed, u64::from(answer)), position as u64)).f32();
    let mut left = draw * total;
    let chosen = logits.iter().position(|&logit| {
        left -= weight(logit);
        left < 0.0
    });
    chosen.unwrap_or(logits.len() - 1) as u32
}

/// Hashes the bits of logits.
pub fn digest(logits: &[f32]) -> u64 {
    logits.iter().fold(0, |hash, logit| mix(hash, u64::from(logit.to_bits())))
}

/// Mixes a number into a hash (the finalizer of splitmix64).
fn mix(hash: u64, number: u64) -> u64 {
    let mut x = (hash ^ number).wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(tokens: &[u32]) -> Job {
        let (events, _) = tokio::sync::mpsc::unbounded_channel();
        let rank = Rank { can_wait: true, arrival: 1, answer: 0 };
        let sampling = Sampling { temperature: 0.0, seed: 0 };
        Job { rank, tokens: tokens.into(), tokens_max: 20, forks: 0, sampling, drafts: 3, events }
    }

    #[test]
    fn drafts_continue_the_last_occurrence() {
        assert_eq!(job(&[1, 2, 3, 4, 5, 1, 2]).draft(), [3, 4, 5]);
        assert_eq!(job(&[1, 2, 9, 1, 2, 3, 1, 2]).draft(), [3, 1, 2]);
        assert_eq!(job(&[7, 7, 7]).draft(), [7]);
        assert_eq!(job(&[1, 2, 3]).draft(), [0u32; 0]);
        assert_eq!(job(&[1]).draft(), [0u32; 0]);
        let short = Job { tokens_max: 9, ..job(&[1, 2, 3, 4, 5, 1, 2]) };
        assert_eq!(short.draft(), [3]);
    }

    #[test]
    fn draws_follow_the_logits_and_the_seed() {
        let logits = [0.0, 2.0, 1.0, 2.0];
        assert_eq!(sample(&logits, Sampling { temperature: 0.0, seed: 7 }, 0, 0), 1);
        let mut counts = [0; 4];
        for position in 0..10_000 {
            let sampling = Sampling { temperature: 1.0, seed: 7 };
            let token = sample(&logits, sampling, 1, position);
            assert_eq!(token, sample(&logits, sampling, 1, position));
            counts[token as usize] += 1;
        }
        // exp(0 - 2) : 1 : exp(1 - 2) : 1
        for (count, expected) in counts.into_iter().zip([540, 3_995, 1_470, 3_995i32]) {
            assert!((expected - count).abs() < 250, "{counts:?}");
        }
    }

    #[test]
    fn a_digest_tells_every_bit() {
        assert_ne!(digest(&[0.0, 1.0]), digest(&[-0.0, 1.0]));
        assert_ne!(digest(&[0.0, 1.0]), digest(&[1.0, 0.0]));
    }
}
