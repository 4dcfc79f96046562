//! Memory for kernels: aligned as requested, between two guards that must not be written.

use kvpool_cuda_tests::host::Order;
use kvpool_testkit::rng::Rng;

/// Content of memory that has not been written.
pub const POISON: u8 = 0xA5;

const GUARD: usize = 64;
const ALIGN: usize = 256;

/// Bytes at a multiple of 256, plus a skew.
#[derive(Debug)]
pub struct Buffer {
    memory: Vec<u8>,
    start: usize,
    len: usize,
}

impl Buffer {
    /// Creates `len` bytes of poison.
    pub fn poisoned(len: usize, skew: usize) -> Self {
        let memory = vec![POISON; len + 2 * GUARD + ALIGN + skew];
        let start = (memory.as_ptr().addr() + GUARD).next_multiple_of(ALIGN) - memory.as_ptr().addr() + skew;
        Self { memory, start, len }
    }

    /// Creates a copy of `bytes`.
    pub fn of(bytes: &[u8], skew: usize) -> Self {
        let mut buffer = Self::poisoned(bytes.len(), skew);
        buffer.bytes_mut().copy_from_slice(bytes);
        buffer
    }

    /// Creates a copy of `values` in native representation.
    pub fn of_values<T: Copy>(values: &[T]) -> Self {
        // SAFETY: only used with structs and numbers without padding.
        let bytes = unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) };
        Self::of(bytes, 0)
    }

    pub fn bytes(&self) -> &[u8] {
        &self.memory[self.start..][..self.len]
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..][..self.len]
    }

    /// Returns the start address. Kernels access the memory; no reference to it exists meanwhile.
    pub fn address(&mut self) -> u64 {
        self.memory[self.start..].as_mut_ptr().expose_provenance() as u64
    }

    /// Asserts that the guards before and after the buffer are intact.
    #[track_caller]
    pub fn check_guards(&self) {
        let (before, rest) = self.memory.split_at(self.start);
        let touched = before.iter().chain(&rest[self.len..]).filter(|&&byte| byte != POISON).count();
        assert_eq!(touched, 0, "bytes were written outside of a buffer");
    }
}

/// Returns a random grid size and order.
pub fn any_launch(rng: &mut Rng) -> (u32, Order) {
    let ctas = [1, 2, 3, 5, 16][rng.below(5)];
    let order = match rng.below(4) {
        0 => Order::ASCENDING,
        1 => Order::DESCENDING,
        _ => Order::shuffled(rng.bits() as u32),
    };
    (ctas, order)
}

/// Returns `unit` or a smaller one: every multiple of 16 is a multiple of 4.
pub fn any_unit(unit: u32, rng: &mut Rng) -> u32 {
    let units: Vec<u32> = [16, 4, 1].into_iter().filter(|&smaller| smaller <= unit).collect();
    if rng.below(2) == 0 { unit } else { units[rng.below(units.len())] }
}
