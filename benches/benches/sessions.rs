//! Agents' sessions on models with states: the share of prompt tokens that are hit, by where states
//! are kept, in one memory for states and blocks together.
//!
//! Requests of all sessions in the order of their times, one after the other: admit, compute up to
//! each cut, keep a checkpoint there, compute the rest, close. Beside it, in the same run:
//!
//! - *states free*: the same pool without states, so that every cached block is a hit;
//! - *last two*: a model of an LRU over chunks of 1,024 tokens and states, in which a session keeps
//!   the last two states, at the ends of prompts and where a prompt leaves what was cached. The
//!   running sequence has its state and blocks, as in the pool, but no copies of them.
//!
//! Sessions are JSON files of 64-token hashes (kv-cache-tester), in `agentic` of `KVPOOL_TRACES` or of
//! `../shared/traces`. They are not part of the repository: without them nothing is measured. The
//! first argument that is a number selects sessions by their place modulo 2.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::time::Instant;

use kvpool::prefix::PrefixConfig;
use kvpool::storage::KvLayout;
use kvpool::storage::groups::{GroupOptions, LayerGroups, Reach};
use kvpool::{AdmitRequest, AllocError, Pool, SequenceError, SequenceId, SessionId, Tokens};
use serde_json::Value;

const MODELS: [&str; 3] = ["qwen3.5-35b-a3b", "nemotron-3-super-120b", "kimi-k3"];
const GIB: [u64; 3] = [32, 64, 128];
/// Tokens of a hash of a trace.
const HASH_TOKENS: u32 = 64;
/// Bits of a token's place among the hashes of its session.
const PLACE_BITS: u32 = 22;
/// Tokens of a chunk of the model of an LRU.
const CHUNK: usize = 1_024;

struct Request {
    time: f64,
    session: u32,
    hashes: Vec<u32>,
    tokens: usize,
}

impl Request {
    fn prompt(&self) -> Vec<u32> {
        let places =
            self.hashes.iter().flat_map(|hash| (0..HASH_TOKENS).map(move |at| hash * HASH_TOKENS + at));
        places.take(self.tokens).map(|place| self.session << PLACE_BITS | place).collect()
    }
}

fn folder() -> Option<PathBuf> {
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/traces");
    let folder = std::env::var_os("KVPOOL_TRACES").map_or_else(beside, PathBuf::from).join("agentic");
    let is_there = folder.is_dir();
    if !is_there {
        eprintln!("SKIPPED: {} is not there; KVPOOL_TRACES names the directory above it", folder.display());
    }
    is_there.then_some(folder)
}

/// Reads the requests of the sessions, in the order of their times.
fn requests(folder: &Path, half: Option<usize>) -> Vec<Request> {
    let files = std::fs::read_dir(folder).expect("a folder").map(|file| file.expect("a file").path());
    let mut files: Vec<_> = files.filter(|file| file.extension().is_some_and(|end| end == "json")).collect();
    files.sort();
    let mut requests = Vec::new();
    for (session, file) in files.iter().enumerate().filter(|(at, _)| half.is_none_or(|half| at % 2 == half)) {
        let text = std::fs::read_to_string(file).expect("a readable file");
        let trace: Value = serde_json::from_str(&text).expect("JSON");
        for request in trace["requests"].as_array().expect("requests") {
            let hashes = request["hash_ids"].as_array().into_iter().flatten();
            let hashes: Vec<u32> = hashes.filter_map(|hash| Some(hash.as_u64()? as u32)).collect();
            let (time, tokens) = (request["t"].as_f64().unwrap_or(0.), request["in"].as_u64().unwrap_or(0));
            let tokens = (tokens as usize).min(hashes.len() * HASH_TOKENS as usize);
            assert!(hashes.iter().all(|hash| hash * HASH_TOKENS < 1 << PLACE_BITS), "too many hashes");
            if tokens > 0 {
                requests.push(Request { time, session: session as u32, hashes, tokens });
            }
        }
    }
    requests.sort_by(|one, other| one.time.total_cmp(&other.time));
    requests
}

struct Outcome {
    hit: usize,
    tokens: usize,
    refused: usize,
    /// Tokens whose blocks were cached, and that were no hit because no state was kept.
    without_state: usize,
    seconds: f64,
}

