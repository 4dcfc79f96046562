//! Storages that fail or panic midway, and dropped futures: the source is unchanged, the target is
//! free.

use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex, mpsc};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use kvpool::prefix::PrefixKeys;
use kvpool::storage::{HostStorage, Storage};
use kvpool::{
    AllocError, AllocRequest, DeviceId, HandleError, Pool, Run, SequenceError, SequenceId, StorageError,
    TransferError,
};

use super::kv::{admit, builder, cached, check, config, is_idle, other, plain, pool, prompt, store};

/// Longer than any wait in this file.
const LIMIT: Duration = Duration::from_secs(60);

type Hook = Box<dyn FnMut() -> Result<(), StorageError> + Send>;

/// Host memory that poses as a device's, and calls a hook in a transfer, after the first frame.
struct Faulty {
    host: HostStorage,
    hook: Mutex<Hook>,
}

impl std::fmt::Debug for Faulty {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Faulty").field(&self.host).finish()
    }
}

const DEVICE: DeviceId = DeviceId::Cuda(3);

fn first_of(runs: &[Run]) -> Run {
    Run { start: runs[0].start, len: 1 }
}

// All but `receive` is forwarded to host memory. The frame rule is the caller's.
impl Storage for Faulty {
    kvpool_testkit::as_on_the_host!(host);

    fn device(&self) -> DeviceId {
        DEVICE
    }

    unsafe fn receive(&self, source: &dyn Storage, from: &[Run], to: &[Run]) -> Result<(), StorageError> {
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: see above.
        unsafe { self.host.receive(source, &[first_of(from)], &[first_of(to)]) }?;
        // These tests make hooks panic: ignore the poisoned lock.
        let mut hook = self.hook.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        hook()?;
        // SAFETY: see above.
        unsafe { self.host.receive(source, from, to) }
    }
}

fn faulty(blocks: usize, hook: impl FnMut() -> Result<(), StorageError> + Send + 'static) -> Pool {
    // One more for the null block.
    let host = HostStorage::new(other(), blocks + 1, blocks + 1).unwrap();
    let storage = Arc::new(Faulty { host, hook: Mutex::new(Box::new(hook)) });
    builder(other(), blocks).storage(storage).prefix_cache(config()).build().unwrap()
}

fn broken() -> StorageError {
    StorageError::Device { device: DEVICE, doing: "a copy", reason: "on purpose".into() }
}

/// Returns a hook that fails once.
fn once(
    mut fault: impl FnMut() -> Result<(), StorageError> + Send,
) -> impl FnMut() -> Result<(), StorageError> + Send {
    let mut is_first = true;
    move || if std::mem::replace(&mut is_first, false) { fault() } else { Ok(()) }
}

