//! A memory for tests: the simplest that is right, behind one lock, and with faults to order.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::*};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::content::Shape;
use super::memory::{Compaction, CompactionTotals, FreeSpace, Memory, PrefixTotals, Refusal, ResizeRefusal};

/// What goes wrong, once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    None,
    /// A stored byte has a bit flipped.
    FlippedBit,
    /// A block is handed out although somebody has it.
    DoubleOwner,
    /// A freed block is lost.
    Leak,
    /// A store does not reach memory.
    LostStore,
    /// A block table names another frame.
    WrongFrame,
    /// A broken invariant.
    Panic,
    /// The pool has 20 blocks all of a sudden; those beyond that are gone when they are freed. No fault, but a surprise.
    Shrinks,
    /// A pool that says that it has another size, and has not. At once.
    IdleResize,
    /// A compaction that goes wrong.
    Compaction,
    /// A block that is cached for another prompt is found.
    FalseHit,
    /// A hit that is not counted.
    UncountedHit,
}

/// A free block keeps what it held until it is taken: freed longest ago, taken first.
#[derive(Default)]
struct Cached {
    blocks: HashMap<u64, u32>,
    hashes: HashMap<u32, u64>,
    lookup_blocks: u64,
    hit_blocks: u64,
    evicted_blocks: u64,
}

impl Cached {
    fn register(&mut self, hash: u64, block: u32) {
        if !self.hashes.contains_key(&block) && !self.blocks.contains_key(&hash) {
            self.blocks.insert(hash, block);
            self.hashes.insert(block, hash);
        }
    }

    fn evict(&mut self, block: u32) {
        if let Some(hash) = self.hashes.remove(&block) {
            self.blocks.remove(&hash);
            self.evicted_blocks += 1;
        }
    }
}

/// The chained hashes of the full blocks of these tokens.
fn hashes(tokens: &[u32], block_tokens: usize) -> impl Iterator<Item = u64> {
    let mut parent = 0u64;
    tokens.chunks_exact(block_tokens).map(move |block| {
        let mut hasher = DefaultHasher::new();
        (parent, block).hash(&mut hasher);
        parent = hasher.finish();
        parent
    })
}

struct State {
    free: VecDeque<u32>,
    /// References.
    taken: BTreeMap<u32, u32>,
    cached: Option<Cached>,
    bytes: Vec<u8>,
    blocks: usize,
    /// Blocks from here on are wanted back.
    isolated: usize,
    compaction: Option<CompactionTotals>,
}

impl State {
    fn keep(&mut self, blocks: usize) {
        self.free.retain(|&block| (block as usize) < blocks);
        if let Some(cached) = &mut self.cached {
            let gone: Vec<u32> =
                cached.hashes.keys().copied().filter(|&block| block as usize >= blocks).collect();
            gone.into_iter().for_each(|block| cached.evict(block));
        }
        (self.blocks, self.isolated) = (blocks, usize::MAX);
    }

    /// One more reference.
    fn take(&mut self, block: u32) {
        self.free.retain(|&other| other != block);
        *self.taken.entry(block).or_default() += 1;
    }

    /// One less.
    fn give_back(&mut self, block: u32) {
        let Some(references) = self.taken.get_mut(&block) else { return };
        *references -= 1;
        if *references == 0 {
            self.taken.remove(&block);
            if (block as usize) < self.blocks {
                self.free.push_back(block);
            }
        }
    }

    fn to_be_had(&self, block: u32) -> bool {
        (block as usize) < self.isolated
    }
}

pub struct Ledger {
    shape: Shape,
    /// The most that it can have.
    blocks_max: usize,
    fault: Fault,
    /// Events to go until the fault, which happens once.
    countdown: AtomicUsize,
    done: AtomicBool,
    state: Arc<Mutex<State>>,
}

pub struct Held {
    blocks: Vec<u32>,
    tokens: usize,
    /// Those that are known.
    ids: Vec<u32>,
    block_tokens: usize,
    lose: bool,
    state: Arc<Mutex<State>>,
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut state = self.state.lock().unwrap();
        let kept = self.blocks.len() - usize::from(self.lose && !self.blocks.is_empty());
        if let Some(cached) = &mut state.cached {
            let known = &self.ids[..self.tokens.min(self.ids.len())];
            let hashes = hashes(known, self.block_tokens);
            hashes.zip(&self.blocks).for_each(|(hash, &block)| cached.register(hash, block));
        }
        self.blocks.drain(..kept).rev().for_each(|block| state.give_back(block));
    }
}

