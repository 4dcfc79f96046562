//! `EvictionOrder`: kvpool's eviction policies for a cache that is no pool.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use kvpool::prefix::policy::{Millis, Policy, PolicyKind};
use kvpool_policies::{Evictable, Position};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PySet};

use crate::args::{Blocks, Count, Place, RequestNumber};
use crate::error::{Outcome, fields, invalid, raise};

/// The order in which the blocks of a cache are evicted, by one of kvpool's policies.
///
/// A cache that finds its blocks by keys of bytes reports each of its blocks here, and asks which
/// ones to evict. `policy` is "lru" or "priority"; `blocks_max` is the cache's size.
///
/// A block is *held* or evictable. Requests that have not ended order their blocks by use: `use`,
/// with the number of the request from `begin`, and the last position first. The end of a request,
/// `finish`, shows the policy the whole request: hits, length, and what it continued. From then on
/// those of its blocks that no other request uses are the policy's to order; blocks of requests
/// that have not ended are evicted behind those.
///
/// All methods are safe to call from any thread, and keep the GIL.
#[pyclass(frozen, name = "EvictionOrder", module = "kvpool._kvpool")]
pub struct PyEvictionOrder {
    name: PolicyKind,
    began: Instant,
    order: Mutex<Order>,
}

/// Time of a use: order of the request, and the position in it, so that the end of a request is
/// older than its beginning.
type Use = (u64, i64);

struct Order {
    placed: Evictable<Arc<dyn Policy>>,
    slots: HashMap<Box<[u8]>, u32>,
    blocks: Vec<Block>,
    free: Vec<u32>,
    /// Evictable blocks whose latest use is by a request that has not ended.
    in_use: BTreeSet<(Use, u32)>,
    /// Requests that have not ended.
    open: HashSet<u64>,
}

/// A block of the cache.
struct Block {
    key: Box<[u8]>,
    is_evictable: bool,
    /// Uses by requests that have not ended: one each, in their order. Requests that ended without
    /// naming the block may be among them, and are dropped when they come last.
    uses: Vec<Use>,
    /// Its latest use: the latest of these, or a later one without a request.
    used: Use,
    /// Whether the request of the latest use has ended, so that the policy has placed it.
    is_placed: bool,
}

/// Returns the use of a block by a request: of its blocks, the last ones are evicted first.
fn used_at(request: RequestNumber, position: Place) -> Use {
    (request.0, -i64::try_from(position.0).unwrap_or(i64::MAX))
}

/// Returns 64 well-mixed bits of a key.
fn hash(key: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    key.hash(&mut hasher);
    hasher.finish()
}

fn unknown(key: &Bound<'_, PyBytes>) -> crate::error::Failure {
    raise("InvalidArgument", format!("the cache has no block {key}"), fields![key: key.clone().unbind()])
}

impl Order {
    fn new(name: PolicyKind) -> Self {
        Self {
            placed: Evictable::new(name.build()),
            slots: HashMap::new(),
            blocks: Vec::new(),
            free: Vec::new(),
            in_use: BTreeSet::new(),
            open: HashSet::new(),
        }
    }

    /// Forgets all blocks. Requests that have not ended go on.
    fn clear(&mut self, name: PolicyKind) {
        self.placed.reset(name.build());
        self.slots.clear();
        self.blocks.clear();
        self.free.clear();
        self.in_use.clear();
    }

    fn slot(&self, key: &Bound<'_, PyBytes>) -> Option<u32> {
        self.slots.get(key.as_bytes()).copied()
    }

    fn evictable(&self) -> usize {
        self.placed.len() + self.in_use.len()
    }

    /// Adds an evictable block to where it is evicted from.
    fn file(&mut self, slot: u32) {
        let block = &self.blocks[slot as usize];
        if block.is_placed {
            self.placed.file(slot);
        } else {
            self.in_use.insert((block.used, slot));
        }
    }

    fn unfile(&mut self, slot: u32) {
        let block = &self.blocks[slot as usize];
        if block.is_placed {
            self.placed.remove(slot);
        } else {
            self.in_use.remove(&(block.used, slot));
        }
    }

