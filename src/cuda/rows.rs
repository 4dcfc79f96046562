//! Single tokens: stored and loaded, from the host through pinned buffers, and from an engine's device memory on its stream.

use crate::dtype::Dtype;
use crate::error::StorageError;
use crate::storage::{
    DeviceStream, Elements, ElementsMut, PlaneKind, Scales, Storage, check, rows as host_rows,
};

use super::device::raw;
use super::flight::Flight;
use super::kernels::Kernel;
use super::memory::bytes_of;
use super::params::{
    QuantParams, RowsParams, SCALES_PER_HEAD, SCALES_PER_TOKEN_HEAD, SCALES_UNIT, THREADS, unit,
};
use super::pieces::lanes;
use super::staging::BYTES_MAX;
use super::storage::CudaStorage;

/// Threads that move one row of K or V.
const WARP: u32 = 32;

/// Parts of a buffer start on multiples of this.
const ALIGN: usize = 16;

/// Rows of K and V in the memory of the device, `[tokens][row]`: what an engine's projections left, or what its kernels read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceRows {
    /// The type of the elements.
    pub dtype: Dtype,
    /// Address of the first token's K.
    pub k: u64,
    /// Address of the first token's V; nobody looks at it in a latent layout.
    pub v: u64,
    /// Bytes from one token's K to the next token's: more than a row where K, V and Q lie in one tensor.
    pub k_stride: usize,
    /// Bytes from one token's V to the next token's.
    pub v_stride: usize,
}

/// To the frames, or from them.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Store,
    Load,
}

impl CudaStorage {
    /// Enqueues a [`store`](Storage::store) of rows that are in the device's memory; `slots` is the address of `tokens` slots,
    /// i64, there.
    ///
    /// # Errors
    ///
    /// As for [`Storage::store`] and [`Storage::check_stream`], as far as the host can tell;
    /// [`StorageError::RowsMisaligned`], [`StorageError::RowStride`]. Nothing was enqueued.
    ///
    /// # Safety
    ///
    /// [The frame rule](Storage#the-frame-rule) for these slots, until the stream got there; until then the storage lives. Rows and slots are memory
    /// of the device that nobody else writes until then. Slots are negative or exist, and none is repeated: nobody checks.
    pub unsafe fn store_on(
        &self,
        stream: &DeviceStream,
        layer: usize,
        rows: DeviceRows,
        slots: u64,
        tokens: usize,
    ) -> Result<(), StorageError> {
        // SAFETY: the caller's.
        unsafe { self.rows_on(stream, layer, Way::Store, rows, slots, tokens) }
    }

    /// Enqueues a [`load`](Storage::load) of rows into the device's memory; as [`store_on`](Self::store_on). Rows of negative slots are
    /// left as they are.
    ///
    /// # Errors
    ///
    /// As for [`store_on`](Self::store_on).
    ///
    /// # Safety
    ///
    /// As for [`store_on`](Self::store_on); nobody else touches the rows, and slots may repeat.
    pub unsafe fn load_on(
        &self,
        stream: &DeviceStream,
        layer: usize,
        rows: DeviceRows,
        slots: u64,
        tokens: usize,
    ) -> Result<(), StorageError> {
        // SAFETY: the caller's.
        unsafe { self.rows_on(stream, layer, Way::Load, rows, slots, tokens) }
    }

    /// # Safety
    /// As for [`store_on`](Self::store_on).
    unsafe fn rows_on(
        &self,
        stream: &DeviceStream,
        layer: usize,
        way: Way,
        rows: DeviceRows,
        slots: u64,
        tokens: usize,
    ) -> Result<(), StorageError> {
        // A capture is welcome here: it is one launch, which names nothing that is given back.
        self.home.device.check_home(stream)?;
        let layout = &self.home.layout;
        if layer >= layout.layers() {
            return Err(StorageError::Layer { layer, layers: layout.layers() });
        }
        let parts = [("k", rows.k, rows.k_stride), ("v", rows.v, rows.v_stride)];
        for (which, address, stride) in parts.into_iter().take(self.home.halves()) {
            host_rows::check_dtype(layout, which, rows.dtype)?;
            let (align, bytes) = (rows.dtype.bytes(), layout.row_elements() * rows.dtype.bytes());
            if address == 0 || !address.is_multiple_of(align as u64) || !stride.is_multiple_of(align) {
                return Err(StorageError::RowsMisaligned { which, address, stride, align });
            }
            if stride < bytes {
                return Err(StorageError::RowStride { which, stride, bytes });
            }
        }
        let align = align_of::<i64>();
        if tokens > 0 && (slots == 0 || !slots.is_multiple_of(align as u64)) {
            let (which, stride) = ("slots", size_of::<i64>());
            return Err(StorageError::RowsMisaligned { which, address: slots, stride, align });
        }
        // What is counted in 32 bits.
        let most = u32::MAX as usize / (2 * layout.kv_heads() * WARP as usize);
        // SAFETY: the stream is of this device; nothing is kept, so that nothing need be waited for.
        let mut flight = unsafe { Flight::on(&self.home.device, raw(stream)) };
        let mut enqueued = Ok(());
        for first in (0..tokens).step_by(most.max(1)) {
            let part = DeviceRows {
                k: rows.k + (first * rows.k_stride) as u64,
                v: rows.v + (first * rows.v_stride) as u64,
                ..rows
            };
            let slots = slots + (first * size_of::<i64>()) as u64;
            // SAFETY: the caller's.
            enqueued =
                unsafe { self.launch_rows(&mut flight, layer, way, part, slots, most.min(tokens - first)) };
            if enqueued.is_err() {
                break;
            }
        }
        flight.leave();
        enqueued
    }

