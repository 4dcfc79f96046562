//! All features at once: sequences with bytes of their own grow, fork and close; blocks move, the
//! pool is resized, requests wait, the reserve is used, and freed blocks are wiped. Bytes are
//! preserved, and no block is lost.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::*};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use kvpool::compact::{DefragConfig, DefragOptions};
use kvpool::storage::{CopyDone, Elements, ElementsMut, FrameMove, HostStorage, KvLayout, Storage};
use kvpool::{
    AllocError, AllocRequest, DeviceId, Order, Pool, Priority, ResizeError, ResizeOptions, Sequence,
    SequenceError, SequenceId, StorageError,
};
use tokio::time::sleep;

/// Memory of a device that copies frames at some later time.
#[derive(Debug)]
struct Late {
    host: Arc<HostStorage>,
    device: DeviceId,
    copies: Mutex<mpsc::Sender<Copying>>,
}

struct Copying(Vec<FrameMove>, CopyDone);

impl Late {
    fn new(device: DeviceId, frames: usize, frames_max: usize) -> Self {
        let host = Arc::new(HostStorage::new(KvLayout::named("tiny").unwrap(), frames, frames_max).unwrap());
        let (copies, copied) = mpsc::channel::<Copying>();
        let storage = host.clone();
        thread::spawn(move || {
            let mut rng = fastrand::Rng::with_seed(7);
            for Copying(moves, done) in copied {
                if rng.bool() {
                    thread::sleep(Duration::from_micros(rng.u64(..600)));
                }
                if rng.u8(..16) == 0 {
                    // It fails, possibly without reporting it.
                    if rng.bool() {
                        done(Err(StorageError::Memory { bytes: 1, reason: std::io::ErrorKind::Other }));
                    }
                    continue;
                }
                // SAFETY: the frame rule holds until `done` is called.
                done(unsafe { storage.copy(&moves) });
            }
        });
        Self { host, device, copies: Mutex::new(copies) }
    }
}

// All but a wave's copy is forwarded to host memory. The frame rule is the caller's.
impl Storage for Late {
    kvpool_testkit::as_on_the_host!(host);

    fn device(&self) -> DeviceId {
        self.device
    }

    unsafe fn copy_then(&self, moves: &[FrameMove], done: CopyDone) {
        let _ = self.copies.lock().unwrap().send(Copying(moves.to_vec(), done));
    }
}

/// A sequence whose token `t` is stored as unique bytes; its first `inherited` tokens as its
/// parent's.
struct Written {
    sequence: Sequence,
    /// By token: the sequence whose bytes are stored.
    owner: Vec<u64>,
}

fn byte(owner: u64, token: usize) -> u8 {
    // Never 0, the content of a wiped block.
    (owner.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) as u8 ^ (token as u8).wrapping_mul(31) | 1
}

fn row(pool: &Pool) -> usize {
    pool.layout().kv_heads() * pool.layout().head_dim() * pool.layout().dtype().bytes()
}

impl Written {
    fn append(&mut self, pool: &Pool, owner: u64, tokens: usize) -> Result<(), SequenceError> {
        let row = row(pool);
        let mut batch = pool.begin_batch();
        let range = batch.append(&mut self.sequence, tokens)?.tokens;
        let bytes: Vec<u8> = range.clone().flat_map(|token| vec![byte(owner, token); row]).collect();
        for layer in 0..pool.layout().layers() {
            let k = Elements::new(pool.layout().dtype(), &bytes).unwrap();
            let v = Elements::new(pool.layout().dtype(), &bytes).unwrap();
            batch.store(&mut self.sequence, layer, range.clone(), k, v)?;
        }
        batch.finish();
        self.owner.resize(range.end, owner);
        Ok(())
    }

    fn check(&self, pool: &Pool) {
        let (row, len) = (row(pool), self.sequence.len());
        let mut batch = pool.begin_batch();
        let (mut k, mut v) = (vec![0; len * row], vec![0; len * row]);
        for layer in 0..pool.layout().layers() {
            let keys = ElementsMut::new(pool.layout().dtype(), &mut k).unwrap();
            let values = ElementsMut::new(pool.layout().dtype(), &mut v).unwrap();
            batch.load(&self.sequence, layer, 0..len, keys, values).unwrap();
            for token in 0..len {
                let want = byte(self.owner[token], token);
                let is = |bytes: &[u8]| bytes[token * row..][..row].iter().all(|byte| *byte == want);
                assert!(is(&k) && is(&v), "{:?}, layer {layer}, token {token}", self.sequence);
            }
        }
    }
}