/// Waits for a condition: the copying thread may still have blocks that a transfer released.
fn until(what: &str, holds: impl Fn() -> bool) {
    let began = Instant::now();
    while !holds() {
        assert!(began.elapsed() < LIMIT, "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn until_idle(pool: &Pool) {
    until("not idle", || pool.available_blocks() == pool.total_blocks() && pool.sequence_count() == 0);
    until("not quiet", || pool.audit().is_ok());
    is_idle(pool);
}

/// The payload of a panic, whose destructor panics too.
struct Payload;

impl Drop for Payload {
    fn drop(&mut self) {
        panic!("on purpose, in a payload");
    }
}

/// Without a runtime the polling thread does the work.
#[test]
fn a_panic_whose_payload_panics_is_an_error() {
    let fault = once(|| std::panic::panic_any(Payload));
    let (from, to) = (pool(plain(), 50), faulty(50, fault));
    let sequence = admit(&from, 7, &prompt(1, 42)).unwrap();
    let mut migration = pin!(from.migrate(sequence, &to).into_future());
    let outcome = migration.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    let Poll::Ready(Err(failed)) = outcome else { panic!("it neither waits nor succeeds") };
    assert_eq!(failed.error, TransferError::Dropped);
    drop(failed);
    [&from, &to].into_iter().for_each(until_idle);
}

#[tokio::test]
async fn a_sequence_comes_back_with_the_error() {
    let tokens = prompt(1, 42);
    let faults: [(Hook, TransferError); 2] = [
        (Box::new(|| Err(broken())), TransferError::Storage(broken())),
        (Box::new(|| panic!("on purpose")), TransferError::Dropped),
    ];
    for (fault, want) in faults {
        let (from, to) = (pool(plain(), 50), faulty(50, once(fault)));
        let sequence = admit(&from, 7, &tokens).unwrap();
        let failed = from.migrate(sequence, &to).await.unwrap_err();
        assert_eq!(failed.error, want);
        until_idle(&to);
        let mut sequence = *failed.sequence;
        // It continues here, in its block, and then goes there after all.
        let blocks: Vec<_> = sequence.blocks().collect();
        until("held", || from.audit().is_ok());
        let mut batch = from.begin_batch();
        let appended = batch.append(&mut sequence, &[5]).unwrap();
        store(&mut batch, &mut sequence, 42, &[5]);
        batch.finish();
        assert!(appended.copied.is_none() && sequence.blocks().eq(blocks), "{appended:?}");
        let tokens = [&tokens[..], &[5]].concat();
        check(&from, &sequence, &tokens);
        let (sequence, _) = from.migrate(sequence, &to).await.unwrap();
        check(&to, &sequence, &tokens);
        drop(sequence);
        [from, to].iter().for_each(until_idle);
    }
}

#[tokio::test]
async fn cached_blocks_stay_after_a_failure() {
    for panics in [false, true] {
        let fault = move || if panics { panic!("on purpose") } else { Err(broken()) };
        let (here, there) = (pool(plain(), 50), faulty(50, once(fault)));
        let prompts = [prompt(1, 21), prompt(2, 21), prompt(3, 21)];
        prompts.iter().for_each(|prompt| drop(admit(&here, 1, prompt).unwrap()));
        let failed = here.offload(&there, 10).await.unwrap_err();
        assert_eq!(failed, if panics { TransferError::Dropped } else { TransferError::Storage(broken()) });
        until_idle(&there);
        until_idle(&here);
        assert_eq!((there.stats().evictable, here.stats().evictable), (0, 15));
        // In the old order: five of the coldest are evicted.
        drop(here.allocate(AllocRequest::new(50 - 15 + 5)).unwrap());
        let counts = |pool: &Pool| [0, 1, 2].map(|first: usize| cached(pool, &prompts[first]));
        assert_eq!(counts(&here), [0, 5, 5]);
        here.offload(&there, 10).await.unwrap();
        assert_eq!((counts(&here), counts(&there)), ([0; 3], [0, 5, 5]));
    }
}

/// Bringing back fails: no block has come back, and the other pool's blocks are unchanged.
#[tokio::test]
async fn a_failed_return_brings_nothing_back() {
    let (here, there) = (faulty(50, once(|| Err(broken()))), pool(plain(), 50));
    let tokens = prompt(1, 42);
    drop(admit(&there, 1, &tokens).unwrap());
    let failed = here.bring_back(&there, &PrefixKeys::new(), &tokens).await.unwrap_err();
    assert_eq!(failed, TransferError::Storage(broken()));
    [&here, &there].into_iter().for_each(until_idle);
    assert_eq!([cached(&here, &tokens), cached(&there, &tokens)], [0, 10]);
    here.bring_back(&there, &PrefixKeys::new(), &tokens).await.unwrap();
    assert_eq!([cached(&here, &tokens), cached(&there, &tokens)], [10, 10]);
}

/// The pool of the lost device hands out nothing more; the other one continues, and has the
/// sequence.
#[tokio::test]
async fn a_device_that_is_lost_during_a_transfer() {
    let lost = || StorageError::DeviceLost { device: DEVICE, reason: "on purpose".into() };
    let (from, to) = (pool(plain(), 50), faulty(50, move || Err(lost())));
    let tokens = prompt(1, 42);
    let sequence = admit(&from, 7, &tokens).unwrap();
    let failed = from.migrate(sequence, &to).await.unwrap_err();
    assert_eq!(failed.error, TransferError::Storage(lost()));
    assert!(to.is_lost() && !from.is_lost());
    check(&from, &failed.sequence, &tokens);
    let failed = from.migrate(*failed.sequence, &to).await.unwrap_err();
    assert!(matches!(failed.error, TransferError::Alloc(_)), "{failed}");
    drop(failed);
    until_idle(&from);
}

/// Blocks cached on a lost device do not count: nothing is evicted or shared because of them.
#[tokio::test]
async fn blocks_cached_on_a_lost_device_do_not_count() {
    let lost = || StorageError::DeviceLost { device: DEVICE, reason: "on purpose".into() };
    let is_lost = Arc::new(AtomicBool::new(false));
    let fails = is_lost.clone();
    let (here, there) =
        (pool(plain(), 50), faulty(50, move || if fails.load(SeqCst) { Err(lost()) } else { Ok(()) }));
    let tokens = prompt(1, 40);
    let sequence = admit(&here, 1, &tokens).unwrap();
    drop(here.replicate(&sequence, &there).await.unwrap());
    drop(sequence);
    assert_eq!([cached(&here, &tokens[..39]), cached(&there, &tokens[..39])], [9, 9]);
    is_lost.store(true, SeqCst);
    let other = admit(&here, 2, &prompt(2, 5)).unwrap();
    drop(here.migrate(other, &there).await.unwrap_err());
    assert!(there.is_lost());
    let want = TransferError::Alloc(AllocError::DeviceLost { device: DEVICE });
    assert_eq!(here.offload(&there, 50).await.unwrap_err(), want);
    assert_eq!(cached(&here, &tokens), 9, "they stay");
    let sequence = admit(&here, 1, &tokens).unwrap();
    assert_eq!(here.migrate(sequence, &there).await.unwrap_err().error, want);
    until_idle(&here);
}

/// Returns a hook that stops a transfer in the middle until it is told to continue.
fn stands_still() -> (mpsc::Receiver<()>, mpsc::Sender<()>, impl FnMut() -> Result<(), StorageError> + Send) {
    let (arrived, is_there) = mpsc::channel();
    let (goes_on, may_go) = mpsc::channel();
    let hook = move || {
        let _ = arrived.send(());
        let _ = may_go.recv();
        Ok(())
    };
    (is_there, goes_on, hook)
}

/// The future is dropped during the copy: until that ends, the frames and the id stay taken; then
/// all is as before.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_dropped_migration() {
    let tokens = prompt(1, 42);
    for keeps in [false, true] {
        let (is_there, goes_on, hook) = stands_still();
        let (from, to) = (pool(plain(), 50), faulty(50, hook));
        let mut kept = Some(admit(&from, 7, &tokens).unwrap());
        let mut context = Context::from_waker(Waker::noop());
        if keeps {
            let mut replica = pin!(from.replicate(kept.as_ref().unwrap(), &to).into_future());
            assert!(replica.as_mut().poll(&mut context).is_pending());
            is_there.recv_timeout(LIMIT).unwrap();
        } else {
            let sequence = kept.take().unwrap();
            let mut migration = Box::pin(from.migrate(sequence, &to).into_future());
            assert!(migration.as_mut().poll(&mut context).is_pending());
            is_there.recv_timeout(LIMIT).unwrap();
            drop(migration);
        }
        // The frames are being written to: no other request gets them.
        assert_eq!((to.available_blocks(), to.sequence_count()), (50 - 11, 1));
        assert!(matches!(
            to.sequence(SequenceId(7)).open(),
            Err(SequenceError::AlreadyOpen { id: SequenceId(7) })
        ));
        if let Some(sequence) = &mut kept {
            // Its blocks are still being read: a write goes to a copy.
            let mut batch = from.begin_batch();
            let appended = batch.append(sequence, &[5]).unwrap();
            assert!(appended.copied.is_some());
            store(&mut batch, sequence, 42, &[5]);
            batch.finish();
        }
        goes_on.send(()).unwrap();
        until_idle(&to);
        if let Some(sequence) = kept {
            check(&from, &sequence, &[&tokens[..], &[5]].concat());
        }
        until_idle(&from);
        assert_eq!([cached(&from, &tokens), cached(&to, &tokens)], [10, 0]);
    }
}

/// While bytes are copied, blocks that are freed in either pool are reusable at once, and the
/// blocks being sent stay where they are.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn frees_during_a_transfer() {
    let tokens = prompt(1, 42);
    let (is_there, goes_on, hook) = stands_still();
    let (from, to) = (pool(plain(), 50), faulty(50, hook));
    let sequence = admit(&from, 7, &tokens).unwrap();
    let frames = |pool: &Pool| {
        let blocks = pool.view(SequenceId(7)).unwrap().blocks();
        blocks.into_iter().map(|block| pool.blocks().frame(block)).collect::<Vec<_>>()
    };
    let before = frames(&from);
    let transfer = tokio::spawn({
        let (from, to) = (from.clone(), to.clone());
        async move { from.migrate(sequence, &to).await }
    });
    is_there.recv_timeout(LIMIT).unwrap();
    for pool in [&from, &to] {
        for _ in 0..5 {
            let all = pool.allocate(AllocRequest::new(39)).unwrap();
            assert_eq!(pool.available_blocks(), 0);
            drop(all);
        }
        assert_eq!((pool.counts().retired, pool.batches_in_flight()), (0, 0));
    }
    from.defragment().await.unwrap();
    assert_eq!(frames(&from), before);
    goes_on.send(()).unwrap();
    let (sequence, _) = transfer.await.unwrap().unwrap();
    check(&to, &sequence, &tokens);
    drop(sequence);
    [from, to].iter().for_each(is_idle);
}

