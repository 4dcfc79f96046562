//! A pool on the mock's device, small enough that frames are reused all the time.

use std::sync::mpsc;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cudarc::driver::CudaContext;
use kvpool::cuda::{CudaConfig, CudaStorage, Device, StreamPriority};
use kvpool::ids::Order;
use kvpool::pool::Pool;
use kvpool::prefix::policy::Millis;
use kvpool::prefix::{HashKey, PrefixConfig};
use kvpool::storage::{DeviceStream, KvLayout, Storage};
use kvpool_testkit::conformance::layouts;

use crate::mock::Session;

/// How large, and of what.
#[derive(Clone, Debug)]
pub struct Shape {
    /// The layout.
    pub layout: KvLayout,
    /// Blocks to begin with, and at most.
    pub blocks: (usize, usize),
    /// Sequences of known tokens share their prefixes.
    pub caches: bool,
}

/// One of the layouts that the conformance suite has: all types, arrangements and scales in turn.
pub fn layout_of(seed: u64) -> KvLayout {
    let mut layouts = layouts();
    let index = seed as usize % layouts.len();
    layouts.swap_remove(index)
}

/// A cache that does the same each time: neither the key nor the clock is the process's.
fn repeatable() -> PrefixConfig {
    PrefixConfig::new().key(Rig::key()).clock(|| Millis(0))
}

/// What all lanes share.
pub struct Rig {
    /// The pool.
    pub pool: Pool,
    /// Its device.
    pub device: Device,
    /// A stream on which the engine does nothing but see how far the watcher is.
    probe: DeviceStream,
    probed: Mutex<mpsc::Receiver<()>>,
    tell: mpsc::Sender<()>,
    /// The engine's hold on the same context, current to the thread that made it.
    pub context: Arc<CudaContext>,
}

impl Rig {
    /// Builds the pool. The device must run meanwhile.
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

    /// What the pool's prefix hashes are made with.
    pub fn key() -> HashKey {
        HashKey::from_bytes([7; 32])
    }

    /// The pool's storage.
    pub fn storage(&self) -> &CudaStorage {
        let storage: &Arc<dyn Storage> = self.pool.storage().expect("built with one");
        storage.as_any().downcast_ref().expect("built with this one")
    }

    /// A stream of the engine's.
    pub fn stream(&self, priority: StreamPriority) -> DeviceStream {
        self.device.stream_with_priority(priority).expect("a stream")
    }

    fn ask(&self) {
        let tell = self.tell.clone();
        let told = move |_| {
            let _ = tell.send(());
        };
        self.pool.storage().expect("built with one").after(&self.probe, Box::new(told));
    }

    /// On a paused machine: returns when the watcher has told everybody whose mark was reached by now. Thus what the pool
    /// does next depends on the schedule alone.
    ///
    /// The mark that was asked for the last time is reached now, and no sooner: it comes behind all others with the watcher,
    /// which looks when it is asked for the next.
    pub fn quiet(&self, session: &Session) {
        self.ask();
        session.step_stream(self.probe.as_raw() as usize, u64::MAX);
        self.ask();
        // The one before the last: as many are told as were asked for before the probe was stepped.
        let probed = self.probed.lock().expect("no thread panicked here");
        for _ in 0..2 {
            probed.recv_timeout(Duration::from_secs(20)).expect("the watcher looks at its marks");
        }
    }
}

/// Waits until the condition holds, some seconds at most. False: it did not.
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
