use std::sync::Mutex;
use std::thread::{self, JoinHandle};

use super::*;
use crate::block::{AllocRequest, BlocksConfig, Evictable, Evictor, Tenant};
use crate::ids::{BlockId, DeviceId, FrameId, Ticket};
use crate::sync::{AtomicBool, Ordering::Relaxed};

const CONFIG: BlocksConfig = BlocksConfig {
    frames: 64,
    frames_max: 64,
    segment_frames: 64,
    magazine_blocks: 16,
    threads: 1,
    has_null_block: false,
    reserve: 0,
    run_frames: 0,
    device: DeviceId::Host,
};

/// A user's policy that, during an allocation, drops the last reference to the pool, uses another
/// pool for the first time, and has another thread use this one. Then it evicts one block.
#[derive(Default)]
struct Hostile {
    pool: Mutex<Option<Blocks>>,
    given: Mutex<Vec<BlockId>>,
    other: Mutex<Option<JoinHandle<()>>>,
    has_struck: AtomicBool,
}

impl Hostile {
    fn strike(&self) {
        let Some(pool) = self.pool.lock().unwrap().take() else { return };
        pool.close();
        let next = Blocks::new(CONFIG, None);
        next.allocate(&AllocRequest::new(1), &mut |_| ()).unwrap();
        assert_eq!(
            pool.thread_caches_in_use(),
            1,
            "the thread is in the middle of an allocation in its thread cache"
        );
        let given = std::mem::take(&mut *self.given.lock().unwrap());
        *self.other.lock().unwrap() = Some(thread::spawn(move || {
            given.iter().for_each(|&id| pool.release(&[id]));
        }));
        self.has_struck.store(true, Relaxed);
    }
}

impl Evictor for Hostile {
    fn grow(&self, _: &Core, _: usize) {}

    fn became_evictable(&self, _: &Core, _: &[Evictable], _: Ticket) {}

    fn evict(&self, core: &Core, oldest: Ticket, _: (usize, Tenant), freed: &mut dyn FnMut(&[FrameId])) {
        self.strike();
        (0..core.rows() as u32)
            .find_map(|id| core.evict(BlockId(id), oldest).ok())
            .into_iter()
            .for_each(|frame| freed(&[frame]));
    }

    fn evicts_early(&self, _: &[BlockId], _: u32) -> bool {
        false
    }

    fn tag(&self, _: BlockId, _: crate::block::BlockWord) -> Option<Ticket> {
        Some(Ticket(0))
    }

    fn releases(&self) -> u64 {
        0
    }

    fn noted_tag(&self, _: BlockId, _: crate::block::BlockWord) -> Option<Ticket> {
        None
    }

    fn assume_tag(&self, _: BlockId, _: crate::block::BlockWord, _: Ticket) {}

    fn forget(&self, _: &Core, _: BlockId) {}
}

/// A thread cache has one thread while that thread is anywhere in the pool, whatever user code does
/// further down the stack. Miri detects the race if it has two.
#[test]
fn no_users_code_takes_a_thread_cache_from_under_its_thread() {
    let hostile = Arc::new(Hostile::default());
    let pool = Blocks::with_evictor(CONFIG, None, Some(Box::new(hostile.clone())));
    let mut cached = Vec::new();
    pool.allocate_listed(&AllocRequest::new(40), None, &mut |id| cached.push(id)).unwrap();
    assert!(cached.iter().all(|&id| pool.seal_cached(pool.handle(id))));
    pool.release_listed(&cached);
    let mut given = Vec::new();
    pool.allocate(&AllocRequest::new(24), &mut |id| given.push(id)).unwrap();
    (*hostile.pool.lock().unwrap(), *hostile.given.lock().unwrap()) = (Some(pool.clone()), given);
    let mut ids = Vec::new();
    pool.allocate(&AllocRequest::new(40), &mut |id| ids.push(id)).unwrap();
    assert!(hostile.has_struck.load(Relaxed));
    let other = hostile.other.lock().unwrap().take().unwrap();
    other.join().unwrap();
    pool.release(&ids);
    assert_eq!(pool.counts().used(), 0);
    // Outside of the pool, the thread gives up its cache of a closed pool.
    assert_eq!(pool.thread_caches_in_use(), 1);
    Blocks::new(CONFIG, None).allocate(&AllocRequest::new(1), &mut |_| ()).unwrap();
    assert_eq!(pool.thread_caches_in_use(), 0);
}
