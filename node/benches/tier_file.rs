//! A directory as the store of a tier: gets of a prefix beside plain reads of the same sizes, and
//! the start with a million slots.
//!
//! Plain reads are `pread` with `O_DIRECT` into aligned memory, on as many threads as the depth of
//! the tier, which look at no byte. The tier verifies each value and copies it into its memory.
//! Both read the same slots in turns, in an order that changes with the rounds; the ratio is the
//! median over them.
//!
//! The index of a million slots is written as the module documents it, over a sparse file.
//!
//! `cargo bench -p kvpool-node --bench tier_file [ROUNDS]`, in the folder `KVPOOL_BENCH_DIR` (by
//! default the current one)

#[cfg(target_os = "linux")]
mod linux {
    use std::fs::{File, OpenOptions};
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::{FileExt, OpenOptionsExt};
    use std::path::Path;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
    use std::sync::{Arc, Mutex};
    use std::time::{Duration, Instant};

    use kvpool::prefix::BlockHash;
    use kvpool_node::tier::file::{FileSettings, FileStore};
    use kvpool_node::tier::{
        Fingerprint, Landing, Outcome, SharedTier, Store, TierKey, TierRead, TierSettings, TierValue,
        ValueError, value_bytes, verify,
    };
    use twox_hash::XxHash3_64;

    /// Packed bytes of a block.
    const PACKED: usize = 1 << 20;
    /// Blocks of a prefix.
    const BLOCKS: usize = 64;
    const PREFIXES: usize = 4;
    const DEPTH: usize = 8;
    const PAGE: usize = 4096;
    const SLOTS: u64 = 1_000_000;

    fn keys(prefix: usize, count: usize) -> Vec<TierKey> {
        let mut random = fastrand::Rng::with_seed(prefix as u64);
        let fingerprint = Fingerprint::from_bytes([7; 16]);
        let mut key = || TierKey { fingerprint, hash: BlockHash::new(random.u128(..), random.u64(..)) };
        (0..count).map(|_| key()).collect()
    }

    fn value(key: &TierKey, packed: usize) -> TierValue {
        let fill = |bytes: &mut [u8]| {
            fastrand::Rng::with_seed(key.hash.key() as u64).fill(bytes);
            Ok::<_, ()>(())
        };
        TierValue::new(*key, &[], packed, fill).unwrap()
    }

    /// Memory as that of a frame, which is used again.
    struct Frame(TierKey, Arc<Mutex<Vec<u8>>>);

    impl Landing for Frame {
        fn land(&mut self, value: &[u8]) -> Result<(), ValueError> {
            self.1.lock().unwrap().copy_from_slice(verify(&self.0, PACKED, value)?);
            Ok(())
        }
    }

    fn rate(blocks: usize, began: Instant) -> f64 {
        (blocks * PACKED) as f64 / began.elapsed().as_secs_f64() / 1e9
    }