/// A block that has no pin to spare is sent too, under a batch; the other blocks' pins end as
/// usual.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_block_with_all_its_pins() {
    let tokens = prompt(1, 42);
    let (is_there, goes_on, hook) = stands_still();
    let (from, to) = (pool(plain(), 50), faulty(50, hook));
    let sequence = admit(&from, 7, &tokens).unwrap();
    let blocks: Vec<_> = sequence.blocks().map(|block| from.blocks().handle(block)).collect();
    let pins: Vec<_> = (0..15).map(|_| from.pin_scoped(blocks[3]).unwrap()).collect();
    assert!(matches!(from.pin_scoped(blocks[3]), Err(HandleError::TooManyPins { .. })));
    let transfer = tokio::spawn({
        let (from, to) = (from.clone(), to.clone());
        async move {
            let replica = from.replicate(&sequence, &to).await;
            (replica, sequence)
        }
    });
    is_there.recv_timeout(LIMIT).unwrap();
    assert_eq!((from.info(blocks[2]).unwrap().pins, from.batches_in_flight()), (1, 1));
    goes_on.send(()).unwrap();
    let (replica, sequence) = transfer.await.unwrap();
    check(&to, &replica.unwrap().0, &tokens);
    assert_eq!((from.info(blocks[2]).unwrap().pins, from.batches_in_flight()), (0, 0));
    drop((pins, sequence));
    [from, to].iter().for_each(is_idle);
}