    fn set_evictable(&mut self, slot: u32, is_evictable: bool) {
        if self.blocks[slot as usize].is_evictable == is_evictable {
            return;
        }
        self.blocks[slot as usize].is_evictable = is_evictable;
        if is_evictable { self.file(slot) } else { self.unfile(slot) }
    }

    /// Notes a use by a request. One that has ended does not keep the block.
    fn add_use(&mut self, slot: u32, used: Use) {
        let uses = &mut self.blocks[slot as usize].uses;
        match uses.binary_search_by_key(&used.0, |known| known.0) {
            Ok(at) => uses[at] = used.max(uses[at]),
            Err(at) if self.open.contains(&used.0) => uses.insert(at, used),
            Err(_) => {}
        }
        self.set_used(slot, used);
    }

    /// Forgets the use by a request that ends, and each without a request. Returns whether requests
    /// that have not ended use the block: the latest of their uses counts then.
    fn end_use(&mut self, slot: u32, request: Option<u64>) -> bool {
        let uses = &mut self.blocks[slot as usize].uses;
        if let Some(request) = request
            && let Ok(at) = uses.binary_search_by_key(&request, |used| used.0)
        {
            uses.remove(at);
        }
        while uses.pop_if(|used| !self.open.contains(&used.0)).is_some() {}
        let latest = uses.last().copied();
        if let Some(latest) = latest {
            self.refile(slot, |block| (block.used, block.is_placed) = (latest, false));
        }
        latest.is_some()
    }

    /// Changes a block, and with it where it is evicted from.
    fn refile(&mut self, slot: u32, change: impl FnOnce(&mut Block)) {
        let is_evictable = self.blocks[slot as usize].is_evictable;
        if is_evictable {
            self.unfile(slot);
        }
        change(&mut self.blocks[slot as usize]);
        if is_evictable {
            self.file(slot);
        }
    }

    /// Has a use be the latest one, unless a later one is known by a request that has not ended.
    fn set_used(&mut self, slot: u32, used: Use) {
        let block = &self.blocks[slot as usize];
        if !block.is_placed && block.used >= used {
            return;
        }
        self.refile(slot, |block| (block.used, block.is_placed) = (used, false));
    }

    /// Forgets a block that is held, or was evicted.
    fn forget(&mut self, slot: u32) {
        self.slots.remove(&self.blocks[slot as usize].key);
        self.free.push(slot);
    }

    fn remove(&mut self, slot: u32) {
        self.set_evictable(slot, false);
        self.forget(slot);
    }

    fn insert(&mut self, key: &Bound<'_, PyBytes>, used: Use, is_evictable: bool) {
        if let Some(slot) = self.slot(key) {
            self.remove(slot);
        }
        let uses = self.open.contains(&used.0).then_some(used).into_iter().collect();
        let block = Block { key: key.as_bytes().into(), is_evictable: false, uses, used, is_placed: false };
        let slot = self.free.pop().unwrap_or(self.blocks.len() as u32);
        if slot as usize == self.blocks.len() {
            self.blocks.push(block);
        } else {
            self.blocks[slot as usize] = block;
        }
        self.placed.fill(slot, hash(key.as_bytes()));
        self.slots.insert(key.as_bytes().into(), slot);
        self.set_evictable(slot, is_evictable);
    }

