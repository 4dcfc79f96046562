//! Rows of single tokens from the host: stored and loaded through pinned buffers.

use kvpool::Dtype;
use kvpool::StorageError;
use kvpool::storage::backend::check;
use kvpool::storage::{Elements, ElementsMut, Storage};

use super::command_scope::CommandScope;
use super::device_rows::DeviceRows;
use super::launch::Work;
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
        let dtypes = [k.dtype(), v.dtype()];
        let host = |at: &Parts, first: usize, _: &[i64], buffer: &mut [u8]| {
            for (rows, to, row_bytes) in at.of([k, v]).into_iter().take(inner.halves()) {
                let rows = &rows.as_bytes()[first * row_bytes..][..at.tokens * row_bytes];
                buffer[to..][..rows.len()].copy_from_slice(rows);
            }
        };
        // SAFETY: the slots are checked; the rest is the caller's promise.
        unsafe { self.through_buffers(layer, Way::In, slots, dtypes, host) }
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
        let dtypes = [k.as_elements().dtype(), v.as_elements().dtype()];
        let host = |at: &Parts, first: usize, slots: &[i64], buffer: &mut [u8]| {
            let targets = at.of([k.as_bytes_mut(), v.as_bytes_mut()]);
            for (rows, from, row_bytes) in targets.into_iter().take(inner.halves()) {
                let target = rows[first * row_bytes..].chunks_exact_mut(row_bytes);
                let loaded = buffer[from..].chunks_exact(row_bytes);
                for ((target, loaded), _) in target.zip(loaded).zip(slots).filter(|(_, slot)| **slot >= 0) {
                    target.copy_from_slice(loaded);
                }
            }
        };
        // SAFETY: as in `store_rows`.
        unsafe { self.through_buffers(layer, Way::Out, slots, dtypes, host) }
    }

    /// Moves rows through buffers, as many tokens at a time as fit into one.
    ///
    /// `host` writes the rows of K and V of these slots on the way in, and reads them on the way out;
    /// it gets the number of tokens before them.
    ///
    /// # Safety
    /// The slots are checked; the frame rule, for these slots.
    unsafe fn through_buffers(
        &self,
        layer: usize,
        way: Way,
        slots: &[i64],
        dtypes: [Dtype; 2],
        mut host: impl FnMut(&Parts, usize, &[i64], &mut [u8]),
    ) -> Result<(), StorageError> {
        let inner = &*self.inner;
        inner.device.good()?;
        let [k_bytes, v_bytes] = dtypes.map(|dtype| inner.layout.row_elements() * dtype.bytes());
        let v_bytes = if inner.halves() == 1 { 0 } else { v_bytes };
        let most = tokens_at_a_time(k_bytes, v_bytes);
        inner.pending.wait(frames_of(slots, inner.layout.block_tokens()))?;
        for (part, slots) in slots.chunks(most).enumerate() {
            let at = Parts::new(slots.len(), k_bytes, v_bytes);
            let mut pinned = inner.device.0.staging.pinned(at.end)?;
            // SAFETY: the stream lives as long as the storage.
            let mut commands = unsafe { CommandScope::on(&inner.device, self.stream_of(Work::Rows).raw()) };
            pinned.bytes_mut()[..size_of_val(slots)].copy_from_slice(bytes_of(slots));
            if way == Way::In {
                host(&at, part * most, slots, pinned.bytes_mut());
            }
            let (scratch, pinned) = (commands.scratch(at.end)?, commands.keep(pinned));
            let sent = if way == Way::In { at.end } else { size_of_val(slots) };
            // SAFETY: the buffers belong to this command scope; the slots are sent before the rows are
            // fetched; the rest is the caller's promise.
            unsafe {
                commands.send(scratch, pinned, sent)?;
                self.launch_parts(&mut commands, layer, way, dtypes, scratch, &at)?;
                if way == Way::Out {
                    commands.fetch(pinned, scratch, at.end)?;
                }
            }
            let mut buffers = commands.wait_and_return()?;
            if way == Way::Out {
                host(&at, part * most, slots, buffers.bytes_mut(pinned));
            }
        }
        Ok(())
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
        [k, v]: [Dtype; 2],
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
        let tokens = at.tokens;
        // SAFETY: the caller's promise.
        unsafe {
            if k == v || self.inner.halves() == 1 {
                return self.launch_rows(commands, layer, way, rows, buffer, tokens);
            }
            self.launch_rows(commands, layer, way, DeviceRows { v: 0, ..rows }, buffer, tokens)?;
            self.launch_rows(commands, layer, way, DeviceRows { dtype: v, k: 0, ..rows }, buffer, tokens)
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

    /// Returns rows of K and V with their place in the buffer, and the bytes of one.
    fn of<T>(&self, [k, v]: [T; 2]) -> [(T, usize, usize); 2] {
        [(k, self.k, self.k_bytes), (v, self.v, self.v_bytes)]
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