/// Dropped before its first poll: nothing has begun.
#[tokio::test]
async fn dropped_before_it_began() {
    let (from, to) = (pool(plain(), 50), faulty(50, || panic!("nothing must be copied")));
    let tokens = prompt(1, 42);
    let sequence = admit(&from, 7, &tokens).unwrap();
    drop(from.replicate(&sequence, &to));
    drop(from.migrate(sequence, &to));
    drop(from.offload(&to, 5));
    drop(to.bring_back(&from, &PrefixKeys::new(), &tokens));
    [from, to].iter().for_each(is_idle);
}

/// Blocks in transfer can be hit in the source pool; they are not evicted, though all others are.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_dropped_offload_and_hits_meanwhile() {
    for is_dropped in [true, false] {
        let (is_there, goes_on, hook) = stands_still();
        let (here, there) = (pool(plain(), 50), faulty(50, hook));
        let prompts = [prompt(1, 21), prompt(2, 21)];
        prompts.iter().for_each(|prompt| drop(admit(&here, 1, prompt).unwrap()));
        let mut offload = Box::pin(here.offload(&there, 10));
        assert!(offload.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        is_there.recv_timeout(LIMIT).unwrap();
        let warm = here.sequence(SequenceId(1)).tokens(&prompts[1]).unwrap();
        assert_eq!(warm.len(), 20);
        let rest = here.allocate(AllocRequest::new(40)).unwrap();
        assert!(here.allocate(AllocRequest::new(1)).is_err(), "blocks in transfer are not evicted");
        assert!(there.allocate(AllocRequest::new(41)).is_err());
        drop(rest);
        if is_dropped {
            drop(offload);
            goes_on.send(()).unwrap();
            until_idle_but(&here, 5);
            until_idle(&there);
        } else {
            goes_on.send(()).unwrap();
            let report = offload.await.unwrap();
            assert_eq!((report.carried.blocks, report.evicted_blocks, report.warm_blocks), (10, 5, 5));
            assert_eq!(cached(&here, &prompts[0]), 0);
        }
        check(&here, &warm, &prompts[1]);
        drop(warm);
        assert_eq!(cached(&here, &prompts[1]), 5);
        [&here, &there].into_iter().for_each(until_idle);
    }
}

fn until_idle_but(pool: &Pool, owned: usize) {
    until("not idle", || pool.audit().is_ok_and(|report| report.owned == owned));
}

/// A pool that is dropped while blocks are in transfer out of it, or into it.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_pool_that_is_dropped_meanwhile() {
    let (is_there, goes_on, hook) = stands_still();
    let (here, there) = (pool(plain(), 50), faulty(50, hook));
    drop(admit(&here, 1, &prompt(1, 21)).unwrap());
    let mut offload = Box::pin(here.offload(&there, 10));
    assert!(offload.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    is_there.recv_timeout(LIMIT).unwrap();
    drop(offload);
    let storages = [&here, &there].map(|pool| Arc::downgrade(pool.storage().unwrap()));
    drop((here, there));
    goes_on.send(()).unwrap();
    until("a storage is leaked", || storages.iter().all(|storage| storage.upgrade().is_none()));
}