impl Ledger {
    pub fn new(shape: Shape, blocks: usize, fault: Fault) -> Self {
        Self::with_max(shape, blocks, blocks, fault)
    }

    pub fn with_max(shape: Shape, blocks: usize, blocks_max: usize, fault: Fault) -> Self {
        let bytes = vec![0; blocks_max * shape.block_tokens * shape.layers * (shape.k_bytes + shape.v_bytes)];
        let state = State {
            free: (0..blocks as u32).collect(),
            taken: BTreeMap::new(),
            cached: None,
            bytes,
            blocks,
            isolated: usize::MAX,
            compaction: None,
        };
        let countdown = AtomicUsize::new(40);
        Self {
            shape,
            blocks_max,
            fault,
            countdown,
            done: AtomicBool::new(false),
            state: Arc::new(Mutex::new(state)),
        }
    }

    /// It caches prefixes.
    pub fn caching(self) -> Self {
        self.state.lock().unwrap().cached = Some(Cached::default());
        self
    }

    /// Every byte becomes another.
    pub fn damage(&self) {
        self.state.lock().unwrap().bytes.iter_mut().for_each(|byte| *byte ^= 1);
    }

    /// Whether the fault happens now.
    fn strikes(&self, fault: Fault) -> bool {
        self.fault == fault
            && self.countdown.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_err()
            && !self.done.swap(true, Relaxed)
    }

    /// Where one token's row of a layer lies: K, then V.
    fn place(&self, layer: usize, slot: i64) -> Range<usize> {
        let row = self.shape.k_bytes + self.shape.v_bytes;
        let start = (layer * self.blocks_max * self.shape.block_tokens + slot as usize) * row;
        start..start + row
    }
}

impl Memory for Ledger {
    type Sequence = Held;
    type Batch = ();
    type Table = Vec<i32>;

    fn blocks(&self) -> usize {
        self.state.lock().unwrap().blocks
    }

    fn free_blocks(&self) -> usize {
        self.state.lock().unwrap().free.len()
    }

    fn free_space(&self) -> FreeSpace {
        FreeSpace { blocks: self.free_blocks(), fragmentation: 0.0 }
    }

    fn open(&self, _id: u64, prompt: &[u32]) -> Result<(Held, usize), Refusal> {
        let size = self.shape.block_tokens;
        let mut guard = self.state.lock().unwrap();
        let state = &mut *guard;
        let mut blocks = Vec::new();
        if let Some(cached) = &mut state.cached {
            let most = prompt.len().saturating_sub(1) / size;
            let found = hashes(prompt, size).take(most).map_while(|hash| cached.blocks.get(&hash).copied());
            blocks.extend(found);
            cached.lookup_blocks += (prompt.len() / size) as u64;
            cached.hit_blocks += blocks.len() as u64;
            if !blocks.is_empty() && self.strikes(Fault::UncountedHit) {
                cached.hit_blocks -= 1;
            }
            let other = cached.hashes.keys().copied().find(|block| !blocks.contains(block));
            if let Some(other) = other.filter(|_| !blocks.is_empty() && self.strikes(Fault::FalseHit)) {
                blocks[0] = other;
            }
        }
        blocks.iter().for_each(|&block| state.take(block));
        let tokens = blocks.len() * size;
        let held = Held {
            blocks,
            tokens,
            ids: prompt.to_vec(),
            block_tokens: size,
            lose: self.strikes(Fault::Leak),
            state: Arc::clone(&self.state),
        };
        Ok((held, tokens))
    }

    fn begin(&self) {
        assert!(!self.strikes(Fault::Panic), "ordered");
        if self.strikes(Fault::Shrinks) {
            self.state.lock().unwrap().keep(20);
        }
    }

    fn append(&self, (): &mut (), sequence: &mut Held, tokens: usize, said: &[u32]) -> Result<(), Refusal> {
        let wanted = self.shape.blocks((sequence.tokens + tokens) as u64) - sequence.blocks.len();
        let mut state = self.state.lock().unwrap();
        let free = state.free.iter().filter(|&&block| state.to_be_had(block)).count();
        if wanted > free {
            return Err(Refusal::Full { free, retired: 0 });
        }
        for _ in 0..wanted {
            let first = state.taken.keys().next().copied();
            let twice = first.filter(|_| self.strikes(Fault::DoubleOwner));
            let next = state.free.iter().copied().find(|&block| state.to_be_had(block));
            let block = twice.or(next).unwrap();
            if let Some(cached) = &mut state.cached {
                cached.evict(block);
            }
            state.take(block);
            sequence.blocks.push(block);
        }
        sequence.tokens += tokens;
        sequence.ids.extend(said);
        Ok(())
    }

