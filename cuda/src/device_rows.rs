//! Rows of single tokens in the device's memory: stores and loads on an engine's stream, and kernel
//! launches for rows of any origin.
//!
//! Rows of the host pass through a buffer first ([`rows`](super::rows)); from there on both are
//! handled alike.

use kvpool::storage::backend::check;
use kvpool::storage::{DeviceStream, PlaneKind};
use kvpool::{Dtype, Invalid, StorageError};

use super::command_scope::CommandScope;
use super::device::raw;
use super::launch::Work;
use super::params::{QuantParams, RowsParams, Way, code_type, row_type, unit};
use super::storage::{CudaStorage, no_kernel};

/// Number of threads that move one row of K or V.
const WARP: usize = 32;

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
        unsafe { self.rows_on(stream, layer, Way::In, rows, slots, tokens) }
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
        unsafe { self.rows_on(stream, layer, Way::Out, rows, slots, tokens) }
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
        let most = u32::MAX as usize / (2 * layout.kv_heads() * WARP);
        // SAFETY: the stream is of this device; the scope keeps nothing, so that no wait is needed.
        let mut commands = unsafe { CommandScope::on(&self.inner.device, raw(stream)) };
        let mut enqueued = Ok(());
        for first in (0..tokens).step_by(most.max(1)) {
            let part = DeviceRows {
                k: rows.k + (first * rows.k_stride) as u64,
                v: rows.v + (first * rows.v_stride) as u64,
                ..rows
            };
            let (slots, tokens) = (slots + (first * size_of::<i64>()) as u64, most.min(tokens - first));
            // SAFETY: the caller's promise.
            enqueued = unsafe { self.launch_rows(&mut commands, layer, way, part, slots, tokens) };
            if enqueued.is_err() {
                break;
            }
        }
        commands.leave();
        enqueued
    }

    /// Launches the kernel for rows of one layer: of K and V, or, if the address of the other one
    /// is 0, of K or V alone.
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
        let params = self.row_params(layer, way, rows, slots, tokens)?;
        let converting = if way == Way::In { Work::Quantise } else { Work::Dequantise };
        // SAFETY: the caller's promise.
        unsafe {
            if rows.dtype == self.inner.layout.dtype() {
                return commands.launch(Work::Rows, &params.rows);
            }
            commands.launch(converting, &params)
        }
    }

    /// Returns the parameters of the kernel for rows of one layer, also for measurements. Of rows
    /// that are not converted, only [`QuantParams::rows`] is used.
    ///
    /// # Errors
    ///
    /// [`StorageError::Device`] for types that no kernel converts.
    ///
    /// # Panics
    ///
    /// If there is no such layer.
    pub fn row_params(
        &self,
        layer: usize,
        way: Way,
        rows: DeviceRows,
        slots: u64,
        tokens: usize,
    ) -> Result<QuantParams, StorageError> {
        let (inner, layout) = (&*self.inner, &self.inner.layout);
        let lanes = inner.lanes[layer];
        let scales_at = (layer * layout.kv_heads() * size_of::<f32>()) as u64;
        let [k_scales, v_scales] = match &inner.scales {
            Some(scales) => scales.each_ref().map(|scales| scales.address() + scales_at),
            None => [0; 2],
        };
        let mut params = QuantParams {
            rows: RowsParams {
                k: rows.k,
                v: rows.v,
                k_stride: rows.k_stride as u64,
                v_stride: rows.v_stride as u64,
                slots,
                k_lane: lanes.values[0],
                v_lane: lanes.values[1],
                row_bytes: layout.row_bytes(PlaneKind::Values) as u32,
                block_tokens: layout.block_tokens() as u32,
                n_tokens: tokens as u32,
                unit: 1,
                way,
                row_type: 0,
            },
            k_scales,
            v_scales,
            k_scale_lane: lanes.scales[0],
            v_scale_lane: lanes.scales[1],
            heads: layout.kv_heads() as u32,
            head_dim: layout.head_dim() as u32,
            mode: inner.scale_mode,
            code_type: 0,
        };
        if rows.k == 0 {
            params.take_v();
        } else if rows.v == 0 || inner.halves() == 1 {
            params.take_k();
        }
        let rows_of = &mut params.rows;
        let k = [rows_of.k, rows_of.k_stride, rows_of.k_lane.base, rows_of.k_lane.frame_stride];
        let v = [rows_of.v, rows_of.v_stride, rows_of.v_lane.base, rows_of.v_lane.frame_stride];
        let numbers = k.into_iter().chain(v).chain([rows_of.row_bytes.into()]);
        if rows.dtype == layout.dtype() {
            rows_of.unit = unit(numbers);
            return Ok(params);
        }
        let types = row_type(rows.dtype).zip(code_type(layout.dtype()));
        let data = || format!("rows of {} and frames of {}", rows.dtype, layout.dtype());
        let unknown = || no_kernel(&inner.device, data());
        (rows_of.row_type, params.code_type) = types.ok_or_else(unknown)?;
        rows_of.unit = unit(numbers.chain([layout.head_dim() as u64]));
        Ok(params)
    }
}
