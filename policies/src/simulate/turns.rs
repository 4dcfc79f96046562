//! The order in which the requests of sessions follow one another.

use std::collections::HashMap;

use kvpool::SessionId;
use kvpool::prefix::policy::Millis;

/// The place of a request in a session. The turns of a session follow one another in the order of
/// their requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Turn {
    /// The session.
    pub session: SessionId,
    /// The session in which this one is nested, as a subagent: it begins after the last turn before
    /// it there, and the next turn there waits for its end.
    pub parent: Option<SessionId>,
    /// Milliseconds from the end of what the request waits for to its arrival.
    pub think_ms: u64,
}

/// A session while the order is built.
struct Session {
    turns: Vec<u32>,
    /// The last turn of the parent before it.
    after: Option<u32>,
    tree: u32,
}

/// The order of requests: a tree for each session that is not nested in another one.
#[derive(Clone, Default)]
pub(super) struct Turns {
    /// By request.
    turns: Vec<Option<Turn>>,
    /// The next turn of the session.
    next: Vec<Option<u32>>,
    /// The requests that wait for the end of each.
    then: Vec<Vec<u32>>,
    /// The number of ends that each waits for.
    waits: Vec<u32>,
    tree: Vec<u32>,
    /// By tree: its first request, and the number of requests that have not ended.
    trees: Vec<(u32, u32)>,
}

impl Turns {
    /// Returns the order of requests. A request without a turn is a session of its own.
    pub(super) fn new(requests: impl Iterator<Item = Option<Turn>>) -> Self {
        let turns: Vec<Option<Turn>> = requests.collect();
        let mut sessions: Vec<Session> = Vec::new();
        let mut numbers = HashMap::new();
        let mut trees: Vec<(u32, u32)> = Vec::new();
        let mut tree = Vec::new();
        for (turn, request) in turns.iter().zip(0..) {
            let known = turn.and_then(|turn| numbers.get(&turn.session).copied());
            let number = known.unwrap_or_else(|| {
                let parent = turn.and_then(|turn| numbers.get(&turn.parent?).copied());
                let parent = parent.map(|parent: usize| &sessions[parent]);
                let after = parent.and_then(|parent| parent.turns.last().copied());
                let tree = parent.map_or(trees.len() as u32, |parent| parent.tree);
                if parent.is_none() {
                    trees.push((request, 0));
                }
                sessions.push(Session { turns: Vec::new(), after, tree });
                turn.iter().for_each(|turn| _ = numbers.insert(turn.session, sessions.len() - 1));
                sessions.len() - 1
            });
            sessions[number].turns.push(request);
            tree.push(sessions[number].tree);
            trees[sessions[number].tree as usize].1 += 1;
        }
        let none = vec![None; turns.len()];
        let (then, waits) = (vec![Vec::new(); turns.len()], vec![0; turns.len()]);
        let mut order = Self { turns, next: none, then, waits, tree, trees };
        for session in &sessions {
            for pair in session.turns.windows(2) {
                order.next[pair[0] as usize] = Some(pair[1]);
                order.follow(pair[0], pair[1]);
            }
        }
        for session in &sessions {
            let Some(after) = session.after else { continue };
            order.follow(after, session.turns[0]);
            if let (Some(next), Some(&last)) = (order.next[after as usize], session.turns.last()) {
                order.follow(last, next);
            }
        }
        order
    }

    fn follow(&mut self, first: u32, then: u32) {
        self.then[first as usize].push(then);
        self.waits[then as usize] += 1;
    }

    /// Returns the first requests of the trees, in their order if `order` is 0, or else in one of
    /// the other orders.
    pub(super) fn starts(&self, order: u64) -> Vec<u32> {
        let mut starts: Vec<u32> = self.trees.iter().map(|&(first, _)| first).collect();
        let mut random = order;
        for at in (1..starts.len()).rev().filter(|_| order > 0) {
            random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            starts.swap(at, ((random >> 33) % (at as u64 + 1)) as usize);
        }
        starts
    }

    /// Returns the session of a request.
    pub(super) fn session(&self, request: u32) -> Option<SessionId> {
        self.turns[request as usize].map(|turn| turn.session)
    }

    fn think_ms(&self, request: u32) -> u64 {
        self.turns[request as usize].map_or(0, |turn| turn.think_ms)
    }

    /// Returns when the session of a request that ends now continues: never if that was its last
    /// turn. `None` if it waits for a subagent.
    pub(super) fn returns_at(&self, request: u32, now: u64) -> Option<Millis> {
        let Some(next) = self.next[request as usize] else { return Some(Millis(u64::MAX)) };
        (self.waits[next as usize] == 1).then(|| Millis(now.saturating_add(self.think_ms(next))))
    }

    /// Notes that a request has ended now. Calls `arrive` for each that waited for it alone, with
    /// the time of its arrival. Returns whether it was the last one of its tree.
    pub(super) fn ended(&mut self, request: u32, now: u64, mut arrive: impl FnMut(u64, u32)) -> bool {
        for then in std::mem::take(&mut self.then[request as usize]) {
            self.waits[then as usize] -= 1;
            if self.waits[then as usize] == 0 {
                arrive(now.saturating_add(self.think_ms(then)), then);
            }
        }
        let (_, left) = &mut self.trees[self.tree[request as usize] as usize];
        *left -= 1;
        *left == 0
    }
}