    /// Places the blocks of a request that ends, except those that other requests still use.
    fn finish(&mut self, keys: &[Bound<'_, PyBytes>], is_reused: &[bool], request: Option<u64>, now: Millis) {
        if let Some(request) = request {
            self.open.remove(&request);
        }
        for (key, _) in keys.iter().zip(is_reused).filter(|(_, is_reused)| **is_reused) {
            if let Some(slot) = self.slot(key) {
                self.placed.hit(slot);
            }
        }
        let hits = is_reused.iter().take_while(|&&is_reused| is_reused).count();
        let last = hits.checked_sub(1).and_then(|last| self.slot(&keys[last]));
        let hashes = keys.iter().map(|key| hash(key.as_bytes()));
        let (chain, context) = (keys.len() as u32, self.placed.looked_up(hashes, hits, last, None, now));
        for (depth, key) in keys.iter().enumerate().rev() {
            let Some(slot) = self.slot(key) else { continue };
            if self.end_use(slot, request) {
                continue;
            }
            let is_evictable = self.blocks[slot as usize].is_evictable;
            if is_evictable {
                self.unfile(slot);
            }
            self.placed.place(
                slot,
                Position { depth: depth as u32, chain, context, ..Position::default() },
                now,
            );
            let used = (self.placed.next_order(), 0);
            let block = &mut self.blocks[slot as usize];
            (block.used, block.is_placed) = (used, true);
            if is_evictable {
                self.file(slot);
            }
        }
    }

    /// Takes `count` blocks that are evictable and not protected; `None`, and no change, if there
    /// are fewer.
    fn evict(&mut self, count: usize, protected: &HashSet<u32>, now: Millis) -> Option<Vec<u32>> {
        let kept = protected.iter().filter(|&&slot| self.blocks[slot as usize].is_evictable).count();
        if count > self.evictable() - kept {
            return None;
        }
        let (mut evicted, mut passed) = (Vec::with_capacity(count), Vec::new());
        while evicted.len() < count {
            let slot = self.placed.evict(now).or_else(|| Some(self.in_use.pop_first()?.1));
            let slot = slot.expect("enough blocks are evictable");
            if protected.contains(&slot) { passed.push(slot) } else { evicted.push(slot) }
        }
        for slot in passed {
            self.file(slot);
        }
        Some(evicted)
    }
}

impl PyEvictionOrder {
    /// Locks the order. The lock is held with the GIL: no code of Python may run meanwhile, as the
    /// making of an error or the end of an object would, since another thread can wait for the
    /// lock.
    fn order(&self) -> MutexGuard<'_, Order> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes a block.
    fn change(&self, key: &Bound<'_, PyBytes>, change: impl FnOnce(&mut Order, u32)) -> Outcome<()> {
        let is_known = {
            let mut order = self.order();
            order.slot(key).map(|slot| change(&mut order, slot)).is_some()
        };
        if is_known { Ok(()) } else { Err(unknown(key)) }
    }

    fn now(&self) -> Millis {
        Millis(self.began.elapsed().as_millis() as u64)
    }
}

#[pymethods]
impl PyEvictionOrder {
    #[new]
    #[pyo3(signature = (blocks_max, policy="lru"))]
    fn new(blocks_max: Blocks, policy: &str) -> Outcome<Self> {
        let name: PolicyKind = policy.parse().map_err(invalid)?;
        // A size to check: these queues need none.
        let Blocks(_) = blocks_max;
        Ok(Self { name, began: Instant::now(), order: Mutex::new(Order::new(name)) })
    }

    /// Name of the policy.
    #[getter]
    fn policy(&self) -> &'static str {
        self.name.name()
    }

    /// Number of evictable blocks.
    #[getter]
    fn evictable(&self) -> usize {
        self.order().evictable()
    }

    /// Returns the number of a request that begins: greater than those before. It is kept until
    /// `finish`.
    fn begin(&self) -> u64 {
        let mut order = self.order();
        let request = order.placed.next_order();
        order.open.insert(request);
        request
    }

    /// Adds a block that the cache has got, for this request and at this position in it; for none
    /// if the number is None. It is held unless `evictable`. A block that is there already is
    /// replaced.
    #[pyo3(signature = (key, request=None, position=Place(0), *, evictable=false), text_signature = "($self, key, request=None, position=0, *, evictable=False)")]
    fn insert(
        &self,
        key: &Bound<'_, PyBytes>,
        request: Option<RequestNumber>,
        position: Place,
        evictable: bool,
    ) {
        let mut order = self.order();
        let used = match request {
            Some(request) => used_at(request, position),
            None => (order.placed.next_order(), 0),
        };
        order.insert(key, used, evictable);
    }

