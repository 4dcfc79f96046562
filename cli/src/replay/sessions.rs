//! Sessions in a closed loop: which request arrives when. Pure bookkeeping, without pool or
//! threads.
//!
//! A number of sessions are open at a time, from the first of the trace on; when one ends, the next
//! begins. The first ones begin one after another, within a mean think time, because a crowd of
//! first prompts would dominate the longest times to a first token. A request arrives after the end
//! of its session's previous answer and its think time. A subagent begins after the answer of its
//! parent before it, and counts as a part of it: several run at a time, and the parent's next
//! request waits for the ends of all.
//!
//! ```text
//! parent    request ──answer──┬───────── think time ────────┬─ request ──answer
//! subagent                    └─ think ─ request ── answer ─┘  (the later of the two)
//! ```
//!
//! A request without a session is a session of its own.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};

use kvpool::SessionId;
use kvpool_load::{Request, Turn};

/// The next arrival, as a thread may know it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Next {
    /// At this time, in nanoseconds.
    At(u64),
    /// A running request of another thread decides it.
    Undecided,
    /// No request is left.
    Never,
}

/// The sessions that have ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Ended {
    /// Sessions, without subagents.
    pub sessions: u64,
    /// Subagents of sessions.
    pub subagents: u64,
}

#[derive(Clone, Copy)]
enum Step {
    Request(u32),
    /// A session, by its index.
    Subagent(usize),
}

/// A session; it has a step at least.
#[derive(Default)]
struct Session {
    parent: Option<usize>,
    steps: Vec<Step>,
    /// Steps begun.
    begun: usize,
    /// The end of the last answer.
    end_ns: u64,
    /// Subagents that run, and the last end of one.
    running: usize,
    joined_ns: u64,
}

/// See the [module](self).
pub struct Sessions {
    sessions: Vec<Session>,
    /// The session of each request, by its index, and the think time before it.
    requests: Vec<(usize, u64)>,
    /// Sessions that have not begun, without subagents.
    waiting: VecDeque<usize>,
    /// Requests by their arrival; the earliest on top.
    due: BinaryHeap<Reverse<(u64, u32)>>,
    taken: u32,
    /// Requests taken and not ended, of each thread.
    running: Vec<usize>,
    ended: Ended,
    /// Hash ids of prompts taken, and the tokens of their piece.
    seen: HashMap<u64, u32>,
    hash_tokens: u32,
}

impl Sessions {
    /// Creates the sessions of a trace's requests, and begins `at_once` of them.
    pub fn new(requests: &[Request], hash_tokens: u32, at_once: usize, threads: usize) -> Self {
        let mut this = Self {
            sessions: Vec::new(),
            requests: Vec::with_capacity(requests.len()),
            waiting: VecDeque::new(),
            due: BinaryHeap::new(),
            taken: 0,
            running: vec![0; threads],
            ended: Ended::default(),
            seen: HashMap::new(),
            hash_tokens,
        };
        let mut by_id = HashMap::new();
        for (request, index) in requests.iter().zip(0..) {
            let session = match request.turn {
                Some(turn) => this.session_of(turn, &mut by_id),
                None => this.add(),
            };
            this.sessions[session].steps.push(Step::Request(index));
            let think = request.turn.map_or(0, |turn| turn.think.as_nanos() as u64);
            this.requests.push((session, think));
        }
        let is_outer = |&session: &usize| this.sessions[session].parent.is_none();
        this.waiting = (0..this.sessions.len()).filter(is_outer).collect();
        let think_ns: u128 = this.requests.iter().map(|&(_, think_ns)| u128::from(think_ns)).sum();
        let mean_ns = think_ns / this.requests.len().max(1) as u128;
        for number in 0..at_once.min(this.waiting.len()) {
            this.begin_next((mean_ns * number as u128 / at_once as u128) as u64);
        }
        this
    }

    fn add(&mut self) -> usize {
        self.sessions.push(Session::default());
        self.sessions.len() - 1
    }

    /// Returns the session of a turn. A new one that has a parent becomes the parent's next step.
    fn session_of(&mut self, turn: Turn, by_id: &mut HashMap<SessionId, usize>) -> usize {
        if let Some(&session) = by_id.get(&turn.session) {
            return session;
        }
        let parent = turn.parent.map(|id| *by_id.entry(id).or_insert_with(|| self.add()));
        let session = self.add();
        by_id.insert(turn.session, session);
        self.sessions[session].parent = parent;
        if let Some(parent) = parent {
            self.sessions[parent].steps.push(Step::Subagent(session));
        }
        session
    }

    /// Returns the number of sessions, without subagents.
    pub fn count(&self) -> usize {
        self.sessions.iter().filter(|session| session.parent.is_none()).count()
    }

