//! A pool whose memory is behind a hook.

use std::sync::Arc;

use kvpool::storage::KvLayout;
use kvpool::{DeviceId, Pool};

pub use crate::hooked::Access;
use crate::hooked::Hooked;
use crate::kv;

/// A pool whose storage calls a hook before bytes of blocks are packed or unpacked.
pub fn pool(layout: KvLayout, blocks: usize, hook: impl Fn(Access) + Send + Sync + 'static) -> Pool {
    let hook = move |access| {
        hook(access);
        Ok(())
    };
    let storage = Arc::new(Hooked::new(&layout, blocks + 1, DeviceId::Host, hook));
    kv::builder(layout, blocks).storage(storage).prefix_cache(kv::config()).build().unwrap()
}

/// A gate at which threads wait until it is open.
#[derive(Clone, Default)]
pub struct Gate(Arc<(std::sync::Mutex<bool>, std::sync::Condvar)>);

impl Gate {
    pub fn open(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }

    pub fn pass(&self) {
        let open = self.0.0.lock().unwrap();
        drop(self.0.1.wait_while(open, |open| !*open).unwrap());
    }
}