    /// Forgets a block that the cache has dropped by itself.
    fn remove(&self, key: &Bound<'_, PyBytes>) -> Outcome<()> {
        self.change(key, Order::remove)
    }

    /// Has a block not be evicted.
    fn hold(&self, key: &Bound<'_, PyBytes>) -> Outcome<()> {
        self.change(key, |order, slot| order.set_evictable(slot, false))
    }

    /// Has a block be evicted when its turn comes, which its latest use decides.
    fn release(&self, key: &Bound<'_, PyBytes>) -> Outcome<()> {
        self.change(key, |order, slot| order.set_evictable(slot, true))
    }

    /// Notes that a request, which has not ended, uses these blocks at these positions. Unknown
    /// keys, and blocks with a later use, are skipped.
    #[pyo3(name = "use")]
    fn use_by(&self, keys: Vec<(Bound<'_, PyBytes>, Place)>, request: RequestNumber) {
        let mut order = self.order();
        for (key, position) in &keys {
            if let Some(slot) = order.slot(key) {
                order.add_use(slot, used_at(request, *position));
            }
        }
    }

    /// Has these blocks be the latest that were used, the first one the latest of all. Unknown keys
    /// are skipped.
    fn touch(&self, keys: Vec<Bound<'_, PyBytes>>) {
        let mut order = self.order();
        for key in keys.iter().rev() {
            if let Some(slot) = order.slot(key) {
                let used = (order.placed.next_order(), 0);
                order.set_used(slot, used);
            }
        }
    }

    /// Ends a request: `keys` are its blocks, first to last, and `reused` those of them that it had
    /// found in the cache. Blocks that the cache does not have any more are named too. `request` is
    /// its number, if it has one. Blocks that other requests use stay theirs.
    #[pyo3(signature = (keys, reused, request=None))]
    fn finish(
        &self,
        keys: Vec<Bound<'_, PyBytes>>,
        reused: &Bound<'_, PySet>,
        request: Option<RequestNumber>,
    ) -> PyResult<()> {
        // Before the lock is taken: a comparison may run code of Python.
        let is_reused = keys.iter().map(|key| reused.contains(key)).collect::<PyResult<Vec<_>>>()?;
        self.order().finish(&keys, &is_reused, request.map(|request| request.0), self.now());
        Ok(())
    }

    /// Takes `count` evictable blocks that are not in `protected`, in the order of their eviction,
    /// and returns their keys. None, and nothing is taken, if there are fewer.
    #[pyo3(signature = (count, protected=None))]
    fn evict(
        &self,
        py: Python<'_>,
        count: Count,
        protected: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<Vec<Py<PyBytes>>>> {
        let keys: Vec<Bound<'_, PyBytes>> = match protected {
            None => Vec::new(),
            Some(keys) => {
                keys.try_iter()?.map(|key| Ok(key?.cast_into::<PyBytes>()?)).collect::<PyResult<_>>()?
            }
        };
        let evicted: Option<Vec<Box<[u8]>>> = {
            let mut order = self.order();
            let protected = keys.iter().filter_map(|key| order.slot(key)).collect();
            order.evict(count.0, &protected, self.now()).map(|evicted| {
                let take = |slot: u32| {
                    order.forget(slot);
                    std::mem::take(&mut order.blocks[slot as usize].key)
                };
                evicted.into_iter().map(take).collect()
            })
        };
        Ok(evicted.map(|keys| keys.iter().map(|key| PyBytes::new(py, key).unbind()).collect()))
    }

    /// Forgets all blocks. Requests that have not ended keep their numbers.
    fn clear(&self) {
        self.order().clear(self.name);
    }

    fn __len__(&self) -> usize {
        self.order().slots.len()
    }

    fn __contains__(&self, key: &Bound<'_, PyBytes>) -> bool {
        self.order().slot(key).is_some()
    }

    fn __repr__(&self) -> String {
        let order = self.order();
        format!(
            "<kvpool.EvictionOrder {}: {} blocks, {} evictable>",
            self.name,
            order.slots.len(),
            order.evictable()
        )
    }
}

/// Adds the class of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyEvictionOrder>()
}