    fn begin_next(&mut self, at_ns: u64) {
        if let Some(session) = self.waiting.pop_front() {
            self.begin(session, at_ns);
        }
    }

    fn begin(&mut self, session: usize, at_ns: u64) {
        self.sessions[session].end_ns = at_ns;
        self.proceed(session);
    }

    /// Begins the next steps of a session, up to a request that arrives later or waits for
    /// subagents.
    fn proceed(&mut self, mut session: usize) {
        loop {
            let this = &mut self.sessions[session];
            match this.steps.get(this.begun).copied() {
                Some(Step::Subagent(subagent)) => {
                    this.begun += 1;
                    this.running += 1;
                    let at_ns = this.end_ns;
                    self.begin(subagent, at_ns);
                }
                _ if this.running > 0 => return,
                Some(Step::Request(index)) => {
                    this.begun += 1;
                    let (_, think_ns) = self.requests[index as usize];
                    let at_ns = this.end_ns.saturating_add(think_ns).max(this.joined_ns);
                    self.due.push(Reverse((at_ns, index)));
                    return;
                }
                None => {
                    let end_ns = this.end_ns.max(this.joined_ns);
                    let Some(parent) = this.parent else {
                        self.ended.sessions += 1;
                        return self.begin_next(end_ns);
                    };
                    self.ended.subagents += 1;
                    let parent_session = &mut self.sessions[parent];
                    parent_session.running -= 1;
                    parent_session.joined_ns = parent_session.joined_ns.max(end_ns);
                    session = parent;
                }
            }
        }
    }

    /// Takes the earliest request for a thread, if it has arrived by `now_ns`: its index, arrival
    /// and number in this order.
    pub fn take_due(&mut self, thread: usize, now_ns: u64) -> Option<(u32, u64, u32)> {
        let &Reverse((at_ns, index)) = self.due.peek().filter(|Reverse((at_ns, _))| *at_ns <= now_ns)?;
        self.due.pop();
        self.running[thread] += 1;
        self.taken += 1;
        Some((index, at_ns, self.taken - 1))
    }

    /// Returns the next arrival, if no request of another thread can end before it and have an
    /// earlier one follow.
    pub fn next(&self, thread: usize, clock_ns: impl Fn(usize) -> u64) -> Next {
        let mut others = (0..self.running.len()).filter(|&other| self.running[other] > 0 && other != thread);
        match self.due.peek() {
            None if self.running.iter().all(|&running| running == 0) => Next::Never,
            Some(&Reverse((at_ns, _))) if others.all(|other| clock_ns(other) >= at_ns) => Next::At(at_ns),
            _ => Next::Undecided,
        }
    }

    /// Ends a request that a thread has taken: completed or rejected.
    pub fn end(&mut self, thread: usize, request: u32, at_ns: u64) {
        self.running[thread] -= 1;
        let (session, _) = self.requests[request as usize];
        self.sessions[session].end_ns = at_ns;
        self.proceed(session);
    }

    /// Returns the think time after a request, before the next one of its session.
    pub fn think_after(&self, request: u32) -> Option<u64> {
        let (session, _) = self.requests[request as usize];
        let Session { steps, begun, .. } = &self.sessions[session];
        steps[*begun..].iter().find_map(|step| match step {
            Step::Request(next) => Some(self.requests[*next as usize].1),
            Step::Subagent(_) => None,
        })
    }

    /// Returns the tokens of a prompt with which an earlier one began too.
    pub fn known_tokens(&mut self, request: &Request) -> u64 {
        let (mut known, mut is_known, mut rest) = (0, true, request.hashed_tokens);
        for &id in &request.hash_ids {
            let tokens = rest.min(self.hash_tokens);
            rest -= tokens;
            let seen = self.seen.entry(id).or_insert(0);
            known += if is_known { (*seen).min(tokens) } else { 0 };
            // A piece that was not full goes on differently, or as no request has computed it.
            is_known &= *seen == self.hash_tokens;
            *seen = tokens.max(*seen);
        }
        known.min(request.input_tokens).into()
    }

