//! Real threads on a pool that shrinks and grows under their feet: their bytes stay theirs, and in the end everything is
//! there once.
//!
//! The seed is printed; `KVPOOL_SEED=<seed>` runs the same choices again (the schedule is the machine's).
#![cfg(not(kvpool_loom))]

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;

use fastrand::Rng;
use kvpool::ids::{BlockHandle, Run};
use kvpool::pool::{AllocRequest, Pool};
use kvpool::storage::{Dtype, KvLayout};

const BLOCKS: usize = if cfg!(miri) { 150 } else { 1500 };
const ROUNDS: usize = if cfg!(miri) { 5 } else { 400 };

/// The whole block of a handle, written or read. A panic if its frame is not there.
fn each_block(pool: &Pool, handles: &[BlockHandle], mut f: impl FnMut(&BlockHandle, Run)) {
    for handle in handles {
        f(handle, Run { start: pool.blocks().frame(handle.id), len: 1 });
    }
}

fn write(pool: &Pool, handles: &[BlockHandle]) {
    let storage = pool.storage().unwrap();
    each_block(pool, handles, |handle, run| {
        let bytes = vec![stamp(handle); pool.layout().packed_bytes()];
        // SAFETY: the block is the thread's.
        unsafe { storage.unpack(&[run], &bytes) }.unwrap_or_else(|error| panic!("{handle}: {error}"));
    });
}

fn check(pool: &Pool, handles: &[BlockHandle]) {
    let (storage, mut bytes) = (pool.storage().unwrap(), vec![0; pool.layout().packed_bytes()]);
    each_block(pool, handles, |handle, run| {
        // SAFETY: as above.
        unsafe { storage.pack(&[run], &mut bytes) }.unwrap_or_else(|error| panic!("{handle}: {error}"));
        assert!(bytes.iter().all(|&byte| byte == stamp(handle)), "{handle} in {run} lost its bytes");
    });
}

/// Never that of memory that was given back.
fn stamp(handle: &BlockHandle) -> u8 {
    1 + (handle.id.get() as u64 * 31 + handle.generation.0) as u8 % 255
}

#[test]
fn threads_keep_their_bytes_while_the_pool_shrinks_and_grows() {
    // 8 KiB a block, so that whole pages go back.
    let layout = KvLayout::builder().layers(2).kv_heads(2).head_dim(64).block_tokens(4).dtype(Dtype::F32);
    let pool =
        Pool::builder(layout.build().unwrap()).blocks(BLOCKS).segment_blocks(256).threads(4).build().unwrap();
    let seed = std::env::var("KVPOOL_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| if cfg!(miri) { 1 } else { fastrand::u64(..) });
    eprintln!("KVPOOL_SEED={seed}");
    let stop = AtomicBool::new(false);
    let (mut commits, mut given_up) = (0, 0);
    thread::scope(|scope| {
        for thread in 0..3 {
            let (pool, stop) = (&pool, &stop);
            scope.spawn(move || {
                let mut rng = Rng::with_seed(seed ^ thread);
                let mut held = Vec::new();
                while !stop.load(Relaxed) {
                    let first = held.len();
                    let _ = pool.allocate_raw(AllocRequest::new(rng.usize(1..=20)), &mut held);
                    write(pool, &held[first..]);
                    if held.len() > rng.usize(1..100) {
                        rng.shuffle(&mut held);
                        let freed = held.split_off(held.len() / 3);
                        check(pool, &freed);
                        let batch = rng.bool().then(|| pool.begin_batch());
                        pool.free(&freed).unwrap();
                        drop(batch);
                    }
                }
                check(pool, &held);
                pool.free(&held).unwrap();
            });
        }
        // Also by a panic: the others do not run for ever.
        struct Raise<'a>(&'a AtomicBool);
        impl Drop for Raise<'_> {
            fn drop(&mut self) {
                self.0.store(true, Relaxed);
            }
        }
        let _raise = Raise(&stop);
        let mut rng = Rng::with_seed(!seed);
        for _ in 0..ROUNDS {
            let to = rng.usize(1..BLOCKS);
            let total = pool.total_blocks();
            if to >= total {
                pool.grow(to + 1 - total).unwrap();
            }
            let mut shrinking = pool.blocks().begin_shrink(to).unwrap();
            let patience = rng.usize(0..30);
            for _ in 0..patience {
                if shrinking.collect() == 0 {
                    break;
                }
                thread::yield_now();
            }
            let storage = pool.storage().unwrap();
            // SAFETY: the frames that go are all the shrinker's.
            match shrinking.commit(|gone| unsafe { storage.shrink(gone.start.index()) }) {
                Ok(()) => commits += 1,
                Err(_) => given_up += 1,
            }
        }
    });
    println!("{commits} shrinks, {given_up} given up");
    assert!(cfg!(miri) || (commits > 0 && given_up > 0));
    // Until the others have left; this thread has no cache yet.
    while pool.blocks().residents() > 0 {
        thread::yield_now();
    }
    let report = pool.audit().unwrap();
    assert_eq!((report.owned, report.held, report.total), (0, 0, pool.total_blocks() + 1));
    let room = BLOCKS - pool.total_blocks();
    if room > 0 {
        pool.grow(room).unwrap();
    }
    let all = pool.allocate(AllocRequest::new(BLOCKS)).unwrap();
    pool.audit().unwrap();
    drop(all);
    pool.audit().unwrap();
}