    fn slots(
        &self,
        (): &(),
        sequence: &Held,
        tokens: Range<usize>,
        out: &mut Vec<i64>,
    ) -> Result<(), String> {
        let size = self.shape.block_tokens;
        out.extend(tokens.map(|token| (sequence.blocks[token / size] as usize * size + token % size) as i64));
        Ok(())
    }

    fn block_table<'t>(
        &self,
        (): &(),
        sequence: &Held,
        table: &'t mut Vec<i32>,
    ) -> Result<&'t [i32], String> {
        table.clear();
        table.extend(sequence.blocks.iter().map(|&block| block as i32));
        if self.strikes(Fault::WrongFrame) {
            table[0] = (table[0] + 1) % self.blocks_max as i32;
        }
        Ok(table)
    }

    fn store(&self, layer: usize, k: &[u8], v: &[u8], slots: &[i64]) -> Result<(), String> {
        if self.strikes(Fault::LostStore) {
            return Ok(());
        }
        let (k_bytes, v_bytes) = (self.shape.k_bytes, self.shape.v_bytes);
        let mut state = self.state.lock().unwrap();
        for (index, &slot) in slots.iter().enumerate() {
            let row = &mut state.bytes[self.place(layer, slot)];
            row[..k_bytes].copy_from_slice(&k[index * k_bytes..][..k_bytes]);
            row[k_bytes..].copy_from_slice(&v[index * v_bytes..][..v_bytes]);
        }
        if self.strikes(Fault::FlippedBit) {
            state.bytes[self.place(layer, slots[0])][3] ^= 4;
        }
        Ok(())
    }

    fn load(&self, layer: usize, slots: &[i64], k: &mut [u8], v: &mut [u8]) -> Result<(), String> {
        let (k_bytes, v_bytes) = (self.shape.k_bytes, self.shape.v_bytes);
        let state = self.state.lock().unwrap();
        for (index, &slot) in slots.iter().enumerate() {
            let row = &state.bytes[self.place(layer, slot)];
            k[index * k_bytes..][..k_bytes].copy_from_slice(&row[..k_bytes]);
            v[index * v_bytes..][..v_bytes].copy_from_slice(&row[k_bytes..]);
        }
        Ok(())
    }

    fn prefix(&self) -> Option<PrefixTotals> {
        let state = self.state.lock().unwrap();
        let cached = state.cached.as_ref()?;
        Some(PrefixTotals {
            policy: "ledger".into(),
            lookup_blocks: cached.lookup_blocks,
            hit_blocks: cached.hit_blocks,
            evicted_blocks: cached.evicted_blocks,
        })
    }

    fn set_time(&self, _: Duration) {}

    fn forget_prefixes(&self) {
        if let Some(cached) = &mut self.state.lock().unwrap().cached {
            *cached = Cached::default();
        }
    }

    fn start_compaction(&self, _: &Compaction) -> Result<(), String> {
        let errors =
            if self.fault == Fault::Compaction { vec!["nothing moves".to_owned()] } else { Vec::new() };
        self.state.lock().unwrap().compaction =
            Some(CompactionTotals { runs: 1, errors, ..Default::default() });
        Ok(())
    }

    fn stop_compaction(&self) -> Option<CompactionTotals> {
        self.state.lock().unwrap().compaction.take()
    }

    /// Moves nothing: what is taken is in the way.
    fn resize(&self, blocks: usize) -> Result<(), ResizeRefusal> {
        if blocks > self.blocks_max {
            return Err(ResizeRefusal::Failed(format!("{blocks} blocks of {} at most", self.blocks_max)));
        }
        let mut state = self.state.lock().unwrap();
        let in_the_way = state.taken.range(blocks as u32..).count();
        if in_the_way > 0 {
            state.isolated = blocks;
            return Err(ResizeRefusal::Blocked(format!("{in_the_way} blocks in the way")));
        }
        if self.fault != Fault::IdleResize {
            let more = state.blocks as u32..blocks as u32;
            state.free.extend(more);
            state.keep(blocks);
        }
        Ok(())
    }

    fn leave(&self) {}

    fn take_all(&self) -> Result<(), String> {
        self.audit()
    }

    fn audit(&self) -> Result<(), String> {
        let (free, blocks) = (self.free_blocks(), self.blocks());
        if free == blocks { Ok(()) } else { Err(format!("{free} of {blocks} blocks are free")) }
    }
}
