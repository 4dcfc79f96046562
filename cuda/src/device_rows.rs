//! Rows of single tokens in the device's memory: stores and loads on an engine's stream, and kernel
//! launches for rows of any origin.
//!
//! Rows of the host pass through a buffer first ([`rows`](super::rows)); from there on both are
//! handled alike.

use kvpool::storage::backend::check;
use kvpool::storage::{DeviceStream, PlaneKind, Scales};
use kvpool::{Dtype, Invalid, StorageError};

use super::command_scope::CommandScope;
use super::device::raw;
use super::kernels::Kernel;
use super::params::{
    Lane, QuantParams, RowsParams, SCALES_PER_HEAD, SCALES_PER_TOKEN_HEAD, SCALES_UNIT, THREADS, unit,
};
use super::pieces::lanes;
use super::storage::CudaStorage;

/// Number of threads that move one row of K or V.
const WARP: u32 = 32;

/// Rows of K and V in device memory, `[tokens][row]`, as an engine's projections write them or its
/// kernels read them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceRows {
    /// The type of the elements.
    pub dtype: Dtype,
    /// Address of the first token's K.
    pub k: u64,
    /// Address of the first token's V; ignored in a latent layout.
    pub v: u64,
    /// Bytes from one token's K to the next token's. More than a row if K, V and Q are in one
    /// tensor.
    pub k_stride: usize,
    /// Bytes from one token's V to the next token's.
    pub v_stride: usize,
}

/// Direction: to the frames, or from them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Store,
    Load,
}

fn misaligned(which: &'static str, address: u64, stride: usize, align: usize) -> Invalid {
    let got = format_args!("{address:#x} with a stride of {stride} bytes");
    Invalid::new(which, got, format_args!("multiples of {align} bytes"))
}

impl CudaStorage {
    /// Enqueues a [`store`](kvpool::storage::Storage::store) of rows in the device's memory.
    ///
    /// `slots` is the device address of `tokens` slots, i64.
    ///
    /// # Errors
    ///
    /// As for [`Storage::store`](kvpool::storage::Storage::store) and
    /// [`Storage::check_stream`](kvpool::storage::Storage::check_stream), as far as the host can
    /// check; rows or slots that are misaligned, or rows that overlap. No work is enqueued.
    ///
    /// # Safety
    ///
    /// [The frame rule](kvpool::storage::Storage#the-frame-rule) for these slots, until the stream
    /// has executed the store; until then the storage must live. Rows and slots are memory of the
    /// device that no one else writes until then. Slots are negative or exist, and are not
    /// repeated; this is not checked.
    pub unsafe fn store_on(
        &self,
        stream: &DeviceStream,
        layer: usize,
        rows: DeviceRows,
        slots: u64,
        tokens: usize,
    ) -> Result<(), StorageError> {
        // SAFETY: the caller's promise.
        unsafe { self.rows_on(stream, layer, Way::Store, rows, slots, tokens) }
    }

    /// Enqueues a [`load`](kvpool::storage::Storage::load) of rows into the device's memory.
    ///
    /// Arguments are as for [`store_on`](Self::store_on). Rows of negative slots are not written.
    ///
    /// # Errors
    ///
    /// As for [`store_on`](Self::store_on).
    ///
    /// # Safety
    ///
    /// As for [`store_on`](Self::store_on); no one else accesses the rows, and slots may repeat.
    pub unsafe fn load_on(
        &self,
        stream: &DeviceStream,
        layer: usize,
        rows: DeviceRows,
        slots: u64,
        tokens: usize,
    ) -> Result<(), StorageError> {
        // SAFETY: the caller's promise.
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
        // A capture is allowed here: each launch is self-contained, and uses no buffer that is
        // given back.
        let _entered = self.inner.device.0.context.enter()?;
        self.inner.device.check_own(stream)?;
        let layout = &self.inner.layout;
        check::layer(layout, layer)?;
        let parts = [("k", rows.k, rows.k_stride), ("v", rows.v, rows.v_stride)];
        for (which, address, stride) in parts.into_iter().take(self.inner.halves()) {
            check::dtype(layout, which, rows.dtype)?;
            let (align, bytes) = (rows.dtype.bytes(), layout.row_elements() * rows.dtype.bytes());
            if address == 0 || !address.is_multiple_of(align as u64) || !stride.is_multiple_of(align) {
                return Err(misaligned(which, address, stride, align).into());
            }
            if stride < bytes {
                let got = format_args!("a stride of {stride} bytes");
                return Err(Invalid::new(which, got, format_args!("at least a row's {bytes}")).into());
            }
        }
        let align = align_of::<i64>();
        if tokens > 0 && (slots == 0 || !slots.is_multiple_of(align as u64)) {
            return Err(misaligned("slots", slots, size_of::<i64>(), align).into());
        }
        // Limit of 32-bit counters.
        let most = u32::MAX as usize / (2 * layout.kv_heads() * WARP as usize);
        // SAFETY: the stream is of this device; the scope keeps nothing, so that no wait is needed.
        let mut commands = unsafe { CommandScope::on(&self.inner.device, raw(stream)) };
        let mut enqueued = Ok(());
        for first in (0..tokens).step_by(most.max(1)) {
            let part = DeviceRows {
                k: rows.k + (first * rows.k_stride) as u64,
                v: rows.v + (first * rows.v_stride) as u64,
                ..rows
            };
            let slots = slots + (first * size_of::<i64>()) as u64;
            // SAFETY: the caller's promise.
            enqueued =
                unsafe { self.launch_rows(&mut commands, layer, way, part, slots, most.min(tokens - first)) };
            if enqueued.is_err() {
                break;
            }
        }
        commands.leave();
        enqueued
    }

