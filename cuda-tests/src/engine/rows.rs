//! The rows stored for a token and the rows expected back, according to host storage, which has
//! been compared with the reference.

use std::collections::BTreeMap;

use kvpool::Dtype;
use kvpool::storage::{Elements, ElementsMut, HostStorage, KvLayout, KvPlanes, Storage};
use kvpool_testkit::conformance::elements;
use kvpool_testkit::rng::Rng;

/// K and V of one token in one layer; in a latent layout, K alone.
type Row = [Vec<u8>; 2];

/// The rows of tokens.
pub struct Rows {
    host: HostStorage,
    dtype: Dtype,
    /// Rows by token and layer, as stored and as loaded.
    known: BTreeMap<(u32, usize), (Row, Row)>,
}

impl Rows {
    /// Creates the rows for a layout.
    pub fn new(layout: &KvLayout) -> Self {
        let dtype = if layout.dtype().is_quantised() { Dtype::F32 } else { layout.dtype() };
        let host = HostStorage::new(layout.clone(), 1, 1).expect("memory for one block");
        Self { host, dtype, known: BTreeMap::new() }
    }

    /// Returns the type of rows outside of the pool.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Returns the size of a row outside of the pool in bytes.
    pub fn bytes(&self) -> usize {
        self.host.layout().row_elements() * self.dtype.bytes()
    }

    /// Returns 2, or 1 in a latent layout.
    pub fn halves(&self) -> usize {
        if self.host.layout().parts() == KvPlanes::Latent { 1 } else { 2 }
    }

    /// Returns K and V that the engine computes for a token.
    pub fn stored(&mut self, token: u32, layer: usize) -> &Row {
        &self.row(token, layer).0
    }

    /// Returns K and V after a store and a load.
    pub fn loaded(&mut self, token: u32, layer: usize) -> &Row {
        &self.row(token, layer).1
    }

    fn row(&mut self, token: u32, layer: usize) -> &(Row, Row) {
        let (host, dtype, halves) = (&self.host, self.dtype, self.halves());
        self.known.entry((token, layer)).or_insert_with(|| {
            let count = host.layout().row_elements();
            let mut rng = Rng(u64::from(token) << 8 | layer as u64);
            let stored: Row = [0, 1].map(|half| {
                let count = if half < halves { count } else { 0 };
                elements(dtype, count, &mut rng).bytes
            });
            let mut loaded: Row = stored.clone().map(|row| vec![0; row.len()]);
            let [k, v] = stored.each_ref().map(|row| Elements::new(dtype, row).expect("whole elements"));
            let (v, [k_out, v_out]) = (if halves == 1 { Elements::none() } else { v }, &mut loaded);
            let k_out = ElementsMut::new(dtype, k_out).expect("whole elements");
            let v_out = ElementsMut::new(dtype, v_out).expect("whole elements");
            let v_out = if halves == 1 { ElementsMut::none() } else { v_out };
            // SAFETY: no one else has this storage.
            unsafe {
                host.store(layer, k, v, &[0]).expect("rows of the layout");
                host.load(layer, &[0], k_out, v_out).expect("rows of the layout");
            }
            (stored, loaded)
        })
    }
}
