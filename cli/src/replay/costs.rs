//! The virtual time of an engine's step.

use std::time::Duration;

/// The cost model of a step: a fixed part, and a part for each token of prompts and of answers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Costs {
    /// Virtual nanoseconds of a step without tokens.
    pub step_ns: u64,
    /// Those of a token of a prompt that was not cached.
    pub prompt_token_ns: u64,
    /// Those of a token of an answer, beside others of the same step.
    pub decode_token_ns: u64,
}

impl Costs {
    /// As of a model with 8 billion parameters on one fast device: 100,000 prompt tokens a second,
    /// and 80 steps a second at 25 sequences.
    pub const USUAL: Self = Self { step_ns: 10_000_000, prompt_token_ns: 10_000, decode_token_ns: 100_000 };

    /// Sets the prompt tokens a second, at least one.
    #[must_use]
    pub const fn prefill_rate(self, tokens_per_s: u64) -> Self {
        Self { prompt_token_ns: 1_000_000_000 / tokens_per_s, ..self }
    }

    /// Sets the time of a token of an answer, however many sequences decode.
    #[must_use]
    pub const fn answer_token(self, time: Duration) -> Self {
        Self { step_ns: time.as_nanos() as u64, decode_token_ns: 0, ..self }
    }

    /// Returns the virtual nanoseconds of a step with these tokens.
    pub const fn of_step(self, prompt_tokens: u64, decode_tokens: u64) -> u64 {
        self.step_ns + prompt_tokens * self.prompt_token_ns + decode_tokens * self.decode_token_ns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_costs_its_tokens() {
        assert_eq!(Costs::USUAL.of_step(100, 25), 13_500_000);
        let slow = Costs::USUAL.prefill_rate(2000).answer_token(Duration::from_millis(40));
        assert_eq!((slow.of_step(0, 9), slow.of_step(2000, 0)), (40_000_000, 1_040_000_000));
    }
}
