//! A slice of reclaim that is stopped with frames in its hands: requests go on, and one that waits
//! is woken when the slice ends.
#![cfg(not(kvpool_loom))]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::*};
use std::sync::mpsc::channel;
use std::time::Duration;

use kvpool::prefix::PrefixConfig;
use kvpool::storage::KvLayout;
use kvpool::{AllocRequest, Pool, SequenceId};
use kvpool_testkit::steps::append;
use kvpool_testkit::storages::{Call, Hooked};
use tokio::time::timeout;

const BLOCKS: usize = 2_048;

#[tokio::test(flavor = "multi_thread")]
async fn a_request_is_woken_by_a_slice_that_was_stopped() {
    let (stopped, is_stopped) = channel();
    let (resume, resumed) = channel::<()>();
    let (is_armed, resumed) = (Arc::new(AtomicBool::new(false)), std::sync::Mutex::new(resumed));
    let armed = is_armed.clone();
    let layout = KvLayout::named("tiny").unwrap();
    let storage = Hooked::new(layout.clone(), BLOCKS + 1, BLOCKS + 1, move |call| {
        if call == Call::Zero && armed.swap(false, AcqRel) {
            stopped.send(()).unwrap();
            resumed.lock().unwrap().recv().unwrap();
        }
        Ok(())
    });
    let pool = Pool::builder(layout).blocks(BLOCKS).storage(Arc::new(storage)).zero_on_free();
    let pool = pool.prefix_cache(PrefixConfig::new()).build().unwrap();
    let tokens: Vec<u32> = (0..BLOCKS as u32 * 4).collect();
    let open = |id: u64, tokens: &[u32]| pool.sequence(SequenceId(id)).tokens(tokens).unwrap();
    // Most of the pool is cached, and a list takes the last whole unit: a slice is due.
    let mut first = open(1, &tokens[..4 * 1_900]);
    append(&pool, &mut first, 4 * 1_900);
    drop(first);
    let mut held = open(2, &tokens[4 * 1_900..]);
    let mut batch = pool.begin_batch();
    batch.append(&mut held, 4 * 64).unwrap();
    is_armed.store(true, Release);
    let slice = std::thread::spawn(move || batch.finish());
    is_stopped.recv_timeout(Duration::from_secs(60)).expect("a slice of reclaim wipes frames");
    // Others evict as before.
    drop(pool.allocate(AllocRequest::new(100)).unwrap());
    let everything = pool.allocate(AllocRequest::new(pool.available_blocks())).unwrap();
    let waiting = pool.allocate_async(AllocRequest::new(1)).into_future();
    tokio::pin!(waiting);
    assert!(timeout(Duration::from_millis(50), waiting.as_mut()).await.is_err(), "nothing is free");
    resume.send(()).unwrap();
    drop(timeout(Duration::from_secs(60), waiting).await.expect("woken").unwrap());
    slice.join().unwrap();
    drop((held, everything));
    assert_eq!(pool.audit().unwrap().owned, 0);
}
