//! The model, and a pool beside it.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use kvpool::hints::{Action, Hint, HintLimits, Outcome, Rejection, Target};
use kvpool::prefix::policy::{CachePriority, Millis};
use kvpool::prefix::{BlockHash, HashKey, PrefixConfig, PrefixKeys};
use kvpool::storage::KvLayout;
use kvpool::{AdmitRequest, AllocRequest, BlockId, Pool, Sequence, SequenceId, SessionId, Tokens};

use crate::prompts::BLOCK_TOKENS;

use super::{About, Asked, HintOperation};

/// Maximum number of full blocks in a prompt.
const BLOCKS_MAX: usize = 8;

/// Blocks of the pool.
const BLOCKS: usize = 64;

/// How a cached block without an owner stands in the order of eviction. Smaller goes first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Standing {
    /// Order of the hint, and of the release.
    Demoted(u64, u64),
    /// And whether it was retained since its release.
    Plain(u64, bool),
    /// Class, end of the retention, order of the hint or release; the order to which it returns.
    Retained(u8, u64, u64, u64),
}

impl Standing {
    fn released(self) -> u64 {
        match self {
            Self::Plain(released, _) | Self::Demoted(_, released) | Self::Retained(.., released) => released,
        }
    }

    /// Without its retention.
    fn ended(self) -> Self {
        match self {
            Self::Retained(.., released) => Self::Plain(released, true),
            other => other,
        }
    }
}

const PINNED: u8 = 3;

/// What is done to blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum What {
    Retain(u8, u64),
    Demote,
    Release,
}

impl What {
    fn is_pin(self) -> bool {
        matches!(self, Self::Retain(PINNED, _))
    }

    fn lasts(self) -> bool {
        matches!(self, Self::Retain(..))
    }
}

/// Whose blocks these are: of a session, of its requests or of a sequence.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Of {
    Session(u64),
    Hashes,
    /// And its session.
    Sequence(u64, Option<u64>),
}

#[derive(Clone, Debug)]
struct Block {
    owners: usize,
    standing: Standing,
    /// Sessions that used it; `None`: requests without one, each of which counts.
    users: Vec<Option<u64>>,
}

#[derive(Clone, Default)]
struct Session {
    granted: Option<(What, usize)>,
    hashes: Vec<BlockHash>,
}

/// A hint on tokens of an open sequence: the range, its blocks at most, and what.
type StandingHint = (Range<usize>, usize, What);

struct Open {
    id: u64,
    real: Sequence,
    session: Option<u64>,
    hashes: Vec<BlockHash>,
    hints: Vec<StandingHint>,
}