    /// Returns the sessions that have ended.
    pub fn ended(&self) -> Ended {
        self.ended
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const S: u64 = 1_000_000_000;

    fn request(session: u64, parent: Option<u64>, think_s: u64) -> Request {
        let turn = Turn {
            session: SessionId(session),
            parent: parent.map(SessionId),
            think: Duration::from_secs(think_s),
        };
        Request { turn: Some(turn), ..Request::new(Duration::ZERO, 64, 1) }
    }

    /// Serves every request for a second, one at a time, and returns their arrivals in seconds.
    fn serve(requests: &[Request], at_once: usize) -> (Vec<(u32, u64)>, Ended) {
        let mut sessions = Sessions::new(requests, 64, at_once, 1);
        let (mut order, mut now_ns) = (Vec::new(), 0);
        while let Next::At(at_ns) = sessions.next(0, |_| 0) {
            now_ns = at_ns.max(now_ns);
            let (index, at_ns, number) = sessions.take_due(0, now_ns).unwrap();
            assert_eq!(number as usize, order.len());
            order.push((index, at_ns / S));
            now_ns += S;
            sessions.end(0, index, now_ns);
        }
        assert_eq!(sessions.next(0, |_| 0), Next::Never);
        (order, sessions.ended())
    }

    #[test]
    fn a_request_follows_the_answer_and_the_think_time() {
        let requests = [request(0, None, 0), request(1, None, 0), request(0, None, 10), request(1, None, 3)];
        let (order, ended) = serve(&requests, 2);
        // The second session begins after half of the mean think time of 3.25 s.
        assert_eq!(order, [(0, 0), (1, 1), (3, 5), (2, 11)]);
        assert_eq!(ended, Ended { sessions: 2, subagents: 0 });
    }

    #[test]
    fn the_next_session_begins_when_one_ends() {
        let mut requests = vec![request(0, None, 0), request(0, None, 5), request(1, None, 0)];
        requests.push(Request::new(Duration::from_secs(100), 64, 1));
        let (order, ended) = serve(&requests, 1);
        assert_eq!(order, [(0, 0), (1, 6), (2, 7), (3, 8)], "one without a session is one");
        assert_eq!(ended, Ended { sessions: 3, subagents: 0 });
        assert_eq!(Sessions::new(&requests, 64, 1, 1).count(), 3);
    }

    /// Two subagents, one of which has one of its own; the parent's think time is shorter.
    #[test]
    fn a_parent_waits_for_its_subagents() {
        let requests = [
            request(0, None, 0),
            request(1, Some(0), 2),
            request(2, Some(0), 4),
            request(3, Some(2), 1),
            request(2, Some(0), 3),
            request(0, None, 1),
            request(4, Some(0), 0),
        ];
        let (order, ended) = serve(&requests, 3);
        // Session 0 answers until 1, 1 until 4, 2 until 6, 3 from 7 to 8; 2 goes on at 6 + 3.
        assert_eq!(order, [(0, 0), (1, 3), (2, 5), (3, 7), (4, 9), (5, 10), (6, 11)]);
        assert_eq!(ended, Ended { sessions: 1, subagents: 4 });
    }

    #[test]
    fn a_thread_does_not_run_ahead_of_an_answer_that_may_be_followed() {
        // The second session begins at 7 s.
        let requests = [request(0, None, 0), request(0, None, 2), request(1, None, 40)];
        let mut sessions = Sessions::new(&requests, 64, 2, 2);
        assert_eq!(sessions.take_due(0, 0), Some((0, 0, 0)));
        assert_eq!(sessions.take_due(1, 46 * S), None);
        let next = |sessions: &Sessions, clock_ns| sessions.next(1, |_| clock_ns);
        assert_eq!([S, 47 * S].map(|at| next(&sessions, at)), [Next::Undecided, Next::At(47 * S)]);
        assert_eq!(sessions.think_after(0), Some(2 * S));
        sessions.end(0, 0, 4 * S);
        assert_eq!(next(&sessions, S), Next::At(6 * S));
        assert_eq!((sessions.take_due(1, 6 * S), sessions.think_after(1)), (Some((1, 6 * S, 1)), None));
        assert_eq!(sessions.take_due(0, 47 * S), Some((2, 47 * S, 2)));
        assert_eq!(next(&sessions, S), Next::Undecided);
        sessions.end(1, 1, 6 * S);
        sessions.end(0, 2, 51 * S);
        assert_eq!(next(&sessions, S), Next::Never);
    }

    #[test]
    fn tokens_are_known_from_earlier_prompts() {
        let mut sessions = Sessions::new(&[], 64, 1, 1);
        let mut known = |ids: &[u64], hashed_tokens, input_tokens| {
            let request = Request::new(Duration::ZERO, input_tokens, 0);
            sessions.known_tokens(&Request { hash_ids: ids.to_vec(), hashed_tokens, ..request })
        };
        assert_eq!(known(&[1, 2], 100, 100), 0);
        assert_eq!(known(&[1, 2, 3], 160, 160), 100, "the piece had 36 tokens");
        assert_eq!(known(&[1, 4, 3], 160, 160), 64, "another prefix");
        assert_eq!(known(&[1, 2, 3], 160, 130), 130, "up to the answer");
        assert_eq!(known(&[], 0, 50), 0);
    }
}