    /// See [`Storage::store`].
    ///
    /// # Safety
    /// The frame rule, for these slots.
    pub(super) unsafe fn store_rows(
        &self,
        layer: usize,
        k: Elements<'_>,
        v: Elements<'_>,
        slots: &[i64],
    ) -> Result<(), StorageError> {
        let home = &*self.home;
        host_rows::check_rows(&home.layout, layer, k, v, slots.len())?;
        check::slots_unique(slots, self.frames(), home.layout.block_tokens())?;
        home.device.good()?;
        let [k_bytes, v_bytes] = self.row_bytes_outside([k.dtype(), v.dtype()]);
        let most = tokens_at_a_time(k_bytes, v_bytes);
        for (part, slots) in slots.chunks(most).enumerate() {
            let at = Parts::new(slots.len(), k_bytes, v_bytes);
            let mut pinned = home.device.0.staging.pinned(at.end)?;
            // SAFETY: the stream lives as long as the storage.
            let mut flight = unsafe { Flight::on(&home.device, self.service.raw()) };
            let bytes = pinned.bytes_mut();
            bytes[..size_of_val(slots)].copy_from_slice(bytes_of(slots));
            for (rows, at, row_bytes) in
                [(k, at.k, k_bytes), (v, at.v, v_bytes)].into_iter().take(home.halves())
            {
                let rows = &rows.as_bytes()[part * most * row_bytes..][..slots.len() * row_bytes];
                bytes[at..at + rows.len()].copy_from_slice(rows);
            }
            let scratch = flight.scratch(at.end)?;
            // SAFETY: the scratch memory is this flight's, the buffer outlives it, slots were checked; the rest is the caller's.
            unsafe {
                flight.send(scratch, &pinned, at.end)?;
                self.launch_parts(&mut flight, layer, Way::Store, (k.dtype(), v.dtype()), scratch, &at)?;
            }
            flight.wait()?;
        }
        Ok(())
    }

    /// See [`Storage::load`].
    ///
    /// # Safety
    /// The frame rule, for these slots.
    pub(super) unsafe fn load_rows(
        &self,
        layer: usize,
        slots: &[i64],
        mut k: ElementsMut<'_>,
        mut v: ElementsMut<'_>,
    ) -> Result<(), StorageError> {
        let home = &*self.home;
        host_rows::check_rows(&home.layout, layer, k.as_elements(), v.as_elements(), slots.len())?;
        check::slots(slots, self.frames(), home.layout.block_tokens())?;
        home.device.good()?;
        let dtypes = (k.as_elements().dtype(), v.as_elements().dtype());
        let [k_bytes, v_bytes] = self.row_bytes_outside([dtypes.0, dtypes.1]);
        let most = tokens_at_a_time(k_bytes, v_bytes);
        for (part, slots) in slots.chunks(most).enumerate() {
            let at = Parts::new(slots.len(), k_bytes, v_bytes);
            let mut pinned = home.device.0.staging.pinned(at.end)?;
            // SAFETY: the stream lives as long as the storage.
            let mut flight = unsafe { Flight::on(&home.device, self.service.raw()) };
            pinned.bytes_mut()[..size_of_val(slots)].copy_from_slice(bytes_of(slots));
            let scratch = flight.scratch(at.end)?;
            // SAFETY: as in `store_rows`; slots are sent before the rows come back.
            unsafe {
                flight.send(scratch, &pinned, size_of_val(slots))?;
                self.launch_parts(&mut flight, layer, Way::Load, dtypes, scratch, &at)?;
                flight.fetch(&pinned, scratch, at.end)?;
            }
            flight.wait()?;
            let targets = [(k.as_bytes_mut(), at.k, k_bytes), (v.as_bytes_mut(), at.v, v_bytes)];
            for (rows, at, row_bytes) in targets.into_iter().take(home.halves()) {
                let target = rows[part * most * row_bytes..].chunks_exact_mut(row_bytes);
                let loaded = pinned.bytes()[at..].chunks_exact(row_bytes);
                for ((target, loaded), _) in target.zip(loaded).zip(slots).filter(|(_, slot)| **slot >= 0) {
                    target.copy_from_slice(loaded);
                }
            }
        }
        Ok(())
    }

