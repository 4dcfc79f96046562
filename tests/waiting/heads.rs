//! Heads of the queue that are not polled, and what a wait names as its obstacle.

use super::*;

/// A request that is polled by hand, once: it is woken later, and not polled again.
fn stalled<'a>(
    pool: &'a Pool,
    request: AllocRequest,
    bell: &Arc<Bell>,
) -> std::pin::Pin<Box<impl Future<Output = Result<Lease<'static>, AllocError>> + 'a>> {
    let mut future = Box::pin(pool.allocate_async(request).into_future());
    assert!(future.as_mut().poll(&mut Context::from_waker(&Waker::from(bell.clone()))).is_pending());
    future
}

/// Everything is free, and no further frees come: requests with deadlines look after the queue, and
/// so does the background task.
#[tokio::test]
async fn a_head_that_is_not_polled_is_passed_over() {
    for by_deadline in [true, false] {
        let storage = builder(8).turn_patience(Duration::from_millis(20));
        let pool = Pool::builder(KvLayout::named("tiny").unwrap()).blocks(8);
        let pool = if by_deadline { storage } else { pool.turn_patience(Duration::from_millis(20)) };
        let pool = pool.build().unwrap();
        let held = all(&pool);
        let bell = Arc::new(Bell::default());
        let mut first = stalled(&pool, AllocRequest::new(8).priority(Priority::High), &bell);
        let (say, mut said) = mpsc::unbounded_channel();
        let _task = (!by_deadline).then(|| pool.start_defragmenter(Default::default()).unwrap());
        if by_deadline {
            let (other, say) = (pool.clone(), say.clone());
            tokio::spawn(async move {
                let late = std::time::Instant::now() + LIMIT;
                let lease = other.allocate_async(AllocRequest::new(8)).until(late).await.unwrap();
                say.send(1).unwrap();
                drop(lease);
            });
        } else {
            named(&pool, AllocRequest::new(8), 1, &say);
        }
        in_line(&pool, 2).await;
        named(&pool, AllocRequest::new(8), 2, &say);
        in_line(&pool, 3).await;
        drop(held);
        assert!(bell.0.load(Relaxed) > 0);
        let begun = Instant::now();
        assert_eq!((soon(said.recv()).await, soon(said.recv()).await), (Some(1), Some(2)));
        assert!(begun.elapsed() >= Duration::from_millis(20), "not before the patience has passed");
        in_line(&pool, 1).await;
        let stats = pool.stats();
        assert_eq!(stats.passed_over, 1);
        let head = stats.head_of_line.unwrap();
        assert_eq!((head.priority, head.asked), (Priority::High, 8));
        assert!(
            head.unpolled().unwrap() >= Duration::from_millis(20)
                && head.waited() >= head.unpolled().unwrap()
        );
        // It has kept its place: ahead of a later request, though that one is awake.
        let held = all(&pool);
        named(&pool, AllocRequest::new(8), 3, &say);
        in_line(&pool, 2).await;
        let waker = Waker::from(bell.clone());
        assert!(first.as_mut().poll(&mut Context::from_waker(&waker)).is_pending(), "nothing is free");
        assert_eq!(pool.stats().passed_over, 0);
        drop(held);
        let Poll::Ready(lease) = first.as_mut().poll(&mut Context::from_waker(&waker)) else {
            panic!("it is the head, and all blocks are free")
        };
        assert!(said.try_recv().is_err());
        drop(lease);
        drop(first);
        assert_eq!(soon(said.recv()).await, Some(3));
        in_line(&pool, 0).await;
    }
}

/// A request that is polled when it is woken is not overtaken, however long it waited.
#[tokio::test]
async fn a_head_that_sleeps_is_not_passed_over() {
    let pool = builder(8).turn_patience(Duration::from_millis(1)).build().unwrap();
    let mut held = all(&pool);
    let (say, mut said) = mpsc::unbounded_channel();
    named(&pool, AllocRequest::new(8), 1, &say);
    in_line(&pool, 1).await;
    named(&pool, AllocRequest::new(1), 2, &say);
    in_line(&pool, 2).await;
    while held.blocks().len() > 1 {
        held.truncate(held.blocks().len() - 1);
        sleep(Duration::from_millis(5)).await;
    }
    assert!(said.try_recv().is_err(), "the free blocks are for the head");
    drop(held);
    assert_eq!((soon(said.recv()).await, soon(said.recv()).await), (Some(1), Some(2)));
}

/// In a pool with unlimited patience, a request that times out learns what held it up.
#[tokio::test]
async fn a_deadline_names_the_first_waiting() {
    let pool = builder(8).turn_patience(Duration::MAX).build().unwrap();
    let held = all(&pool);
    let bell = Arc::new(Bell::default());
    let first = stalled(&pool, AllocRequest::new(5).priority(Priority::High), &bell);
    drop(held);
    let soon = std::time::Instant::now() + Duration::from_millis(60);
    let refused = pool.allocate_async(AllocRequest::new(1)).until(soon).await;
    let Err(error @ AllocError::Deadline { asked: 1, free: 8, head: Some(head), .. }) = refused else {
        panic!("{refused:?}")
    };
    assert_eq!((head.priority, head.asked), (Priority::High, 5));
    assert!(head.unpolled().unwrap() >= Duration::from_millis(50), "{head:?}");
    let text = error.to_string();
    assert!(text.contains("5 blocks at high priority") && text.contains("not polled since"), "{text}");
    drop(first);
    quiet(&pool, 8);
}

/// A batch that is never ended is distinguished from short ones, and errors name it.
#[tokio::test]
async fn a_batch_that_is_not_ended_is_named() {
    let pool = pool(8);
    assert_eq!((pool.stats().batches_in_flight, pool.stats().oldest_batch), (0, None));
    drop(pool.begin_batch());
    let (forgotten, other) = (pool.begin_batch(), pool.begin_batch());
    drop(all(&pool));
    let refused = pool.allocate(AllocRequest::new(1)).unwrap_err();
    assert!(matches!(
        refused,
        AllocError::Exhausted { retired: 8, oldest_batch: Some(kvpool::Ticket(2)), .. }
    ));
    assert!(refused.to_string().contains("the oldest is batch 2"), "{refused}");
    let short = Duration::from_millis(30);
    let late =
        pool.allocate_async(AllocRequest::new(1)).until(std::time::Instant::now() + short).await.unwrap_err();
    let AllocError::Deadline { retired: 8, oldest_batch: Some(oldest), head: None, .. } = late else {
        panic!("{late:?}")
    };
    assert!(oldest.ticket.0 == 2 && oldest.age() >= short, "{oldest:?}");
    assert!(late.to_string().contains("batch 2, in flight for at least"), "{late}");
    let stats = pool.stats();
    assert_eq!(stats.batches_in_flight, 2);
    assert!(stats.oldest_batch.unwrap().age() >= oldest.age());
    drop(forgotten);
    let stats = pool.stats();
    assert_eq!((stats.batches_in_flight, stats.oldest_batch.unwrap().ticket.0), (1, 3));
    assert!(stats.oldest_batch.unwrap().age() < short, "it is another batch");
    drop(other);
    assert_eq!(pool.stats().oldest_batch, None);
    quiet(&pool, 8);
}