    /// Launches the kernel for rows of one layer.
    ///
    /// # Safety
    /// The layer exists; the type is the layout's or can be converted; until the command scope
    /// ends, rows and slots are the device's memory, aligned to their elements; slots are checked;
    /// the frame rule.
    pub(super) unsafe fn launch_rows(
        &self,
        commands: &mut CommandScope<'_>,
        layer: usize,
        way: Way,
        rows: DeviceRows,
        slots: u64,
        tokens: usize,
    ) -> Result<(), StorageError> {
        let inner = &*self.inner;
        let values = lanes(&inner.placed, layer, PlaneKind::Values, &inner.layout);
        let scales = lanes(&inner.placed, layer, PlaneKind::Scales, &inner.layout);
        let is_latent = inner.halves() == 1;
        let params = self.quant_params(layer, rows, slots, tokens, values, scales);
        let params = if is_latent { without_v(params) } else { params };
        // SAFETY: the caller's promise.
        unsafe { self.launch_kernel(commands, way, rows.dtype, params) }
    }

    /// Launches it for K alone (`half` 0) or V alone (1), as if it were the vector of a latent
    /// layout.
    ///
    /// # Safety
    /// As for [`launch_rows`](Self::launch_rows).
    #[expect(clippy::too_many_arguments, reason = "it is launch_rows for one half")]
    pub(super) unsafe fn launch_half(
        &self,
        commands: &mut CommandScope<'_>,
        layer: usize,
        way: Way,
        rows: DeviceRows,
        half: usize,
        slots: u64,
        tokens: usize,
    ) -> Result<(), StorageError> {
        let inner = &*self.inner;
        let values = lanes(&inner.placed, layer, PlaneKind::Values, &inner.layout);
        let scales = lanes(&inner.placed, layer, PlaneKind::Scales, &inner.layout);
        let (values, scales) = ([values[half]; 2], [scales[half]; 2]);
        let rows = if half == 0 { rows } else { DeviceRows { k: rows.v, k_stride: rows.v_stride, ..rows } };
        let mut params = self.quant_params(layer, rows, slots, tokens, values, scales);
        if half == 1 {
            params.k_scales = params.v_scales;
        }
        // SAFETY: the caller's promise.
        unsafe { self.launch_kernel(commands, way, rows.dtype, without_v(params)) }
    }

    fn quant_params(
        &self,
        layer: usize,
        rows: DeviceRows,
        slots: u64,
        tokens: usize,
        [k_lane, v_lane]: [Lane; 2],
        [k_scale_lane, v_scale_lane]: [Lane; 2],
    ) -> QuantParams {
        let (inner, layout) = (&*self.inner, &self.inner.layout);
        let scales_at = (layer * layout.kv_heads() * size_of::<f32>()) as u64;
        let [k_scales, v_scales] = match &inner.scales {
            Some(scales) => scales.each_ref().map(|scales| scales.address() + scales_at),
            None => [0; 2],
        };
        let mode = match layout.scales() {
            Scales::Unit => SCALES_UNIT,
            Scales::PerHead { .. } => SCALES_PER_HEAD,
            Scales::PerTokenHead => SCALES_PER_TOKEN_HEAD,
            other => unreachable!("no kernel knows scales of {other:?}"),
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
        commands: &mut CommandScope<'_>,
        way: Way,
        dtype: Dtype,
        mut params: QuantParams,
    ) -> Result<(), StorageError> {
        let layout = &self.inner.layout;
        let rows = &mut params.rows;
        let k = [rows.k, rows.k_stride, rows.k_lane.base, rows.k_lane.frame_stride];
        let v = [rows.v, rows.v_stride, rows.v_lane.base, rows.v_lane.frame_stride];
        let numbers = k.into_iter().chain(v).chain([rows.row_bytes.into()]);
        let jobs = rows.n_tokens as usize * self.inner.halves();
        if dtype == layout.dtype() {
            rows.unit = unit(numbers);
            let grid = self.grid(jobs.div_ceil((THREADS / WARP) as usize));
            let kernel = if way == Way::Store { Kernel::Store } else { Kernel::Load };
            // SAFETY: the caller's promise.
            return unsafe { commands.launch(kernel, grid, &params.rows) };
        }
        rows.unit = unit(numbers.chain([layout.head_dim() as u64]));
        let grid = self.grid((jobs * layout.kv_heads()).div_ceil((THREADS / WARP) as usize));
        let kernel = match way {
            Way::Store => Kernel::Quantise(layout.dtype(), dtype),
            Way::Load => Kernel::Dequantise(layout.dtype(), dtype),
        };
        // SAFETY: the caller's promise.
        unsafe { commands.launch(kernel, grid, &params) }
    }
}

/// Removes V from the parameters; the kernels test its address.
fn without_v(mut params: QuantParams) -> QuantParams {
    (params.rows.v, params.rows.v_stride) = (0, 0);
    (params.rows.v_lane, params.v_scale_lane) = Default::default();
    params
}
