//! The pools, their owners, and the naive model of who owns which block.

use super::*;

/// The model's knowledge of a block that leases own.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Owned {
    refs: u32,
    sealed: bool,
}

pub(super) struct World {
    pools: [Pool; POOLS],
    leases: Vec<(usize, Lease<'static>)>,
    sequences: Vec<(usize, Sequence)>,
    batches: Vec<(usize, Batch)>,
    pins: Vec<(usize, BlockPin)>,
    owned: HashMap<Block, Owned>,
    /// Pins on a block, whatever its owner, and its frame at the first pin.
    pinned: HashMap<Block, (u32, FrameId)>,
    known: Vec<Block>,
    opened: u64,
}

pub(super) type Checked = Result<(), TestCaseError>;

/// Returns the output of a future that is ready at once.
fn now<T>(future: impl IntoFuture<Output = T>) -> T {
    let mut future = pin!(future.into_future());
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return output;
        }
    }
}

pub(super) fn new_pool() -> Pool {
    let prefixes = PrefixConfig::new().key(HashKey::from_bytes([7; 32]));
    let builder = Pool::builder(KvLayout::named("tiny").unwrap()).blocks(BLOCKS).magazine_blocks(4);
    builder.prefix_cache(prefixes).build().unwrap()
}

/// Forges a good handle of an owned block, as any caller can: a refusal reveals the generation.
fn made_up(pool: &Pool, id: BlockId) -> BlockHandle {
    let handle = BlockHandle { id, pool: pool.tag(), generation: Generation(0) };
    match pool.info(handle) {
        Err(HandleError::Stale { now, .. }) => BlockHandle { generation: now, ..handle },
        _ => handle,
    }
}

impl World {
    pub(super) fn new() -> Self {
        Self {
            pools: [new_pool(), new_pool()],
            leases: Vec::new(),
            sequences: Vec::new(),
            batches: Vec::new(),
            pins: Vec::new(),
            owned: HashMap::new(),
            pinned: HashMap::new(),
            known: Vec::new(),
            opened: 0,
        }
    }

