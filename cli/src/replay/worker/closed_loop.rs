//! What a replay of [sessions](super::super::sessions) measures, and tells the pool.

use std::time::Duration;

use kvpool::prefix::policy::Millis;

use super::super::scheduler::{Job, Running};
use super::{Open, Worker};

impl Worker<'_> {
    /// Counts the tokens of a prompt at its first admission, and those that were computed before
    /// and are not cached any more.
    pub(super) fn count_recomputed(&mut self, job: &mut Job, cached: u64) {
        if job.attempt == 0 {
            self.tally.prompt_tokens += job.prompt;
            // A hit has whole blocks, and leaves the last token to be computed.
            let block_tokens = self.shape.block_tokens as u64;
            let known = self.at.clock.known_tokens(job.request).min(job.prompt - 1);
            job.computed = known - known % block_tokens;
        }
        self.tally.recomputed_tokens += job.computed.saturating_sub(cached);
    }

    /// Records the time to the first token of the sequences whose prompts end in this step.
    pub(super) fn note_first_tokens(&mut self, end_ns: u64) {
        for &place in &self.advanced {
            let Running { job, held, .. } = &mut self.scheduler.running()[place];
            if *held >= job.prompt && !job.is_answered {
                job.is_answered = true;
                self.tally.first_token.record(end_ns.saturating_sub(job.arrival_ns));
            }
        }
    }

    /// Tells the pool when the session of a completed request is to return, if the replay does.
    pub(super) fn expect_return(&self, running: &mut Running<Open>, end_ns: u64) {
        let tells = self.at.options.sessions.is_some_and(|sessions| sessions.tells_returns);
        let think = tells.then(|| self.at.clock.think_after(running.job.request)).flatten();
        if let Some(think) = think {
            let at = Duration::from_nanos(end_ns).saturating_add(think);
            running.sequence.sequence.expect_return(Millis(at.as_millis() as u64));
        }
    }
}
