//! Pools that are resized while they serve: blocks in use move, immovable ones are named in the
//! error.

use std::sync::Barrier;
use std::time::Duration;

use kvpool::compact::Blocker;
use kvpool::storage::KvLayout;
use kvpool::{AllocRequest, Lease, Pool, Priority, ResizeError, ResizeOptions};
use kvpool_testkit::leases::{block, handle, singles};
use kvpool_testkit::threads;

fn pool(blocks: usize, blocks_max: usize) -> Pool {
    let layout = KvLayout::named("tiny").unwrap();
    Pool::builder(layout).blocks(blocks).blocks_max(blocks_max).segment_blocks(64).build().unwrap()
}

/// Seals `blocks` blocks in the last frames of the pool, and frees all others.
fn at_the_end(pool: &Pool, blocks: usize) -> Vec<Lease<'static>> {
    let mut all = singles(pool, AllocRequest::new(pool.total_blocks()));
    all.sort_by_key(|lease| lease.frames().next());
    let mut kept = all.split_off(all.len() - blocks);
    kept.iter_mut().for_each(|lease| lease.seal(..));
    kept
}

#[tokio::test]
async fn immovable_blocks_are_named_and_the_pool_is_unchanged() {
    let pool = pool(500, 500);
    let mut kept = at_the_end(&pool, 10);
    let pin = pool.pin_scoped(handle(&kept[3])).unwrap();
    assert!(kept[7].reopen(0));
    let options = ResizeOptions::new().patience(Duration::from_millis(20));
    let refused = pool.resize_with(100, options).await.unwrap_err();
    let ResizeError::Blocked { asked: 100, blocks, retired: 0 } = &refused else { panic!("{refused:?}") };
    assert_eq!(*blocks, [(block(&kept[3]), Blocker::Pinned), (block(&kept[7]), Blocker::Open)]);
    let text = refused.to_string();
    assert!(
        text.contains("2 blocks are in the way") && text.contains("pinned") && text.contains("not sealed"),
        "{text}"
    );
    assert_eq!((pool.total_blocks(), pool.free_blocks()), (500, 490));
    pool.audit().unwrap();
    drop(pin);
    kept[7].seal(..);
    pool.resize(100).await.unwrap();
    assert_eq!((pool.total_blocks(), pool.free_blocks()), (100, 90));
    drop(kept);
}

/// A batch in flight may still read freed blocks: their frames are removed once it has ended.
#[tokio::test]
async fn a_batch_in_flight_is_waited_for() {
    let pool = pool(500, 500);
    let kept = at_the_end(&pool, 50);
    let batch = pool.begin_batch();
    drop(kept);
    let options = ResizeOptions::new().patience(Duration::from_millis(10));
    let refused = pool.resize_with(100, options).await;
    assert!(
        matches!(&refused, Err(ResizeError::Blocked { retired: 50, blocks, .. }) if blocks.is_empty()),
        "{refused:?}"
    );
    let resize = pool.resize_with(100, ResizeOptions::new().patience(Duration::from_secs(10)));
    let ended = async {
        tokio::time::sleep(Duration::from_millis(5)).await;
        batch.finish();
    };
    let (resized, ()) = tokio::join!(resize, ended);
    assert_eq!(resized.unwrap().to, 100);
    assert_eq!(pool.free_blocks(), 100);
}

/// The reserve moves when the pool's end does: its frames may be anywhere.
#[tokio::test]
async fn a_reserve_moves_with_the_end() {
    let layout = KvLayout::named("tiny").unwrap();
    let pool = Pool::builder(layout).blocks(500).reserve(20).build().unwrap();
    drop(pool.allocate(AllocRequest::new(480)).unwrap());
    for blocks in [300, 100, 40] {
        pool.resize(blocks).await.unwrap();
        let audit = pool.audit().unwrap();
        assert_eq!((audit.reserved, pool.free_blocks()), (20, blocks - 20));
    }
    // The first freed frames fill the reserve: here, the last ones of the pool.
    pool.resize(500).await.unwrap();
    let mut all = singles(&pool, AllocRequest::new(500).priority(Priority::Urgent));
    all.sort_by_key(|lease| lease.frames().next());
    all.truncate(450);
    drop(all);
    assert_eq!(pool.audit().unwrap().reserved, 20);
    pool.resize(300).await.unwrap();
    assert_eq!((pool.audit().unwrap().reserved, pool.free_blocks()), (20, 280));
}

/// `resize` asks for a size, not for a number of additional blocks, also if another call was
/// faster.
#[test]
fn overtaken_resizes_do_not_grow_twice() {
    let pool = pool(100, 400);
    let start = Barrier::new(2);
    threads::scope(|scope| {
        scope.spawn(|| {
            start.wait();
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
            let report = runtime.block_on(pool.resize(200)).unwrap();
            assert_eq!((report.from, report.to), (200, 200));
        });
        let storage = pool.storage().unwrap();
        let grown = pool.blocks().grow(100, &mut |run| {
            start.wait();
            // The other call has read the size already, and waits until this one is done.
            std::thread::sleep(Duration::from_millis(100));
            storage.grow(run.end() as usize)
        });
        grown.unwrap();
    });
    assert_eq!(pool.total_blocks(), 200);
    pool.audit().unwrap();
}

#[tokio::test]
async fn a_refusal_counts_the_reserve() {
    let layout = KvLayout::named("tiny").unwrap();
    let pool = Pool::builder(layout).blocks(200).reserve(20).build().unwrap();
    let _kept = pool.allocate(AllocRequest::new(90)).unwrap();
    assert_eq!(pool.resize(100).await, Err(ResizeError::NoRoom { asked: 100, used: 110 }));
}