fn replay(pool: &Pool, requests: &[Request]) -> Outcome {
    let began = Instant::now();
    let mut outcome = Outcome { hit: 0, tokens: 0, refused: 0, without_state: 0, seconds: 0. };
    for (id, request) in requests.iter().enumerate() {
        let prompt = request.prompt();
        outcome.tokens += prompt.len();
        let admit =
            AdmitRequest::new(SequenceId(id as u64), &prompt).session(SessionId(request.session.into()));
        let mut sequence = match pool.admit_grouped(&admit) {
            Ok(sequence) => sequence,
            Err(SequenceError::Alloc(
                AllocError::NoRun { .. } | AllocError::Exhausted { .. } | AllocError::TooLarge { .. },
            )) => {
                outcome.refused += 1;
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        outcome.hit += sequence.len();
        outcome.without_state += sequence.cached_prefix() - sequence.len();
        while sequence.len() < prompt.len() {
            let mut batch = pool.begin_batch();
            let cut = sequence.next_cut();
            let end = cut.unwrap_or(prompt.len());
            let new = Tokens::Announced(end - sequence.len());
            batch.append_grouped(&mut sequence, new).expect("an admission reserves the blocks");
            if cut.is_some() {
                // Without memory for it there is none.
                let _ = batch.checkpoint(&mut sequence);
            }
            batch.finish();
        }
        // The answer, which is not in the trace.
        let mut batch = pool.begin_batch();
        let _ = batch.append_grouped(&mut sequence, 1);
        batch.finish();
    }
    outcome.seconds = began.elapsed().as_secs_f64();
    pool.audit().expect("a sound pool");
    outcome
}

/// An LRU over chunks of tokens and states, by bytes.
#[derive(Default)]
struct Lru {
    bytes: u64,
    used: HashMap<u64, (u64, u64)>,
    order: BTreeMap<u64, u64>,
    now: u64,
}

impl Lru {
    fn touch(&mut self, key: u64, bytes: u64) {
        self.now += 1;
        match self.used.insert(key, (self.now, bytes)) {
            Some((before, _)) => drop(self.order.remove(&before)),
            None => self.bytes += bytes,
        }
        self.order.insert(self.now, key);
    }

    fn remove(&mut self, key: u64) {
        if let Some((at, bytes)) = self.used.remove(&key) {
            self.order.remove(&at);
            self.bytes -= bytes;
        }
    }

    fn evict_to(&mut self, most: u64) {
        while self.bytes > most {
            let (_, key) = self.order.pop_first().expect("bytes belong to keys");
            let (_, bytes) = self.used.remove(&key).expect("an entry of the order");
            self.bytes -= bytes;
        }
    }
}

/// Returns the share of tokens hit if a session keeps its last two states.
fn last_two(requests: &[Request], memory: u64, token_bytes: u64, state_bytes: u64) -> f64 {
    let (mut lru, mut kept) = (Lru::default(), HashMap::<u32, Vec<u64>>::new());
    let (mut hit, mut all) = (0, 0);
    for request in requests {
        let mut path = u64::from(request.session) << 32;
        let per_chunk = CHUNK / HASH_TOKENS as usize;
        let chunks: Vec<u64> = (0..request.tokens / CHUNK)
            .map(|chunk| {
                for hash in &request.hashes[chunk * per_chunk..][..per_chunk] {
                    path = (path ^ u64::from(*hash)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
                }
                path & !1
            })
            .collect();
        let cached = chunks.iter().take_while(|key| lru.used.contains_key(key)).count();
        let state = (1..=cached).rev().find(|&behind| lru.used.contains_key(&(chunks[behind - 1] | 1)));
        let reused = state.unwrap_or(0);
        (hit, all) = (hit + reused * CHUNK, all + request.tokens);
        chunks.iter().for_each(|&key| lru.touch(key, token_bytes * CHUNK as u64));
        if let Some(behind) = state {
            lru.touch(chunks[behind - 1] | 1, state_bytes);
        }
        let states = kept.entry(request.session).or_default();
        let mut cuts = vec![chunks.len()];
        if cached > reused {
            cuts.insert(0, cached);
        }
        for cut in cuts.into_iter().filter(|&cut| cut > 0) {
            let key = chunks[cut - 1] | 1;
            lru.touch(key, state_bytes);
            states.retain(|&state| state != key);
            states.push(key);
        }
        while states.len() > 2 {
            lru.remove(states.remove(0));
        }
        lru.evict_to(memory);
    }
    hit as f64 / all as f64
}

fn main() {
    let Some(folder) = folder() else { return };
    let half = std::env::args().skip(1).find_map(|argument| argument.parse().ok());
    let requests = requests(&folder, half);
    let tokens: usize = requests.iter().map(|request| request.tokens).sum();
    println!("{} requests, {tokens} tokens of prompts; share of tokens hit", requests.len());
    println!(
        "{:<24} {:>7} {:>8} {:>9} {:>12} {:>8} {:>14} {:>9}",
        "model", "memory", "kvpool", "last two", "states free", "refused", "without state", "us/request"
    );
    for name in MODELS {
        let config = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../tests/configs/{name}.json"));
        let config = std::fs::read_to_string(config).expect("a configuration of the tests");
        let model = LayerGroups::from_config(&config, GroupOptions::new()).expect("a known model");
        let is_state = |reach| matches!(reach, Reach::State);
        let states: Vec<usize> = model
            .groups()
            .iter()
            .filter(|group| is_state(group.reach()))
            .map(|group| group.block_frames() as usize)
            .collect();
        let blocks_of = model.groups().iter().filter(|group| !is_state(group.reach()));
        let blocks_of = blocks_of.filter(|group| group.shares_blocks_of().is_none());
        let block_bytes: u64 = blocks_of.map(|group| group.block_frames() * model.frame_bytes()).sum();
        let layered = Pool::layered(&model).expect("a model that runs");
        let (windows, tokens) = (layered.windows().to_vec(), layered.tokens_per_block());
        for gib in GIB {
            let memory = gib << 30;
            let pool = |states: &[usize]| {
                let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(1).block_tokens(16);
                Pool::builder(layout.build().expect("a layout"))
                    .blocks((memory / model.frame_bytes()) as usize)
                    .without_storage()
                    .threads(1)
                    .groups(windows.clone())
                    .list_tokens(tokens.clone())
                    .states(states.iter().copied())
                    .prefix_cache(PrefixConfig::new())
                    .build()
                    .expect("a pool")
            };
            let own = replay(&pool(&states), &requests);
            let free = replay(&pool(&[]), &requests);
            let state_bytes = states.iter().sum::<usize>() as u64 * model.frame_bytes();
            let two = last_two(&requests, memory - state_bytes, block_bytes / 16, state_bytes);
            let share = |of: &Outcome, part: usize| part as f64 / of.tokens as f64;
            println!(
                "{name:<24} {gib:>3} GiB {:>8.4} {two:>9.4} {:>12.4} {:>8} {:>14.4} {:>9.0}",
                share(&own, own.hit),
                share(&free, free.hit),
                own.refused + free.refused,
                share(&own, own.without_state),
                own.seconds * 1e6 / requests.len() as f64,
            );
        }
    }
}
