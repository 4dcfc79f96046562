//! A pool on the mock's device, small enough that frames are reused constantly.

use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cudarc::driver::CudaContext;
use kvpool::prefix::policy::Millis;
use kvpool::prefix::{HashKey, PrefixConfig};
use kvpool::storage::{DeviceStream, KvLayout, Storage};
use kvpool::{Order, Pool};
use kvpool_cuda::{CudaConfig, CudaStorage, Device, StreamPriority};
use kvpool_testkit::conformance::layouts;

use crate::mock::Session;

/// Size and layout of a rig's pool.
#[derive(Clone, Debug)]
pub struct Shape {
    /// The layout.
    pub layout: KvLayout,
    /// Initial and maximal number of blocks.
    pub blocks: (usize, usize),
    /// True if sequences with known tokens share their prefixes.
    pub caches: bool,
}

/// Returns one of the layouts of the conformance suite, which cover all types, arrangements and
/// scales.
pub fn layout_of(seed: u64) -> KvLayout {
    let mut layouts = layouts();
    let index = seed as usize % layouts.len();
    layouts.swap_remove(index)
}

/// Returns the configuration of a deterministic cache, with a fixed key and clock.
fn repeatable() -> PrefixConfig {
    PrefixConfig::new().key(Rig::key()).clock(|| Millis(0))
}

/// The state shared by all lanes.
pub struct Rig {
    /// The pool.
    pub pool: Pool,
    /// Its device.
    pub device: Device,
    /// A stream that the engine uses only to determine the progress of the watcher.
    probe: DeviceStream,
    probed: Mutex<mpsc::Receiver<()>>,
    tell: mpsc::Sender<()>,
    /// The engine's reference to the same context, which is current on the thread that created it.
    pub context: Arc<CudaContext>,
}

impl Rig {
    /// Builds the pool. The device must be running meanwhile.
    pub fn new(device: &Device, shape: &Shape) -> Self {
        let context = CudaContext::new(0).expect("the mock has a device");
        let Shape { layout, blocks, caches } = shape.clone();
        let config = CudaConfig::default().segment_frames(8).moving_ctas(3);
        let storage = CudaStorage::with_config(device, layout.clone(), blocks.0 + 1, blocks.1 + 1, config)
            .expect("memory for a few blocks");
        let builder = Pool::builder(layout).blocks(blocks.0).blocks_max(blocks.1).storage(Arc::new(storage));
        let builder = builder.threads(1).magazine_blocks(0).segment_blocks(64).fragmentation_order(Order(2));
        let builder = if caches { builder.prefix_cache(repeatable()) } else { builder };
        let pool = builder.build().expect("a pool of a few blocks");
        let probe = device.stream().expect("a stream");
        let (tell, probed) = mpsc::channel();
        let rig = Self { pool, device: device.clone(), probe, probed: Mutex::new(probed), tell, context };
        rig.ask();
        rig
    }

    /// Returns the key of the pool's prefix hashes.
    pub fn key() -> HashKey {
        HashKey::from_bytes([7; 32])
    }

    /// Returns the pool's storage.
    pub fn storage(&self) -> &CudaStorage {
        let storage: &Arc<dyn Storage> = self.pool.storage().expect("the pool has storage");
        storage.as_any().downcast_ref().expect("the storage is on CUDA")
    }

    /// Creates a stream for the engine.
    pub fn stream(&self, priority: StreamPriority) -> DeviceStream {
        self.device.stream_with_priority(priority).expect("a stream")
    }

    fn ask(&self) {
        let tell = self.tell.clone();
        let told = move |_| {
            let _ = tell.send(());
        };
        self.pool.storage().expect("the pool has storage").after(&self.probe, Box::new(told));
    }

    /// On a paused machine: returns when the watcher has notified the waiters of all events
    /// completed by now. The pool's next actions then depend on the schedule alone.
    ///
    /// The event of the previous request completes in this call, and not earlier: the watcher
    /// queries it after all others, when the next request arrives.
    pub fn quiet(&self, session: &Session) {
        session.alone(self.probe.as_raw() as usize);
        self.ask();
        session.step_stream(self.probe.as_raw() as usize, u64::MAX);
        self.ask();
        // Up to the one before the last: requests made before the probe was stepped are answered.
        let probed = self.probed.lock().expect("no thread panicked here");
        for _ in 0..2 {
            probed.recv_timeout(Duration::from_secs(20)).expect("the watcher queries its events");
        }
    }
}

/// Waits for the condition, for at most 20 seconds. Returns false on a timeout.
pub fn drained(mut holds: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    while !holds() {
        if start.elapsed() > Duration::from_secs(20) {
            return false;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    true
}