    pub(super) fn step(&mut self, operation: &Operation) -> Checked {
        match *operation {
            Operation::Lease { pool, blocks, pinned, contiguous } => {
                let at = usize::from(pool);
                let request = AllocRequest { pinned, contiguous, ..AllocRequest::new(blocks.into()) };
                if let Ok(lease) = self.pools[at].allocate_owned(request) {
                    self.handed_out(at, lease.handles().collect(), pinned)?;
                    self.leases.push((at, lease));
                }
            }
            Operation::Drop(pick) => drop(self.take_lease(pick)),
            Operation::DropElsewhere(pick) => {
                let lease = self.take_lease(pick);
                kvpool_testkit::threads::scope(|scope| {
                    scope.spawn(|| drop(lease)).join().expect("the lease is released without a panic")
                });
            }
            Operation::Forget(pick) => {
                if let Some(index) = pick.index(self.leases.len()) {
                    // It is never freed, and never handed out again: the model keeps it as owned.
                    std::mem::forget(self.leases.swap_remove(index).1);
                }
            }
            Operation::Truncate(pick, keep) => {
                self.shrink_lease(pick, |lease| {
                    lease.truncate(keep.index(lease.blocks().len() + 1).unwrap())
                });
            }
            Operation::SplitOff(pick, place) => {
                if let Some(index) = pick.index(self.leases.len()) {
                    let (at, lease) = &mut self.leases[index];
                    let tail = lease.split_off(place.index(lease.blocks().len() + 1).unwrap());
                    let at = *at;
                    self.leases.push((at, tail));
                }
            }
            Operation::SealLease(pick, from) => self.seal_lease(pick, from),
            Operation::ReopenLease(pick, place) => self.reopen_lease(pick, place)?,
            Operation::Share(pick) => {
                if let Some(&(at, ref lease)) = pick.of(&self.leases) {
                    let shared = lease.share().expect("there are few references");
                    for handle in shared.handles() {
                        self.owned.get_mut(&(at, handle)).expect("a lease's").refs += 1;
                    }
                    self.leases.push((at, shared));
                }
            }
            Operation::Pin(pick) => {
                if let Some(block @ (at, handle)) = self.any_handle(pick)
                    && let Ok(pin) = self.pools[at].pin_scoped(handle)
                {
                    self.pins.push((at, pin));
                    self.got_pinned(block);
                }
            }
            Operation::Unpin(pick) => {
                if let Some(index) = pick.index(self.pins.len()) {
                    let (at, pin) = self.pins.swap_remove(index);
                    let block = (at, pin.handle());
                    drop(pin);
                    self.unpinned(block);
                }
            }
            Operation::Open { pool, prompt, tokens } => self.open(usize::from(pool), prompt, tokens),
            Operation::Append { sequence, tokens, draft } => {
                if let Some(index) = sequence.index(self.sequences.len()) {
                    let (at, sequence) = &mut self.sequences[index];
                    let mut batch = self.pools[*at].begin_batch();
                    // Refused if there are no blocks.
                    let _ = match draft {
                        true => batch.append(sequence, kvpool::Tokens::Draft(tokens.into())),
                        false => batch.append(sequence, usize::from(tokens)),
                    };
                    batch.finish();
                }
            }
            Operation::TruncateSequence(pick, keep) => {
                if let Some(index) = pick.index(self.sequences.len()) {
                    let sequence = &mut self.sequences[index].1;
                    sequence.truncate(keep.index(sequence.len() + 1).unwrap()).unwrap();
                }
            }
            Operation::Fork(pick) => {
                if let Some(&(at, ref sequence)) = pick.of(&self.sequences) {
                    self.opened += 1;
                    let fork = sequence.fork(SequenceId(self.opened)).unwrap();
                    self.sequences.push((at, fork));
                }
            }
            Operation::Close(pick) => {
                if let Some(index) = pick.index(self.sequences.len()) {
                    drop(self.sequences.swap_remove(index));
                }
            }
            Operation::Migrate { sequence, stays } => self.migrate(sequence, stays),
            Operation::Offload { pool, blocks } => {
                let at = usize::from(pool);
                let _ = now(self.pools[at].offload(&self.pools[1 - at], blocks.into()));
            }
            Operation::Clear(pool) => {
                self.pools[usize::from(pool)].clear_prefix_cache();
            }
            Operation::Begin(pool) => {
                let at = usize::from(pool);
                self.batches.push((at, self.pools[at].begin_batch()));
            }
            Operation::End(pick) => {
                if let Some(index) = pick.index(self.batches.len()) {
                    self.batches.swap_remove(index).1.finish();
                }
            }
            Operation::Defragment(pool, order) => {
                let options = DefragOptions::new().order(Order(order));
                now(self.pools[usize::from(pool)].defragment_with(options)).unwrap();
            }
        }
        Ok(())
    }

    /// Records new blocks, which have no owner in the model.
    fn handed_out(&mut self, at: usize, handles: Vec<BlockHandle>, pinned: bool) -> Checked {
        for handle in handles {
            let owner = self.owned.keys().find(|&&(of, other)| of == at && other.id == handle.id);
            prop_assert_eq!(owner, None, "{} is handed out, and owned", handle);
            self.owned.insert((at, handle), Owned { refs: 1, sealed: false });
            if pinned {
                self.got_pinned((at, handle));
            }
            self.learn((at, handle));
        }
        Ok(())
    }

    fn learn(&mut self, block: Block) {
        if self.known.len() == KNOWN_MAX {
            self.known.swap_remove(block.1.id.index() % KNOWN_MAX);
        }
        self.known.push(block);
    }

