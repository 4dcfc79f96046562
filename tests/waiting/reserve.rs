//! The reserve for urgent requests.

use super::*;
use kvpool_testkit::steps::exhausted;

#[test]
fn a_reserve_must_leave_something() {
    for reserve in [10, 11, usize::MAX] {
        let refused = builder(10).reserve(reserve).build().err().unwrap().to_string();
        assert_eq!(refused, format!("reserve: got {reserve}, expected less than the pool's 10 blocks"));
    }
}

#[tokio::test]
async fn the_reserve_is_for_urgent_requests() {
    let pool = builder(100).reserve(10).build().unwrap();
    assert_eq!((pool.total_blocks(), pool.free_blocks(), pool.stats().reserved), (100, 90, 10));
    assert!(!pool.blocks().is_awaited(), "a full reserve costs nothing");
    assert_eq!(pool.audit().unwrap().reserved, 10);
    let held = all(&pool);
    for priority in [Priority::Normal, Priority::High] {
        let refused = pool.allocate(AllocRequest::new(1).priority(priority)).unwrap_err();
        assert_eq!(refused, exhausted(1, 0));
    }
    let urgent = |blocks| AllocRequest::new(blocks).priority(Priority::Urgent);
    assert!(pool.allocate(urgent(11)).is_err());
    assert_eq!(pool.stats().reserved, 10, "a refusal takes nothing");
    let mut one = pool.allocate_owned(urgent(4)).unwrap();
    let mut sequence = pool.sequence(SequenceId(1)).priority(Priority::Urgent).open().unwrap();
    append(&pool, &mut sequence, 3 * pool.layout().block_tokens());
    let three = soon(pool.allocate_async(urgent(3))).await.unwrap();
    assert_eq!((pool.stats().reserved, pool.audit().unwrap().owned), (0, 100));
    let mut poor = pool.sequence(SequenceId(2)).open().unwrap();
    let outcome = pool.begin_batch().append(&mut poor, 1);
    assert!(matches!(outcome, Err(SequenceError::Alloc(AllocError::Exhausted { .. }))));

    // Freed blocks fill the reserve before other requests get any.
    one.truncate(1);
    assert_eq!((pool.stats().reserved, pool.free_blocks()), (3, 0));
    assert!(pool.allocate(AllocRequest::new(1)).is_err());
    assert!(pool.blocks().is_awaited());
    drop((one, three, sequence));
    assert_eq!((pool.stats().reserved, pool.free_blocks()), (10, 0));
    drop(held);
    assert_eq!((pool.stats().reserved, pool.free_blocks()), (10, 90));
    drop(poor);
    let report = pool.audit().unwrap();
    assert_eq!((report.owned, report.reserved), (0, 10));
    assert!(!pool.blocks().is_awaited());
}

/// When a batch ends, its retired blocks fill the reserve before a waiting request gets any.
#[tokio::test]
async fn the_reserve_is_filled_when_a_batch_ends() {
    let pool = builder(10).reserve(4).build().unwrap();
    let held = all(&pool);
    let urgent = pool.allocate_owned(AllocRequest::new(4).priority(Priority::Urgent)).unwrap();
    let batch = pool.begin_batch();
    drop(held);
    let other = pool.clone();
    let waiting = tokio::spawn(async move { other.allocate_async(AllocRequest::new(3)).await });
    in_line(&pool, 1).await;
    batch.finish();
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert!(!waiting.is_finished(), "the reserve got four of six freed blocks");
    assert_eq!((pool.stats().reserved, pool.free_blocks()), (4, 2));
    drop(urgent);
    drop(soon(waiting).await.unwrap().unwrap());
    assert_eq!(pool.stats().reserved, 4);
    quiet(&pool, 6);
}

/// The thread whose retire list has the frames is gone, and no request searches.
#[tokio::test]
async fn the_reserve_is_filled_from_the_retire_list_of_a_thread_that_ended() {
    let pool = builder(10).reserve(4).build().unwrap();
    let held = all(&pool);
    let urgent = pool.allocate_owned(AllocRequest::new(4).priority(Priority::Urgent)).unwrap();
    let batch = pool.begin_batch();
    std::thread::spawn(move || drop(held)).join().unwrap();
    assert_eq!((pool.stats().reserved, pool.stats().retired), (0, 6));
    batch.finish();
    assert_eq!((pool.stats().reserved, pool.free_blocks()), (4, 2));
    drop(urgent);
    quiet(&pool, 6);
}

/// The reserve is at the end of the pool, which is removed; and a request waits for more than
/// remains.
#[tokio::test]
async fn a_pool_shrinks_below_its_reserve_and_waiting_requests() {
    let pool =
        builder(256).without_null_block().magazine_blocks(0).reserve(8).segment_blocks(64).build().unwrap();
    let mut first: Vec<_> = (0..248).map(|_| pool.allocate_owned(AllocRequest::new(1)).unwrap()).collect();
    first.sort_by_key(|lease| lease.frames().next());
    let urgent = pool.allocate_owned(AllocRequest::new(8).priority(Priority::Urgent)).unwrap();
    // The last eight fill the reserve again.
    first.truncate(240);
    assert_eq!((pool.stats().reserved, pool.free_blocks()), (8, 0));
    let held = first.swap_remove(0);
    drop((first, urgent));
    let other = pool.clone();
    let waiting = tokio::spawn(async move { other.allocate_async(AllocRequest::new(248)).await });
    in_line(&pool, 1).await;
    let min = pool.resize(8).await.unwrap_err();
    assert!(min.to_string().contains("at least 9"), "{min}");
    soon(pool.resize(64)).await.unwrap();
    let refused = soon(waiting).await.unwrap().unwrap_err();
    assert_eq!(refused, AllocError::TooLarge { asked: 248, total: 64 });
    assert_eq!((pool.stats().reserved, pool.free_blocks()), (8, 55));
    let all = pool.allocate_owned(AllocRequest::new(63).priority(Priority::Urgent)).unwrap();
    assert!(all.frames().all(|frame| frame.0 < 64));
    drop((all, held));
    assert_eq!(pool.stats().reserved, 8);
    quiet(&pool, 56);
}

/// The reserve was filled one by one, and interrupts the free frames: it moves, and keeps its size.
#[tokio::test]
async fn the_reserve_makes_way_for_a_run() {
    let pool = builder(12).without_null_block().reserve(3).magazine_blocks(0).build().unwrap();
    let urgent = AllocRequest::new(12).priority(Priority::Urgent);
    let mut all = singles(&pool, urgent);
    // The first freed frames, in the middle of the pool, are set aside.
    all.retain(|lease| ![2, 5, 8].contains(&block(lease).get()));
    drop(all);
    assert_eq!((pool.stats().reserved, pool.free_blocks()), (3, 9));
    for _ in 0..2 {
        let run = soon(pool.allocate_async(AllocRequest::new(9).contiguous())).await.unwrap();
        assert_eq!((run.runs().count(), pool.stats().reserved, pool.free_blocks()), (1, 3, 0));
        drop(run);
        quiet(&pool, 9);
    }
}
