//! Generated workloads, each of one kind of requests: what a policy meets that was not fitted to
//! it.
//!
//! Equal builds give equal workloads. Blocks have 512 tokens; times are those of an engine that
//! computes 100,000 prompt tokens and, for each request, 50 tokens of an answer per second.

use super::prompts::{Arrival, Prompts};

const BLOCK_MS: u64 = 5;
const ANSWER_BLOCK_MS: u64 = 10_000;

/// A generated workload.
pub struct Workload {
    /// What its requests are.
    pub name: &'static str,
    /// The requests.
    pub prompts: Prompts,
}

/// A generator of random numbers (splitmix64), independent of library versions.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ bits >> 31
    }

    fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.unit() * bound as f64) as usize
    }

    fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.unit()).ln()
    }

    /// Returns a lognormal number: half of them are below `median`, a sixth above `median *
    /// e^sigma`.
    fn spread(&mut self, median: f64, sigma: f64) -> f64 {
        let normal = (-2.0 * (1.0 - self.unit()).ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos();
        median * (sigma * normal).exp()
    }

    /// Returns a number below `bound`; small ones are the most frequent, in proportion to
    /// `1 / (number + 1)`.
    fn popular(&mut self, bound: usize) -> usize {
        (((bound as f64 + 1.0).powf(self.unit()) - 1.0) as usize).min(bound - 1)
    }
}

/// A request, before the requests are sorted by arrival.
struct Draft {
    at_ms: f64,
    prompt: Vec<u64>,
    answer: Vec<u64>,
}

/// Conversations: a shared beginning, and turns whose prompt is all text before.
struct Chats {
    /// Milliseconds from one to the next.
    gap_ms: f64,
    beginnings: usize,
    beginning_blocks: usize,
    first_blocks: f64,
    turn_blocks: f64,
    answer_blocks: usize,
    /// The probability of another turn.
    goes_on: f64,
    think_ms: f64,
    /// The probability that a turn takes back the one before.
    taken_back: f64,
}

/// What a workload is made of.
struct Writer {
    random: Random,
    next_id: u64,
    drafts: Vec<Draft>,
}

impl Writer {
    fn new(seed: u64) -> Self {
        Self { random: Random(seed), next_id: 0, drafts: Vec::new() }
    }

    fn ids(&mut self, blocks: usize) -> Vec<u64> {
        let first = self.next_id;
        self.next_id += blocks as u64;
        (first..self.next_id).collect()
    }

    fn some_ids(&mut self, median: f64) -> Vec<u64> {
        let blocks = self.random.spread(median, 0.8).clamp(1.0, 200.0) as usize;
        self.ids(blocks)
    }

    fn add(&mut self, at_ms: f64, prompt: Vec<u64>, answer: Vec<u64>) {
        self.drafts.push(Draft { at_ms, prompt, answer });
    }

    fn chats(mut self, from_ms: f64, until_ms: f64, kind: &Chats) -> Self {
        let beginnings: Vec<_> = (0..kind.beginnings).map(|_| self.ids(kind.beginning_blocks)).collect();
        let mut begins_ms = from_ms;
        while begins_ms < until_ms {
            begins_ms += self.random.exponential(kind.gap_ms);
            let mut text = match kind.beginnings {
                0 => Vec::new(),
                bound => beginnings[self.random.popular(bound)].clone(),
            };
            text.extend(self.some_ids(kind.first_blocks));
            let mut at_ms = begins_ms;
            loop {
                let answer = self.ids(kind.answer_blocks);
                self.add(at_ms, text.clone(), answer.clone());
                if self.random.unit() >= kind.goes_on || text.len() > 240 {
                    break;
                }
                if self.random.unit() >= kind.taken_back {
                    text.extend(answer);
                    text.extend(self.some_ids(kind.turn_blocks));
                }
                let busy_ms = kind.answer_blocks as f64 * ANSWER_BLOCK_MS as f64;
                at_ms += busy_ms + self.random.spread(kind.think_ms, 1.0);
            }
        }
        self
    }

    /// Prompts that never return, under shared beginnings.
    fn once(mut self, until_ms: f64, gap_ms: f64, beginnings: usize, blocks: f64) -> Self {
        let beginnings: Vec<_> = (0..beginnings).map(|_| self.ids(4)).collect();
        let mut at_ms = 0.0;
        while at_ms < until_ms {
            at_ms += self.random.exponential(gap_ms);
            let mut prompt = match beginnings.len() {
                0 => Vec::new(),
                bound => beginnings[self.random.below(bound)].clone(),
            };
            prompt.extend(self.some_ids(blocks));
            self.add(at_ms, prompt, Vec::new());
        }
        self
    }

