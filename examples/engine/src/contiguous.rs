//! The reference: a contiguous cache of maximal length for each sequence, from a free list behind a
//! mutex.

use std::sync::{Arc, Mutex, PoisonError};

use kvpool::SequenceId;

use crate::cache::{Admission, CacheCounts, Candidate, Growth, KvCache, Tile};
use crate::config::ModelConfig;
use crate::error::EngineError;

type FreeList = Arc<Mutex<Vec<Vec<f32>>>>;

/// Caches of maximal length.
pub struct Contiguous {
    free: FreeList,
    kv_row: usize,
    tokens_max: usize,
}

/// The K and V of one sequence.
pub struct Slot {
    /// `[layers][K, V][tokens_max][kv_row]`.
    memory: Vec<f32>,
    computed: usize,
    free: FreeList,
}

impl Drop for Slot {
    fn drop(&mut self) {
        let memory = std::mem::take(&mut self.memory);
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(memory);
    }
}

impl Contiguous {
    /// Allocates caches for this many sequences of up to `tokens_max` tokens.
    pub fn new(config: &ModelConfig, sequences: usize, tokens_max: usize) -> Self {
        let elements = config.layers * 2 * tokens_max * config.kv_row();
        let free = (0..sequences).map(|_| vec![0.0; elements]).collect();
        Self { free: Arc::new(Mutex::new(free)), kv_row: config.kv_row(), tokens_max }
    }

    fn slot(&self) -> Option<Slot> {
        let memory = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop()?;
        Some(Slot { memory, computed: 0, free: self.free.clone() })
    }
}

impl KvCache for Contiguous {
    type Sequence = Slot;
    type Parked = ();
    type Step = ();

    fn admit(&self, _: Candidate<'_>, parked: Option<()>) -> Result<Admission<Slot, ()>, EngineError> {
        Ok(self.slot().map_or(Admission::Lacking(parked), Admission::Granted))
    }

    fn computed(&self, sequence: &Slot) -> usize {
        sequence.computed
    }

    fn begin(&self) {}

    fn grow(&self, (): &mut (), _: &mut [Growth<'_, Slot>]) -> Result<Vec<usize>, EngineError> {
        Ok(Vec::new()) // Each slot has the maximal length.
    }

    fn attend(
        &self,
        (): &mut (),
        sequence: &mut Slot,
        layer: usize,
        first: usize,
        k: &[f32],
        v: &[f32],
        read: impl FnOnce(&[Tile<'_>]),
    ) -> Result<(), EngineError> {
        let plane = self.tokens_max * self.kv_row;
        let (all_k, all_v) = sequence.memory[2 * layer * plane..][..2 * plane].split_at_mut(plane);
        let (start, end) = (first * self.kv_row, first * self.kv_row + k.len());
        all_k[start..end].copy_from_slice(k);
        all_v[start..end].copy_from_slice(v);
        read(&[Tile { k: &all_k[..end], v: &all_v[..end] }]);
        Ok(())
    }

    fn finish(&self, (): ()) {}

    fn keep(&self, sequence: &mut Slot, _: &[u32], computed: usize) -> Result<(), EngineError> {
        sequence.computed = computed;
        Ok(())
    }

    fn fork(&self, sequence: &mut Slot, _: SequenceId) -> Result<Option<Slot>, EngineError> {
        let Some(mut fork) = self.slot() else { return Ok(None) };
        fork.memory.copy_from_slice(&sequence.memory);
        fork.computed = sequence.computed;
        Ok(Some(fork))
    }

    fn preempt(&self, _: Slot) -> Result<Option<()>, EngineError> {
        Ok(None)
    }

    fn counts(&self) -> CacheCounts {
        CacheCounts::default()
    }
}