    /// Returns an earlier handle, one of a leased block, or a forged one of a sequence's block.
    fn any_handle(&self, pick: Pick) -> Option<Block> {
        match pick.0 % 4 {
            0 => pick.of(&self.known).copied(),
            1 | 2 => {
                let (at, lease) = pick.of(&self.leases)?;
                let handles: Vec<_> = lease.handles().collect();
                Some((*at, *pick.of(&handles)?))
            }
            _ => {
                let (at, sequence) = pick.of(&self.sequences)?;
                let ids: Vec<_> = sequence.blocks().collect();
                Some((*at, made_up(&self.pools[*at], *pick.of(&ids)?)))
            }
        }
    }

    /// Drops a reference of a lease.
    fn freed(&mut self, block: Block) {
        let owned = self.owned.get_mut(&block).expect("owned in the model");
        owned.refs -= 1;
        if owned.refs == 0 {
            self.gone(block);
        }
    }

    /// Drops the last reference, and all pins with it.
    fn gone(&mut self, block: Block) {
        self.owned.remove(&block);
        self.pinned.remove(&block);
    }

    fn got_pinned(&mut self, block: Block) {
        let frame = self.pools[block.0].info(block.1).expect("the block is owned").frame;
        self.pinned.entry(block).or_insert((0, frame)).0 += 1;
    }

    fn unpinned(&mut self, block: Block) {
        // Dropped with the block.
        let Some((pins, _)) = self.pinned.get_mut(&block) else { return };
        *pins -= 1;
        if *pins == 0 {
            self.pinned.remove(&block);
        }
    }