    /// Texts that return, each with an end of its own: by popularity, or one after the other.
    fn texts(mut self, from_ms: f64, until_ms: f64, gap_ms: f64, texts: usize, in_turn: bool) -> Self {
        let texts: Vec<_> = (0..texts).map(|_| self.some_ids(8.0)).collect();
        let (mut at_ms, mut next) = (from_ms, 0);
        while at_ms < until_ms {
            at_ms += if in_turn { gap_ms } else { self.random.exponential(gap_ms) };
            let mut prompt = match in_turn {
                true => texts[next % texts.len()].clone(),
                false => texts[self.random.popular(texts.len())].clone(),
            };
            next += 1;
            prompt.extend(self.ids(1));
            self.add(at_ms, prompt, Vec::new());
        }
        self
    }

    fn done(mut self, name: &'static str) -> Workload {
        // Without new conversations the last turns of the old ones would come to an empty pool.
        self.drafts.retain(|draft| draft.at_ms < HOUR);
        self.drafts.sort_by(|a, b| a.at_ms.total_cmp(&b.at_ms));
        let arrivals = self.drafts.iter().map(|Draft { at_ms, prompt, answer }| Arrival {
            at_ms: *at_ms as u64,
            prompt,
            answer,
            own: usize::from(answer.is_empty()),
            prompt_ms: prompt.len() as u64 * BLOCK_MS,
            answer_ms: answer.len().max(1) as u64 * ANSWER_BLOCK_MS,
        });
        Workload { name, prompts: Prompts::of_arrivals(arrivals) }
    }
}

const MINUTE: f64 = 60e3;
const HOUR: f64 = 60.0 * MINUTE;

const CHATS: Chats = Chats {
    gap_ms: 2500.0,
    beginnings: 8,
    beginning_blocks: 4,
    first_blocks: 3.0,
    turn_blocks: 1.0,
    answer_blocks: 1,
    goes_on: 0.75,
    think_ms: 40e3,
    taken_back: 0.0,
};

const LONG_CHATS: Chats = Chats {
    gap_ms: 4000.0,
    beginnings: 0,
    first_blocks: 20.0,
    turn_blocks: 3.0,
    think_ms: 300e3,
    goes_on: 0.7,
    ..CHATS
};

const AGENTS: Chats = Chats {
    gap_ms: 8000.0,
    beginnings: 3,
    beginning_blocks: 10,
    first_blocks: 4.0,
    goes_on: 0.9,
    think_ms: 2e3,
    taken_back: 0.2,
    ..CHATS
};

/// Returns the workloads of a seed.
pub fn workloads(seed: u64) -> Vec<Workload> {
    let writer = |number: u64| Writer::new(seed << 32 | number);
    vec![
        writer(1).chats(0.0, HOUR, &CHATS).done("chats with time to think"),
        writer(2).chats(0.0, HOUR, &LONG_CHATS).done("long chats, long pauses, nothing shared"),
        writer(3)
            .texts(0.0, HOUR, 1500.0, 400, false)
            .once(HOUR, 3000.0, 0, 10.0)
            .done("templates, and one-off prompts"),
        writer(4).chats(0.0, HOUR, &AGENTS).done("agents in quick steps, some taken back"),
        writer(5).once(HOUR, 1000.0, 3, 10.0).done("one-off prompts under three system prompts"),
        writer(6).texts(0.0, HOUR, 700.0, 600, true).done("a loop"),
        writer(7).chats(0.0, HOUR, &CHATS).texts(0.0, HOUR, 2000.0, 300, true).done("chats, and a loop"),
        writer(8).chats(0.0, HOUR, &CHATS).once(HOUR, 1000.0, 0, 12.0).done("chats, and one-off prompts"),
        writer(9).texts(0.0, HOUR, 600.0, 4000, false).done("questions about documents, by popularity"),
        writer(10)
            .chats(0.0, 20.0 * MINUTE, &LONG_CHATS)
            .texts(20.0 * MINUTE, 40.0 * MINUTE, 500.0, 300, true)
            .chats(40.0 * MINUTE, HOUR, &CHATS)
            .done("long chats, then a loop, then short chats"),
        writer(11)
            .chats(0.0, HOUR, &LONG_CHATS)
            .chats(0.0, HOUR, &AGENTS)
            .once(HOUR, 4000.0, 0, 10.0)
            .done("long chats, agents, and one-off prompts"),
    ]
}
