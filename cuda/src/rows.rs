//! Rows of single tokens from the host: stored and loaded through pinned buffers.

use kvpool::Dtype;
use kvpool::StorageError;
use kvpool::storage::backend::check;
use kvpool::storage::{Elements, ElementsMut, Storage};

use super::command_scope::CommandScope;
use super::device_rows::{DeviceRows, Part, Slots};
use super::memory::bytes_of;
use super::params::Way;
use super::staging::BYTES_MAX;
use super::storage::CudaStorage;

/// Alignment of the parts of a buffer.
const ALIGN: usize = 16;

impl CudaStorage {
    /// Implements [`Storage::store`].
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
        let inner = &*self.inner;
        check::rows(&inner.layout, layer, k, v, slots.len())?;
        check::slots_unique(slots, self.frames(), inner.layout.block_tokens())?;
        inner.device.good()?;
        let [k_bytes, v_bytes] = self.row_bytes_outside([k.dtype(), v.dtype()]);
        let most = tokens_at_a_time(k_bytes, v_bytes);
        inner.pending.wait(frames_of(slots, inner.layout.block_tokens()))?;
        for (part, slots) in slots.chunks(most).enumerate() {
            let at = Parts::new(slots.len(), k_bytes, v_bytes);
            let mut pinned = inner.device.0.staging.pinned(at.end)?;
            // SAFETY: the stream lives as long as the storage.
            let mut commands = unsafe { CommandScope::on(&inner.device, self.service.raw()) };
            let bytes = pinned.bytes_mut();
            bytes[..size_of_val(slots)].copy_from_slice(bytes_of(slots));
            for (rows, at, row_bytes) in
                [(k, at.k, k_bytes), (v, at.v, v_bytes)].into_iter().take(inner.halves())
            {
                let rows = &rows.as_bytes()[part * most * row_bytes..][..slots.len() * row_bytes];
                bytes[at..at + rows.len()].copy_from_slice(rows);
            }
            let (scratch, pinned) = (commands.scratch(at.end)?, commands.keep(pinned));
            // SAFETY: the buffers belong to this command scope, and the slots are checked; the rest is
            // the caller's promise.
            unsafe {
                commands.send(scratch, pinned, at.end)?;
                self.launch_parts(&mut commands, layer, Way::In, (k.dtype(), v.dtype()), scratch, &at)?;
            }
            commands.wait()?;
        }
        Ok(())
    }

    /// Implements [`Storage::load`].
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
        let inner = &*self.inner;
        check::rows(&inner.layout, layer, k.as_elements(), v.as_elements(), slots.len())?;
        check::slots(slots, self.frames(), inner.layout.block_tokens())?;
        inner.device.good()?;
        let dtypes = (k.as_elements().dtype(), v.as_elements().dtype());
        let [k_bytes, v_bytes] = self.row_bytes_outside([dtypes.0, dtypes.1]);
        let most = tokens_at_a_time(k_bytes, v_bytes);
        inner.pending.wait(frames_of(slots, inner.layout.block_tokens()))?;
        for (part, slots) in slots.chunks(most).enumerate() {
            let at = Parts::new(slots.len(), k_bytes, v_bytes);
            let mut pinned = inner.device.0.staging.pinned(at.end)?;
            // SAFETY: the stream lives as long as the storage.
            let mut commands = unsafe { CommandScope::on(&inner.device, self.service.raw()) };
            pinned.bytes_mut()[..size_of_val(slots)].copy_from_slice(bytes_of(slots));
            let (scratch, pinned) = (commands.scratch(at.end)?, commands.keep(pinned));
            // SAFETY: as in `store_rows`; the slots are sent before the rows are fetched.
            unsafe {
                commands.send(scratch, pinned, size_of_val(slots))?;
                self.launch_parts(&mut commands, layer, Way::Out, dtypes, scratch, &at)?;
                commands.fetch(pinned, scratch, at.end)?;
            }
            let mut buffers = commands.wait_and_return()?;
            let targets = [(k.as_bytes_mut(), at.k, k_bytes), (v.as_bytes_mut(), at.v, v_bytes)];
            for (rows, at, row_bytes) in targets.into_iter().take(inner.halves()) {
                let target = rows[part * most * row_bytes..].chunks_exact_mut(row_bytes);
                let loaded = buffers.bytes_mut(pinned)[at..].chunks_exact(row_bytes);
                for ((target, loaded), _) in target.zip(loaded).zip(slots).filter(|(_, slot)| **slot >= 0) {
                    target.copy_from_slice(loaded);
                }
            }
        }
        Ok(())
    }

    /// Returns the bytes of one token's K and V in the caller's types.
    fn row_bytes_outside(&self, [k, v]: [Dtype; 2]) -> [usize; 2] {
        let bytes = |dtype: Dtype| self.inner.layout.row_elements() * dtype.bytes();
        [bytes(k), if self.inner.halves() == 1 { 0 } else { bytes(v) }]
    }

    /// Launches the kernels for rows of K and V in one buffer; two types need two launches.
    ///
    /// # Safety
    /// As for [`launch_rows`](Self::launch_rows).
    unsafe fn launch_parts(
        &self,
        commands: &mut CommandScope<'_>,
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
        let slots = Slots { address: buffer, tokens: at.tokens };
        if k == v || self.inner.halves() == 1 {
            // SAFETY: the caller's promise.
            return unsafe { self.launch_rows(commands, layer, way, Part::Both, rows, slots) };
        }
        // SAFETY: the caller's promise.
        unsafe {
            self.launch_rows(commands, layer, way, Part::K, rows, slots)?;
            self.launch_rows(commands, layer, way, Part::V, DeviceRows { dtype: v, ..rows }, slots)
        }
    }
}

/// Offsets of slots, K and V in one buffer; the slots come first.
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

/// Returns the frames of slots that were checked.
fn frames_of(slots: &[i64], block_tokens: usize) -> impl Iterator<Item = u32> {
    let slots = slots.iter().filter(|&&slot| slot >= 0);
    slots.map(move |&slot| (slot as usize / block_tokens) as u32)
}

/// Returns the number of tokens whose slots and rows fit into one buffer, at least one.
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