    fn take_lease(&mut self, pick: Pick) -> Option<Lease<'static>> {
        let (at, lease) = self.leases.swap_remove(pick.index(self.leases.len())?);
        lease.handles().for_each(|handle| self.freed((at, handle)));
        Some(lease)
    }

    /// Frees some blocks of a lease.
    fn shrink_lease(&mut self, pick: Pick, shrink: impl FnOnce(&mut Lease<'static>)) {
        let Some(index) = pick.index(self.leases.len()) else { return };
        let (at, lease) = &mut self.leases[index];
        let (at, before) = (*at, lease.handles().collect::<Vec<_>>());
        shrink(lease);
        let left: Vec<_> = lease.blocks().to_vec();
        before
            .into_iter()
            .filter(|handle| !left.contains(&handle.id))
            .for_each(|handle| self.freed((at, handle)));
    }

    fn seal_lease(&mut self, pick: Pick, from: Pick) {
        let Some(index) = pick.index(self.leases.len()) else { return };
        let (at, lease) = &mut self.leases[index];
        let from = from.index(lease.blocks().len() + 1).unwrap();
        lease.seal(from..);
        for handle in lease.handles().skip(from) {
            self.owned.get_mut(&(*at, handle)).expect("a lease's").sealed = true;
        }
    }

    fn reopen_lease(&mut self, pick: Pick, place: Pick) -> Checked {
        let Some(index) = pick.index(self.leases.len()) else { return Ok(()) };
        let (at, lease) = &mut self.leases[index];
        let Some(place) = place.index(lease.blocks().len()) else { return Ok(()) };
        let handle = lease.handles().nth(place).expect("a place in the lease");
        let owned = self.owned.get_mut(&(*at, handle)).expect("a lease's");
        prop_assert_eq!(lease.reopen(place), owned.refs == 1, "no move of {}", handle);
        owned.sealed &= owned.refs > 1;
        Ok(())
    }

    fn open(&mut self, at: usize, prompt: u8, tokens: u8) {
        self.opened += 1;
        let prompt: Vec<u32> = (0..u32::from(tokens)).map(|token| 1000 * u32::from(prompt) + token).collect();
        let Ok(mut sequence) = self.pools[at].sequence(SequenceId(self.opened)).tokens(&prompt) else {
            return;
        };
        let missing = prompt.len() - sequence.len();
        // Refused if there are no blocks: then its length is unchanged.
        let mut step = self.pools[at].begin_batch();
        let _ = step.append(&mut sequence, missing);
        step.finish();
        self.sequences.push((at, sequence));
    }

    fn migrate(&mut self, pick: Pick, stays: bool) {
        let Some(index) = pick.index(self.sequences.len()) else { return };
        let at = self.sequences[index].0;
        let (from, to) = (&self.pools[at], &self.pools[1 - at]);
        let arrived = if stays {
            now(from.replicate(&self.sequences[index].1, to)).ok().map(|(sequence, _)| (1 - at, sequence))
        } else {
            let (_, sequence) = self.sequences.swap_remove(index);
            match now(from.migrate(sequence, to).until(std::time::Instant::now())) {
                Ok((sequence, _)) => Some((1 - at, sequence)),
                Err(refused) => Some((at, *refused.sequence)),
            }
        };
        self.sequences.extend(arrived);
    }

    /// Checks that the owners, the pools and the model agree on the ownership of every block.
    pub(super) fn check(&self) -> Checked {
        let mut lists: HashMap<(usize, BlockId), u32> = HashMap::new();
        for (at, sequence) in &self.sequences {
            for id in sequence.blocks() {
                *lists.entry((*at, id)).or_default() += 1;
            }
        }
        for (&(at, handle), owned) in &self.owned {
            let info = self.pools[at].info(handle);
            let info = info.map_err(|error| TestCaseError::fail(format!("an owned block: {error}")))?;
            prop_assert_eq!((info.refs, info.sealed), (owned.refs, owned.sealed), "{}: {:?}", handle, owned);
            prop_assert_eq!(lists.get(&(at, handle.id)), None, "{} is in a sequence too", handle);
            let pins = self.pinned.get(&(at, handle)).map_or(0, |&(pins, _)| pins);
            prop_assert_eq!(info.pins, pins, "{}", handle);
        }
        for (&(at, id), &refs) in &lists {
            let info = self.pools[at].info(made_up(&self.pools[at], id)).expect("a sequence's");
            prop_assert_eq!(info.refs, refs, "{} in sequences", id);
        }
        for (&(at, handle), &(pins, frame)) in &self.pinned {
            if let Ok(info) = self.pools[at].info(handle) {
                prop_assert_eq!((info.pins, info.frame), (pins, frame), "{} is pinned", handle);
            }
        }
        for (at, pool) in self.pools.iter().enumerate() {
            let report = pool.audit().map_err(|finding| TestCaseError::fail(finding.to_string()))?;
            let owned =
                self.owned.iter().filter(|&(&(of, _), _)| of == at).map(|(_, owned)| u64::from(owned.refs));
            let listed = lists.iter().filter(|&(&(of, _), _)| of == at).map(|(_, &refs)| u64::from(refs));
            let references = owned.sum::<u64>() + listed.sum::<u64>();
            prop_assert_eq!(report.references, references, "pool {}: {:?}", at, report);
        }
        Ok(())
    }

    /// Releases everything; only the leaked blocks remain owned.
    pub(super) fn finish(mut self) -> Checked {
        self.sequences.clear();
        self.batches.clear();
        while !self.leases.is_empty() {
            drop(self.take_lease(Pick(0)));
        }
        self.pins.clear();
        self.pinned.clear();
        for (at, pool) in self.pools.iter().enumerate() {
            let refs: Vec<_> =
                self.owned.iter().filter(|&(&(of, _), _)| of == at).map(|(_, owned)| owned.refs).collect();
            let (forgotten, references) = (refs.len(), u64::from(refs.iter().sum::<u32>()));
            let report = pool.audit().map_err(|finding| TestCaseError::fail(finding.to_string()))?;
            prop_assert_eq!((report.owned, report.references), (forgotten, references), "pool {}", at);
            prop_assert_eq!(pool.available_blocks(), BLOCKS - forgotten);
        }
        Ok(())
    }
}