fn serve(pool: &Pool, stop: &AtomicBool, seed: u64) -> usize {
    let mut rng = fastrand::Rng::with_seed(seed);
    let (mut open, mut steps): (Vec<Written>, usize) = (Vec::new(), 0);
    let mut next = seed << 32;
    while !stop.load(Relaxed) {
        steps += 1;
        next += 1;
        match rng.u8(..10) {
            0..3 => {
                let priority = if rng.u8(..8) == 0 { Priority::Urgent } else { Priority::Normal };
                let sequence = pool.sequence(SequenceId(next)).priority(priority).open().unwrap();
                let mut written = Written { sequence, owner: Vec::new() };
                if written.append(pool, next, rng.usize(1..60)).is_ok() {
                    open.push(written);
                }
            }
            3..6 if !open.is_empty() => {
                let at = rng.usize(..open.len());
                match open[at].append(pool, next, rng.usize(1..12)) {
                    Ok(()) => open[at].check(pool),
                    Err(SequenceError::Alloc(_)) => drop(open.swap_remove(at)),
                    Err(error) => panic!("{error}"),
                }
            }
            6 if !open.is_empty() => {
                let parent = &open[rng.usize(..open.len())];
                let sequence = parent.sequence.fork(SequenceId(next)).unwrap();
                let owner = parent.owner.clone();
                open.push(Written { sequence, owner });
            }
            7 if !open.is_empty() => {
                let at = rng.usize(..open.len());
                let keep = rng.usize(..=open[at].sequence.len());
                open[at].sequence.truncate(keep).unwrap();
                open[at].owner.truncate(keep);
            }
            8 if !open.is_empty() => open[rng.usize(..open.len())].check(pool),
            _ if !open.is_empty() => drop(open.swap_remove(rng.usize(..open.len()))),
            _ => {}
        }
        while open.len() > 24 {
            open.swap_remove(rng.usize(..open.len())).check(pool);
        }
    }
    open.iter().for_each(|written| written.check(pool));
    steps
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn on_the_host() {
    bytes_stay_and_nothing_is_lost(DeviceId::Host).await;
}

/// A copy-on-write may be incomplete when the append returns, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn on_a_device() {
    bytes_stay_and_nothing_is_lost(DeviceId::Cuda(0)).await;
}

async fn bytes_stay_and_nothing_is_lost(device: DeviceId) {
    let time = std::env::var("KVPOOL_STRESS_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(2);
    let pool = Pool::builder(KvLayout::named("tiny").unwrap())
        .storage(Arc::new(Late::new(device, 401, 901)))
        .blocks(400)
        .blocks_max(900)
        .segment_blocks(64)
        .reserve(16)
        .magazine_blocks(8)
        .zero_on_free()
        .build()
        .unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let servers: Vec<_> = (1..=2)
        .map(|seed| {
            let (pool, stop) = (pool.clone(), stop.clone());
            tokio::task::spawn_blocking(move || serve(&pool, &stop, seed))
        })
        .collect();
    let moves = DefragOptions::new().wave_bytes(1 << 12).order(Order(3));
    let config = DefragConfig::new().threshold(0.0).interval(Duration::from_micros(300)).moves(moves);
    let task = pool.start_defragmenter(config).unwrap();
    let (waited, resized) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let waiters: Vec<_> = (0..4)
        .map(|seed| {
            let (pool, stop, waited) = (pool.clone(), stop.clone(), waited.clone());
            tokio::spawn(async move {
                let mut rng = fastrand::Rng::with_seed(seed);
                while !stop.load(Relaxed) {
                    let priority = [Priority::Normal, Priority::High, Priority::Urgent][rng.usize(..3)];
                    let mut request = AllocRequest::new(rng.usize(1..24)).priority(priority);
                    request.contiguous = rng.bool();
                    let deadline = Instant::now() + Duration::from_micros(rng.u64(..4_000));
                    match pool.allocate_until(request, deadline).await {
                        Ok(mut lease) => {
                            waited.fetch_add(1, Relaxed);
                            if rng.bool() {
                                lease.seal(..);
                            }
                            sleep(Duration::from_micros(rng.u64(..2_000))).await;
                        }
                        Err(AllocError::Deadline { .. }) => {}
                        Err(error) => panic!("{error}"),
                    }
                }
            })
        })
        .collect();
    let breathes = {
        let (pool, stop, resized) = (pool.clone(), stop.clone(), resized.clone());
        tokio::spawn(async move {
            let mut rng = fastrand::Rng::with_seed(99);
            while !stop.load(Relaxed) {
                let moves = DefragOptions::new().wave_bytes(1 << 13);
                let options = ResizeOptions::new().patience(Duration::from_millis(3)).moves(moves);
                match pool.resize_with(rng.usize(250..900), options).await {
                    Ok(_) => _ = resized.fetch_add(1, Relaxed),
                    Err(
                        ResizeError::Blocked { .. }
                        | ResizeError::NoRoom { .. }
                        | ResizeError::NoTurn { .. }
                        | ResizeError::Defrag(_),
                    ) => {}
                    Err(error) => panic!("{error}"),
                }
                let short = Duration::from_micros(rng.u64(..800));
                let run = pool.defragment_with(DefragOptions::new().wave_bytes(1 << 11));
                let _ = tokio::time::timeout(short, run).await;
            }
        })
    };
    sleep(Duration::from_secs(time)).await;
    stop.store(true, Relaxed);
    let mut steps = 0;
    for server in servers {
        steps += server.await.unwrap();
    }
    for waiter in waiters {
        waiter.await.unwrap();
    }
    breathes.await.unwrap();
    let totals = task.stop().await;
    let (waited, resized) = (waited.load(Relaxed), resized.load(Relaxed));
    println!("{steps} steps, {waited} waited, {resized} resized, {totals:?}");
    assert!(steps > 100 && waited > 0 && resized > 0 && totals.moved_blocks > 0);
    // Waves that outlived their runs end by themselves.
    let settled = async {
        while pool.audit().map_or(true, |audit| audit.held > 0) {
            sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), settled).await.expect("every wave ends");
    let audit = pool.audit().unwrap();
    assert_eq!((audit.owned, audit.held, audit.references), (0, 0, 0), "{audit:?}");
    let (total, reserve) = (pool.total_blocks(), pool.blocks().reserve());
    assert_eq!(audit.total, total + 1);
    let all = pool.allocate(AllocRequest::new(total).priority(Priority::Urgent)).unwrap();
    assert_eq!(all.blocks().len(), total);
    drop(all);
    pool.trim();
    assert_eq!((pool.audit().unwrap().reserved, pool.free_blocks()), (reserve, total - reserve));
}