/// How a hint ends, and a number of blocks.
type Told = (&'static str, usize);

#[derive(Default)]
struct Found {
    placed: usize,
    owned: usize,
    left: Option<usize>,
}

struct Drive {
    pool: Pool,
    clock: Arc<AtomicU64>,
    blocks: BTreeMap<BlockHash, Block>,
    sessions: BTreeMap<u64, Session>,
    open: Vec<Open>,
    pins: BTreeMap<BlockId, u64>,
    pins_max: usize,
    order: u64,
    last: u64,
    /// Where the cached blocks are.
    ids: BTreeMap<BlockHash, BlockId>,
}

/// Runs the operations on a new pool with this budget of pinned blocks and on the model, and returns
/// the first difference.
///
/// # Errors
///
/// The index of the operation, and the difference.
pub fn run(pins_max: usize, operations: &[HintOperation]) -> Result<(), String> {
    let layout = KvLayout::named("tiny").expect("a known name");
    let bytes = (pins_max.min(BLOCKS) * layout.bytes_per_block()) as u64;
    let clock = Arc::new(AtomicU64::new(1_000));
    let of_cache = clock.clone();
    let cache = PrefixConfig::new().key(HashKey::from_bytes([7; 32])).tolerance(0.0);
    let cache = cache.clock(move || Millis(of_cache.load(Relaxed)));
    let builder = Pool::builder(layout).blocks(BLOCKS).magazine_blocks(4).threads(1).prefix_cache(cache);
    let pool = builder.hints(HintLimits::new().pinned_bytes(bytes)).build().expect("a valid pool");
    let mut drive = Drive {
        pool,
        clock,
        blocks: BTreeMap::new(),
        sessions: BTreeMap::new(),
        open: Vec::new(),
        pins: BTreeMap::new(),
        pins_max: pins_max.min(BLOCKS),
        order: 0,
        last: 0,
        ids: BTreeMap::new(),
    };
    for (step, operation) in operations.iter().enumerate() {
        drive.pass();
        let outcome = drive.step(operation).and_then(|()| drive.check());
        outcome.map_err(|what| format!("operation {step}: {operation:?}: {what}"))?;
    }
    while !drive.open.is_empty() {
        drive.close(0);
    }
    drive.check()?;
    drive.pool.audit().map(drop).map_err(|finding| finding.to_string())
}

impl Drive {
    fn now(&self) -> u64 {
        self.clock.load(Relaxed)
    }

    fn next(&mut self) -> u64 {
        self.order += 1;
        self.order
    }

    fn prompt(prompt: u8, tokens: usize) -> Vec<u32> {
        let (own, both) = (u32::from(prompt % 6), 100 + u32::from(prompt % 6 / 2));
        let shared = BLOCKS_MAX / 2 * BLOCK_TOKENS;
        let of = |at: usize| if at < shared { both } else { own };
        (0..tokens).map(|at| of(at) * 100_000 + at as u32).collect()
    }

    fn hashes(&self, prompt: u8, blocks: usize) -> Vec<BlockHash> {
        let cache = self.pool.prefix_cache().expect("a cache");
        let tokens = Self::prompt(prompt, blocks * BLOCK_TOKENS);
        cache.hashes(&PrefixKeys::new(), &tokens).expect("valid keys")
    }

    fn read_ids(&mut self) {
        self.ids = self.pool.cached_blocks().into_iter().map(|(id, hash)| (hash, id)).collect();
    }

    /// Retentions that have ended.
    fn pass(&mut self) {
        let now = self.now();
        for block in self.blocks.values_mut().filter(|block| block.owners == 0) {
            if matches!(block.standing, Standing::Retained(_, until, ..) if until <= now) {
                block.standing = block.standing.ended();
            }
        }
    }

    fn step(&mut self, operation: &HintOperation) -> Result<(), String> {
        match *operation {
            HintOperation::Open { session, prompt, blocks } => self.open(session, prompt, blocks),
            HintOperation::Close(pick) => {
                if let Some(index) = pick.index(self.open.len()) {
                    self.close(index);
                }
                Ok(())
            }
            HintOperation::Hint(ref about, asked) => self.hint(about, asked),
            HintOperation::Pass(ms) => {
                self.clock.fetch_add(ms.into(), Relaxed);
                Ok(())
            }
            HintOperation::Evict(blocks) => self.evict(1 + usize::from(blocks % 16)),
        }
    }

    fn open(&mut self, session: u8, prompt: u8, blocks: u8) -> Result<(), String> {
        let blocks = 1 + usize::from(blocks) % BLOCKS_MAX;
        let all = self.hashes(prompt, BLOCKS_MAX);
        // Otherwise its blocks would be cached twice.
        let is_prefix = all.is_sorted_by_key(|hash| !self.blocks.contains_key(hash));
        // Evictions only where they are compared.
        if !is_prefix || self.pool.free_blocks() <= blocks {
            return Ok(());
        }
        let session = Some(u64::from(session % 6)).filter(|&session| session > 0);
        self.last += 1;
        let tokens = Self::prompt(prompt, blocks * BLOCK_TOKENS + 1);
        let request = AdmitRequest::new(SequenceId(self.last), &tokens);
        let request = session.into_iter().fold(request, |request, id| request.session(SessionId(id)));
        let mut real = self.pool.admit(&request).map_err(|error| error.to_string())?;
        let hashes = all[..blocks].to_vec();
        let hits = hashes.iter().take_while(|hash| self.blocks.contains_key(hash)).count();
        same("cached tokens", &(hits * BLOCK_TOKENS), &real.len())?;
        let mut batch = self.pool.begin_batch();
        let missing = tokens.len() - real.len();
        batch.append(&mut real, Tokens::Announced(missing)).map_err(|error| error.to_string())?;
        batch.finish();
        for hash in &hashes {
            let new = Block { owners: 0, standing: Standing::Plain(0, false), users: Vec::new() };
            self.blocks.entry(*hash).or_insert(new).owners += 1;
        }
        self.open.push(Open { id: self.last, real, session, hashes, hints: Vec::new() });
        Ok(())
    }

    fn close(&mut self, index: usize) {
        let Open { id, real, session, hashes, hints } = self.open.swap_remove(index);
        drop(real);
        self.read_ids();
        for hash in hashes.iter().rev() {
            let order = self.next();
            let block = self.blocks.get_mut(hash).expect("in a sequence");
            block.users.push(session);
            block.owners -= 1;
            if block.owners == 0 {
                block.standing = Standing::Plain(order, false);
            }
        }
        if let Some(number) = session {
            let known = self.sessions.entry(number).or_default();
            let before = std::mem::replace(&mut known.hashes, hashes.clone());
            let granted = known.granted;
            if granted.is_some_and(|(what, _)| !what.lasts()) {
                known.granted = None;
            }
            let now = self.now();
            let lasts = |what| !matches!(what, What::Retain(_, until) if until <= now);
            if let Some((what, most)) = granted.filter(|&(what, _)| lasts(what)) {
                if what.is_pin() {
                    let same = hashes.iter().zip(&before).take_while(|(one, other)| one == other).count();
                    self.leave(&before[same..]);
                }
                self.carry_out(&hashes[..most.min(hashes.len())], what, Of::Session(number));
                if what == What::Release {
                    self.sessions.remove(&number);
                }
            }
        }
        for (tokens, most, what) in hints {
            let places = full_blocks(&tokens);
            let end = places.end.min(hashes.len()).min(places.start.saturating_add(most));
            let some = hashes.get(places.start..end).unwrap_or_default().to_vec();
            self.carry_out(&some, what, Of::Sequence(id, session));
        }
    }

    /// Ends the retention of blocks that their session has left.
    fn leave(&mut self, hashes: &[BlockHash]) {
        for hash in hashes {
            if let Some(block) = self.blocks.get_mut(hash) {
                self.pins.remove(&self.ids[hash]);
                if block.owners == 0 {
                    block.standing = block.standing.ended();
                }
            }
        }
    }

    /// Returns how many more blocks may be pinned.
    fn room(&self, skips: impl Fn(u64, &StandingHint) -> bool) -> usize {
        let all = self.open.iter().flat_map(|open| open.hints.iter().map(|hint| (open.id, hint)));
        let pins = all.filter(|&(id, hint)| hint.2.is_pin() && !skips(id, hint));
        let reserved: usize = pins.map(|(_, hint)| hint.1).sum();
        self.pins_max.saturating_sub(self.pins.len() + reserved)
    }

    fn drop_gone(&mut self) {
        let (now, blocks) = (self.now(), &self.blocks);
        let by_id: BTreeMap<BlockId, &Block> =
            self.ids.iter().filter_map(|(hash, &id)| Some((id, blocks.get(hash)?))).collect();
        self.pins.retain(|id, until| {
            let is_pinned = |block: &&&Block| {
                block.owners > 0 || matches!(block.standing, Standing::Retained(PINNED, ..))
            };
            *until > now && by_id.get(id).filter(is_pinned).is_some()
        });
    }

    fn carry_out(&mut self, hashes: &[BlockHash], what: What, of: Of) -> Found {
        let (mut found, mut has_looked, mut taken) = (Found::default(), false, BTreeSet::new());
        for (at, hash) in hashes.iter().enumerate() {
            let Some(block) = self.blocks.get(hash) else { continue };
            let (id, is_owned) = (self.ids[hash], block.owners > 0);
            if let What::Retain(PINNED, until) = what {
                let is_taken = if found.left.is_some() {
                    false
                } else if is_owned && !matches!(of, Of::Session(_)) {
                    true
                } else {
                    let skips = |open: u64, _: &StandingHint| matches!(of, Of::Sequence(id, _) if id == open);
                    if !self.pins.contains_key(&id) && self.room(skips) == 0 && !has_looked {
                        has_looked = true;
                        self.drop_gone();
                    }
                    let has_room = self.pins.contains_key(&id) || self.room(skips) > 0;
                    if has_room {
                        self.pins.insert(id, until);
                        // As soon as it is chosen: a look at all pins must find it.
                        if let Some(block) = self.blocks.get_mut(hash).filter(|_| !is_owned) {
                            block.standing = Standing::Retained(PINNED, until, 0, block.standing.released());
                        }
                    }
                    has_room
                };
                if !is_taken {
                    found.left.get_or_insert(at);
                    continue;
                }
            } else {
                self.pins.remove(&id);
                let others = match of {
                    Of::Hashes => self.users(hash, None),
                    Of::Session(session) | Of::Sequence(_, Some(session)) => {
                        self.users(hash, Some(Some(session)))
                    }
                    Of::Sequence(_, None) => self.users(hash, Some(None)),
                };
                if what == What::Release && others && !is_owned {
                    let block = self.blocks.get_mut(hash).expect("cached");
                    block.standing = block.standing.ended();
                    continue;
                }
            }
            if is_owned {
                found.owned += 1;
            } else {
                found.placed += 1;
                taken.insert(*hash);
            }
        }
        for hash in hashes.iter().rev().filter(|hash| taken.contains(hash)) {
            let order = self.next();
            let block = self.blocks.get_mut(hash).expect("cached");
            let released = block.standing.released();
            block.standing = match what {
                What::Retain(class, until) => Standing::Retained(class, until, order, released),
                What::Demote | What::Release => Standing::Demoted(order, released),
            };
        }
        found
    }

    /// Returns whether a block has other users than this one, or than one.
    fn users(&self, hash: &BlockHash, user: Option<Option<u64>>) -> bool {
        let users = &self.blocks[hash].users;
        let are_several = users.windows(2).any(|pair| pair[0] != pair[1] || pair[0].is_none());
        are_several || users.first().is_some_and(|&first| user.is_some_and(|user| user != first))
    }

    fn hint(&mut self, about: &About, asked: Asked) -> Result<(), String> {
        self.read_ids();
        let now = self.now();
        let until = |ms: u8| now + u64::from(ms);
        let (action, what) = match asked {
            Asked::Retain(priority, ms) => {
                let class = priority % 3;
                let priority = CachePriority::ALL[usize::from(class)];
                (Action::Retain { priority, until: Millis(until(ms)) }, What::Retain(class, until(ms)))
            }
            Asked::Pin(ms) => (Action::Pin { until: Millis(until(ms)) }, What::Retain(PINNED, until(ms))),
            Asked::Demote => (Action::Demote, What::Demote),
            Asked::Release => (Action::Release, What::Release),
        };
        let has_ended = matches!(what, What::Retain(_, until) if until <= now);
        let (target, expected) = match *about {
            About::Session(number) => {
                let number = u64::from(number % 7);
                let told = if has_ended { ("ended", 0) } else { self.hint_session(number, what) };
                (Target::Session(SessionId(number)), told)
            }
            About::Hashes(prompt, first, blocks) => {
                let all = self.hashes(prompt, BLOCKS_MAX);
                let first = usize::from(first) % BLOCKS_MAX;
                let hashes = all[first..BLOCKS_MAX.min(first + usize::from(blocks % 8))].to_vec();
                let told = if has_ended { ("ended", 0) } else { self.hint_hashes(&hashes, what) };
                (Target::Hashes(hashes), told)
            }
            About::Tokens(pick, start, tokens) => {
                let start = usize::from(start) % (BLOCKS_MAX * BLOCK_TOKENS);
                let end = if tokens == 0 { usize::MAX } else { start + usize::from(tokens) % 40 };
                let index = pick.index(self.open.len());
                let id = index.map_or(u64::MAX, |index| self.open[index].id);
                let told = match index {
                    _ if has_ended => ("ended", 0),
                    None => ("missing", 0),
                    Some(index) => self.hint_tokens(index, start..end, what),
                };
                (Target::Tokens(SequenceId(id), start..end), told)
            }
        };
        let outcome = self.pool.hint(&Hint::new(target, action));
        let told = match &outcome {
            Outcome::Accepted { blocks } => ("accepted", *blocks),
            Outcome::Clipped { blocks, .. } => ("clipped", *blocks),
            Outcome::Deferred { blocks } => ("deferred", *blocks),
            Outcome::Missing => ("missing", 0),
            Outcome::Rejected { reason } => match reason {
                Rejection::Ended { .. } => ("ended", 0),
                Rejection::Pinned { .. } => ("pinned", 0),
                Rejection::NoBlock { .. } => ("no block", 0),
                _ => ("unsupported", 0),
            },
            _ => ("another", 0),
        };
        same("outcome", &expected, &told)
    }

    fn hint_hashes(&mut self, hashes: &[BlockHash], what: What) -> Told {
        if hashes.iter().all(|hash| !self.blocks.contains_key(hash)) {
            return ("missing", 0);
        }
        match self.carry_out(hashes, what, Of::Hashes) {
            Found { placed: 0, owned: 0, left: Some(_) } => ("pinned", 0),
            Found { placed: 0, owned: 1.., .. } => ("unsupported", 0),
            Found { placed, left: Some(_), .. } => ("clipped", placed),
            Found { placed, .. } => ("accepted", placed),
        }
    }

    fn hint_session(&mut self, number: u64, what: What) -> Told {
        let Some(known) = self.sessions.get(&number).cloned() else { return ("missing", 0) };
        let most = if what.is_pin() { known.hashes.len() } else { usize::MAX };
        let mut granted = what.lasts().then_some((what, most));
        let found = self.carry_out(&known.hashes, what, Of::Session(number));
        match (what, &found) {
            (What::Retain(..), Found { placed: 0, owned: 0, left: Some(_) }) => return ("pinned", 0),
            (What::Retain(..), Found { left, .. }) => {
                granted = Some((what, left.unwrap_or(most)));
            }
            (_, Found { placed: 0, owned: 1.., .. }) => granted = Some((what, usize::MAX)),
            (What::Demote, _) => {}
            (What::Release, _) => {
                self.sessions.remove(&number);
            }
        }
        if let Some(session) = self.sessions.get_mut(&number) {
            session.granted = granted;
        }
        match found {
            Found { placed: 0, owned, left: Some(_) } => ("clipped", owned),
            Found { placed, left: Some(_), .. } => ("clipped", placed),
            Found { placed: 0, owned, .. } if owned > 0 || what.lasts() => ("deferred", owned),
            Found { placed, .. } => ("accepted", placed),
        }
    }

    fn hint_tokens(&mut self, index: usize, tokens: Range<usize>, what: What) -> Told {
        if full_blocks(&tokens).is_empty() {
            return ("no block", 0);
        }
        let (id, length) = (self.open[index].id, self.open[index].real.len());
        let asked = full_blocks(&(tokens.start.min(length)..tokens.end.min(length))).len();
        let is_within = |hint: &StandingHint| hint.0.start >= tokens.start && hint.0.end <= tokens.end;
        let mut most = usize::MAX;
        if what.is_pin() {
            let skips = |open: u64, hint: &StandingHint| open == id && is_within(hint);
            if self.room(skips) < asked {
                self.drop_gone();
            }
            most = asked.min(self.room(skips));
            if most == 0 && asked > 0 {
                return ("pinned", 0);
            }
        }
        let hints = &mut self.open[index].hints;
        hints.retain(|hint| !is_within(hint));
        if hints.len() == 16 {
            return ("unsupported", 0);
        }
        hints.push((tokens.clone(), most, what));
        if what.is_pin() && most < asked { ("clipped", most) } else { ("deferred", asked) }
    }
}

/// Returns the places of the full blocks in a range of tokens.
fn full_blocks(tokens: &Range<usize>) -> Range<usize> {
    let end = if tokens.end == usize::MAX { usize::MAX } else { tokens.end / BLOCK_TOKENS };
    tokens.start.div_ceil(BLOCK_TOKENS)..end
}

impl Drive {
    fn cached(&self) -> BTreeSet<BlockHash> {
        self.pool.cached_blocks().into_iter().map(|(_, hash)| hash).collect()
    }

    /// Evicts blocks, and compares which.
    fn evict(&mut self, most: usize) -> Result<(), String> {
        let mut all: Vec<_> = self.blocks.iter().filter(|(_, block)| block.owners == 0).collect();
        all.sort_unstable_by_key(|(_, block)| block.standing);
        let expected: BTreeSet<BlockHash> = all.iter().take(most).map(|(hash, _)| **hash).collect();
        let before = self.cached();
        let wanted = self.pool.free_blocks() + expected.len();
        drop(self.pool.allocate(AllocRequest::new(wanted)).map_err(|error| error.to_string())?);
        let after = self.cached();
        let gone: BTreeSet<BlockHash> = before.difference(&after).copied().collect();
        let at = |hashes: &BTreeSet<BlockHash>, others: &BTreeSet<BlockHash>| -> Vec<Option<Standing>> {
            hashes.difference(others).map(|hash| Some(self.blocks.get(hash)?.standing)).collect()
        };
        let (evicted, instead_of) = (at(&gone, &expected), at(&expected, &gone));
        // Of those whose retention has ended, as many return to the queue as are evicted, and it
        // gives ranks below its cursor in any order.
        let is_plain = |at: &Option<Standing>| matches!(at, Some(Standing::Plain(..)));
        let has_ended = |at: &Option<Standing>| matches!(at, Some(Standing::Plain(_, true)));
        let is_equal = evicted.len() == instead_of.len()
            && evicted.iter().all(is_plain)
            && instead_of.iter().all(has_ended);
        if !is_equal {
            return Err(format!("evicted {evicted:?} instead of {instead_of:?}"));
        }
        self.blocks.retain(|hash, _| !gone.contains(hash));
        Ok(())
    }

    fn check(&self) -> Result<(), String> {
        let known: BTreeSet<BlockHash> = self.blocks.keys().copied().collect();
        same("cached blocks", &known, &self.cached())?;
        let sessions: BTreeSet<u64> = self.pool.sessions().iter().map(|session| session.id.0).collect();
        same("sessions", &self.sessions.keys().copied().collect(), &sessions)?;
        let block_bytes = self.pool.layout().bytes_per_block() as u64;
        let pinned: u64 = self.pool.sessions().iter().map(|session| session.pinned_bytes).sum();
        if pinned > self.pins_max as u64 * block_bytes {
            return Err(format!("{pinned} bytes are pinned, of {} blocks", self.pins_max));
        }
        Ok(())
    }
}

fn same<T: PartialEq + std::fmt::Debug>(what: &str, expected: &T, got: &T) -> Result<(), String> {
    if expected == got { Ok(()) } else { Err(format!("{what}: expected {expected:?}, got {got:?}")) }
}