    /// Bytes of one token's K and V as the caller has them.
    fn row_bytes_outside(&self, [k, v]: [Dtype; 2]) -> [usize; 2] {
        let bytes = |dtype: Dtype| self.home.layout.row_elements() * dtype.bytes();
        [bytes(k), if self.home.halves() == 1 { 0 } else { bytes(v) }]
    }

    /// Launches for rows of K and V in one buffer; two types take two launches.
    ///
    /// # Safety
    /// As for [`launch_rows`](Self::launch_rows).
    unsafe fn launch_parts(
        &self,
        flight: &mut Flight<'_>,
        layer: usize,
        way: Way,
        (k, v): (Dtype, Dtype),
        buffer: u64,
        at: &Parts,
    ) -> Result<(), StorageError> {
        let rows = DeviceRows {
            dtype: k,
            k: buffer + at.k as u64,
            v: buffer + at.v as u64,
            k_stride: at.k_bytes,
            v_stride: at.v_bytes,
        };
        if k == v || self.home.halves() == 1 {
            // SAFETY: the caller's.
            return unsafe { self.launch_rows(flight, layer, way, rows, buffer, at.tokens) };
        }
        // SAFETY: the caller's.
        unsafe {
            self.launch_half(flight, layer, way, rows, 0, buffer, at.tokens)?;
            self.launch_half(flight, layer, way, DeviceRows { dtype: v, ..rows }, 1, buffer, at.tokens)
        }
    }

    /// Launches the kernel for rows of one layer.
    ///
    /// # Safety
    /// The layer exists, the type is kept or converted; rows and slots are the device's memory until the flight is over, and
    /// aligned to their elements; slots are checked; the frame rule.
    unsafe fn launch_rows(
        &self,
        flight: &mut Flight<'_>,
        layer: usize,
        way: Way,
        rows: DeviceRows,
        slots: u64,
        tokens: usize,
    ) -> Result<(), StorageError> {
        let home = &*self.home;
        let values = lanes(&home.placed, layer, PlaneKind::Values, &home.layout);
        let scales = lanes(&home.placed, layer, PlaneKind::Scales, &home.layout);
        let is_latent = home.halves() == 1;
        let params = self.quant_params(layer, rows, slots, tokens, values, scales);
        let params = if is_latent { without_v(params) } else { params };
        // SAFETY: the caller's.
        unsafe { self.launch_kernel(flight, way, rows.dtype, params) }
    }

    /// The same for K alone (0), or V alone (1): as if it were the vector of a latent layout.
    ///
    /// # Safety
    /// As for [`launch_rows`](Self::launch_rows).
    #[expect(clippy::too_many_arguments, reason = "it is launch_rows for one half")]
    unsafe fn launch_half(
        &self,
        flight: &mut Flight<'_>,
        layer: usize,
        way: Way,
        rows: DeviceRows,
        half: usize,
        slots: u64,
        tokens: usize,
    ) -> Result<(), StorageError> {
        let home = &*self.home;
        let values = lanes(&home.placed, layer, PlaneKind::Values, &home.layout);
        let scales = lanes(&home.placed, layer, PlaneKind::Scales, &home.layout);
        let (values, scales) = ([values[half]; 2], [scales[half]; 2]);
        let rows = if half == 0 { rows } else { DeviceRows { k: rows.v, k_stride: rows.v_stride, ..rows } };
        let mut params = self.quant_params(layer, rows, slots, tokens, values, scales);
        if half == 1 {
            params.k_scales = params.v_scales;
        }
        // SAFETY: the caller's.
        unsafe { self.launch_kernel(flight, way, rows.dtype, without_v(params)) }
    }