    /// Reads the slots from `first` on.
    fn plain(values: &File, first: usize) -> f64 {
        let slot_bytes = (64 + value_bytes(PACKED)).next_multiple_of(PAGE);
        let (began, next) = (Instant::now(), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..DEPTH {
                scope.spawn(|| {
                    let mut memory = vec![1; slot_bytes + PAGE];
                    let start = memory.as_ptr().align_offset(PAGE);
                    loop {
                        let slot = next.fetch_add(1, Relaxed);
                        if slot >= BLOCKS {
                            return;
                        }
                        let into = &mut memory[start..][..slot_bytes];
                        values.read_exact_at(into, ((first + slot) * slot_bytes) as u64).unwrap();
                    }
                });
            }
        });
        rate(BLOCKS, began)
    }

    fn median(values: &mut [f64]) -> f64 {
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    }

    async fn gets(folder: &Path, rounds: usize) {
        let mut settings = FileSettings::new(folder, 2 << 30);
        settings.depth = DEPTH;
        let mut of_tier = TierSettings::default();
        (of_tier.patience, of_tier.puts_max) = (Duration::from_secs(60), BLOCKS);
        let tier = SharedTier::new(FileStore::open(settings).unwrap(), of_tier).unwrap();
        let deadline = || Instant::now() + Duration::from_secs(600);
        let mut written = Vec::new();
        for prefix in 0..PREFIXES {
            for key in keys(prefix, BLOCKS) {
                let began = Instant::now();
                assert_eq!(tier.put(vec![value(&key, PACKED)], deadline()).await, [Outcome::Stored]);
                written.push(rate(1, began));
            }
        }
        let open = OpenOptions::new().read(true).custom_flags(libc::O_DIRECT).open(folder.join("values"));
        let values = open.expect("a file system with direct I/O");
        let frames: Vec<_> = (0..BLOCKS).map(|_| Arc::new(Mutex::new(vec![1; PACKED]))).collect();
        let [mut ours, mut raw, mut ratios] = [(); 3].map(|()| Vec::new());
        for round in 0..rounds {
            let prefix = round % PREFIXES;
            let of = keys(prefix, BLOCKS);
            let before = (round % 2 == 0).then(|| plain(&values, prefix * BLOCKS));
            let read = |(key, frame): (&TierKey, &Arc<Mutex<Vec<u8>>>)| {
                let memory = Box::new(Frame(*key, frame.clone()));
                TierRead { key: *key, bytes: value_bytes(PACKED), memory }
            };
            let reads = of.iter().zip(&frames).map(read).collect();
            let began = Instant::now();
            let outcomes = tier.get(reads, deadline()).await;
            let rate = rate(BLOCKS, began);
            assert!(outcomes.iter().all(|outcome| *outcome == Outcome::Hit), "{outcomes:?}");
            let raw_rate = before.unwrap_or_else(|| plain(&values, prefix * BLOCKS));
            ours.push(rate);
            raw.push(raw_rate);
            ratios.push(rate / raw_rate);
            for (key, frame) in of.iter().zip(&frames) {
                let wanted = value(key, PACKED);
                assert_eq!(*frame.lock().unwrap(), wanted.bytes()[256..][..PACKED], "a wrong byte");
            }
        }
        println!(
            "prefixes of {BLOCKS} blocks of 1 MiB: tier {:.2} GB/s, plain reads {:.2} GB/s, {:.2} of them \
             ({rounds} rounds); a put {:.2} GB/s",
            median(&mut ours),
            median(&mut raw),
            median(&mut ratios),
            median(&mut written)
        );
    }

    /// Writes records as the documentation of the module describes them.
    fn write_index(folder: &Path, keys: &[TierKey]) {
        let index = OpenOptions::new().read(true).write(true).open(folder.join("index")).unwrap();
        let mut number = [0; 8];
        index.read_exact_at(&mut number, 8).unwrap();
        let (store, mut records) = (u64::from_le_bytes(number), Vec::with_capacity(keys.len() * 64));
        for (slot, key) in (0_u64..).zip(keys) {
            let mut record = [0; 64];
            record[..16].copy_from_slice(&key.fingerprint.to_bytes());
            record[16..40].copy_from_slice(&key.hash.to_bytes());
            record[40..48].copy_from_slice(&(slot + 1).to_le_bytes());
            record[48..52].copy_from_slice(&(value_bytes(1) as u32).to_le_bytes());
            let sum = XxHash3_64::oneshot_with_seed(store ^ (slot + 1), &record[..56]);
            record[56..].copy_from_slice(&sum.to_le_bytes());
            records.extend(record);
        }
        index.write_all_at(&records, 4096).unwrap();
        index.sync_all().unwrap();
        // SAFETY: a system call without pointers, on a descriptor that `index` keeps open.
        let forgot = unsafe { libc::posix_fadvise(index.as_raw_fd(), 0, 0, libc::POSIX_FADV_DONTNEED) };
        assert_eq!(forgot, 0, "the page cache keeps the index");
    }

    async fn start(folder: &Path) {
        let size = 4096 + SLOTS * (4096 + 64);
        let store = FileStore::open(FileSettings::new(folder, size)).unwrap();
        store.put(vec![value(&keys(0, 1)[0], 1)]).await.unwrap()[0].clone().unwrap();
        drop(store);
        let keys = keys(0, SLOTS as usize);
        for cache in ["not in", "in"] {
            if cache == "not in" {
                write_index(folder, &keys);
            }
            let began = Instant::now();
            let store = FileStore::open(FileSettings::new(folder, size)).unwrap();
            let took = began.elapsed();
            let found = store.exists(&keys).await.unwrap();
            assert!(found.len() == SLOTS as usize && found.iter().all(|is_there| *is_there));
            println!("start with {SLOTS} slots: {took:.2?} (index {cache} the page cache)");
        }
    }

    pub async fn run(rounds: usize) {
        let folder = std::env::var_os("KVPOOL_BENCH_DIR").unwrap_or_else(|| ".".into());
        let folder = tempfile::tempdir_in(folder).unwrap();
        gets(&folder.path().join("gets"), rounds).await;
        start(&folder.path().join("start")).await;
    }
}

#[tokio::main(flavor = "multi_thread", worker_threads = 2)]
async fn main() {
    if !std::env::args().any(|argument| argument == "--bench") {
        println!("tier_file: to measure, run `cargo bench -p kvpool-node --bench tier_file`");
        return;
    }
    let rounds = std::env::args().filter_map(|argument| argument.parse().ok()).next().unwrap_or(21);
    #[cfg(target_os = "linux")]
    linux::run(rounds).await;
    #[cfg(not(target_os = "linux"))]
    println!("tier_file: SKIPPED ({rounds} rounds): plain reads need O_DIRECT");
}