    fn quant_params(
        &self,
        layer: usize,
        rows: DeviceRows,
        slots: u64,
        tokens: usize,
        [k_lane, v_lane]: [super::params::Lane; 2],
        [k_scale_lane, v_scale_lane]: [super::params::Lane; 2],
    ) -> QuantParams {
        let (home, layout) = (&*self.home, &self.home.layout);
        let scales_at = (layer * layout.kv_heads() * size_of::<f32>()) as u64;
        let [k_scales, v_scales] = match &home.scales {
            Some(scales) => scales.each_ref().map(|scales| scales.address() + scales_at),
            None => [0; 2],
        };
        let mode = match layout.scales() {
            Scales::Unit => SCALES_UNIT,
            Scales::PerHead { .. } => SCALES_PER_HEAD,
            Scales::PerTokenHead => SCALES_PER_TOKEN_HEAD,
        };
        QuantParams {
            rows: RowsParams {
                k: rows.k,
                v: rows.v,
                k_stride: rows.k_stride as u64,
                v_stride: rows.v_stride as u64,
                slots,
                k_lane,
                v_lane,
                row_bytes: layout.row_bytes(PlaneKind::Values) as u32,
                block_tokens: layout.block_tokens() as u32,
                n_tokens: tokens as u32,
                unit: 1,
            },
            k_scales,
            v_scales,
            k_scale_lane,
            v_scale_lane,
            heads: layout.kv_heads() as u32,
            head_dim: layout.head_dim() as u32,
            mode,
            reserved: 0,
        }
    }

    /// # Safety
    /// As for [`launch_rows`](Self::launch_rows).
    unsafe fn launch_kernel(
        &self,
        flight: &mut Flight<'_>,
        way: Way,
        dtype: Dtype,
        mut params: QuantParams,
    ) -> Result<(), StorageError> {
        let layout = &self.home.layout;
        let rows = &mut params.rows;
        let k = [rows.k, rows.k_stride, rows.k_lane.base, rows.k_lane.frame_stride];
        let v = [rows.v, rows.v_stride, rows.v_lane.base, rows.v_lane.frame_stride];
        let numbers = k.into_iter().chain(v).chain([rows.row_bytes.into()]);
        let jobs = rows.n_tokens as usize * self.home.halves();
        if dtype == layout.dtype() {
            rows.unit = unit(numbers);
            let grid = self.grid(jobs.div_ceil((THREADS / WARP) as usize));
            let kernel = if way == Way::Store { Kernel::Store } else { Kernel::Load };
            // SAFETY: the caller's.
            return unsafe { flight.launch(kernel, grid, &params.rows) };
        }
        rows.unit = unit(numbers.chain([layout.head_dim() as u64]));
        let grid = self.grid((jobs * layout.kv_heads()).div_ceil((THREADS / WARP) as usize));
        let kernel = match way {
            Way::Store => Kernel::Quantise(layout.dtype(), dtype),
            Way::Load => Kernel::Dequantise(layout.dtype(), dtype),
        };
        // SAFETY: the caller's.
        unsafe { flight.launch(kernel, grid, &params) }
    }
}

/// There is no V: the kernels look at its address.
fn without_v(mut params: QuantParams) -> QuantParams {
    (params.rows.v, params.rows.v_stride) = (0, 0);
    (params.rows.v_lane, params.v_scale_lane) = Default::default();
    params
}

/// Where slots, K and V are in one buffer: slots first.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Parts {
    tokens: usize,
    k: usize,
    v: usize,
    end: usize,
    k_bytes: usize,
    v_bytes: usize,
}

impl Parts {
    fn new(tokens: usize, k_bytes: usize, v_bytes: usize) -> Self {
        let k = (tokens * size_of::<i64>()).next_multiple_of(ALIGN);
        let v = (k + tokens * k_bytes).next_multiple_of(ALIGN);
        Self { tokens, k, v, end: v + tokens * v_bytes, k_bytes, v_bytes }
    }
}

/// Tokens whose slots and rows fit into one buffer; at least one does.
fn tokens_at_a_time(k_bytes: usize, v_bytes: usize) -> usize {
    ((BYTES_MAX - 2 * ALIGN) / (size_of::<i64>() + k_bytes + v_bytes)).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_fit_and_do_not_overlap() {
        for (k, v) in [(1, 1), (3, 12), (2048, 2048), (2 << 20, 2 << 20), (8 << 10, 2 << 10)] {
            let most = tokens_at_a_time(k, v);
            for tokens in [1, 2, most] {
                let at = Parts::new(tokens.min(most), k, v);
                assert!(
                    at.k >= at.tokens * 8 && at.v >= at.k + at.tokens * k && at.end == at.v + at.tokens * v
                );
                assert!(at.k.is_multiple_of(ALIGN) && at.v.is_multiple_of(ALIGN));
                assert!(at.end <= BYTES_MAX, "{at:?}");
            }
        }
    }
}
