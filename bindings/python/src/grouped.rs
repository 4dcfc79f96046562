//! `GroupedSequence`: the tokens of a request in a pool of a model whose layers differ.

use std::sync::Arc;

use kvpool::{GroupedSequence, Sequence, SequenceId};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyRange};

use crate::args::{Id, Place, Tokens, range};
use crate::buffers::Numbers;
use crate::error::Outcome;
use crate::exclusive::Exclusive;
use crate::prefix::VersionRange;
use crate::stats::PreemptReport;

/// One request's tokens in every group of layers: a list of blocks for each frame of a block, all
/// of one length, and a run of frames for each state. Closed when it is collected; also a context
/// manager.
///
/// Lists are numbered as in `LayerGroup.lists`, states as in `LayerGroup.state`. One thread at a
/// time may use a sequence: another call meanwhile raises Busy.
#[pyclass(frozen, name = "GroupedSequence", module = "kvpool._kvpool")]
pub struct PyGroupedSequence {
    pub sequence: Arc<Exclusive<GroupedSequence>>,
    id: SequenceId,
}

impl PyGroupedSequence {
    /// Wraps a sequence.
    pub fn new(sequence: GroupedSequence) -> Self {
        let id = sequence.id();
        Self { sequence: Arc::new(Exclusive::new("sequence", sequence)), id }
    }
}

/// Returns a list of the sequence.
fn list(sequence: &GroupedSequence, list: Place) -> Outcome<&Sequence> {
    let one = range(list, Some(Place(list.0.saturating_add(1))), sequence.groups(), "lists")?;
    Ok(sequence.group(one.start))
}

#[pymethods]
impl PyGroupedSequence {
    /// Its id, unique among the open sequences of its pool.
    #[getter]
    fn id(&self) -> u64 {
        self.id.0
    }

    /// Priority of its allocations.
    #[getter]
    fn priority(&self) -> Outcome<String> {
        Ok(self.sequence.enter()?.group(0).priority().to_string())
    }

    /// Number of final tokens: the length without drafted tokens.
    #[getter]
    fn committed(&self) -> Outcome<usize> {
        Ok(self.sequence.enter()?.committed())
    }

    /// Number of tokens whose ids are known; 0 in a pool without a prefix cache.
    #[getter]
    fn announced(&self) -> Outcome<usize> {
        Ok(self.sequence.enter()?.announced())
    }

    /// Number of tokens at admission whose blocks were cached in all groups. If the sequence began
    /// with fewer, no state was kept behind them.
    #[getter]
    fn cached_prefix(&self) -> Outcome<usize> {
        Ok(self.sequence.enter()?.cached_prefix())
    }

    /// Length at which to end a chunk of the prompt, for a `Batch.checkpoint` that serves later
    /// prompts. None: there is none ahead, or the pool has no states or no prefix cache.
    #[getter]
    fn next_cut(&self) -> Outcome<Option<usize>> {
        Ok(self.sequence.enter()?.next_cut())
    }

    /// Number of lists of blocks.
    #[getter]
    fn lists(&self) -> Outcome<usize> {
        Ok(self.sequence.enter()?.groups())
    }

    /// The frames of each state, as ranges: the same until the sequence is closed. Kernels
    /// overwrite them in the order of the tokens. If an append begins at position 0, they hold
    /// nothing yet.
    #[getter]
    fn states<'py>(&self, py: Python<'py>) -> Outcome<Vec<Bound<'py, PyRange>>> {
        let sequence = self.sequence.enter()?;
        let mut states = Vec::with_capacity(sequence.states());
        for state in 0..sequence.states() {
            let frames = sequence.state(state);
            states.push(PyRange::new(py, frames.start as isize, frames.end as isize)?);
        }
        Ok(states)
    }

    /// Number of tokens that its states hold: the final ones at the last append.
    #[getter]
    fn state_tokens(&self) -> Outcome<usize> {
        Ok(self.sequence.enter()?.state_tokens())
    }

    /// Returns the ids of the blocks of a list, in order: 0, the null block, for each that was
    /// given up behind a window.
    fn blocks<'py>(&self, py: Python<'py>, list: Place) -> Outcome<Bound<'py, PyList>> {
        let sequence = self.sequence.enter()?;
        Ok(PyList::new(py, self::list(&sequence, list)?.blocks().map(|id| id.0))?)
    }

    /// Returns the number of blocks of a list that were given up behind its window.
    fn blocks_given_up(&self, list: Place) -> Outcome<usize> {
        Ok(self::list(&*self.sequence.enter()?, list)?.blocks_given_up())
    }

    /// The versions of the weights with which its tokens were computed, in the order of their
    /// positions; empty without a prefix cache. Blocks that it fills after a batch of other
    /// versions than those of its hashes are not found.
    #[getter]
    fn versions(&self) -> Outcome<Vec<VersionRange>> {
        Ok(VersionRange::all(self.sequence.enter()?.versions()))
    }

    /// Number of blocks that it holds, without those given up, in all lists and states.
    #[getter]
    fn held_blocks(&self) -> Outcome<usize> {
        Ok(self.sequence.enter()?.held_blocks())
    }

    /// Number of blocks reserved beyond its tokens, in all lists.
    #[getter]
    fn reserved_blocks(&self) -> Outcome<usize> {
        Ok(self.sequence.enter()?.reserved_blocks())
    }

    /// Tells the ids of tokens that will be appended, so that the prefix cache can find them.
    fn announce(&self, tokens: Numbers) -> Outcome<()> {
        Ok(self.sequence.enter()?.announce(&tokens.0)?)
    }

    /// Gives the tokens from `start` up to `end`, before the first of them is announced, a key that
    /// separates them from equal tokens: that of an image, for example.
    fn extra_key(&self, start: Place, end: Place, key: &Bound<'_, PyBytes>) -> Outcome<()> {
        Ok(self.sequence.enter()?.extra_key(start.0..end.0, key.as_bytes())?)
    }

    /// Opens another sequence that shares every block until one of the two writes. In a pool with
    /// states it raises InvalidSequenceArgument: they are not shared.
    fn fork(&self, id: Id) -> Outcome<Self> {
        Ok(Self::new(self.sequence.enter()?.fork(SequenceId(id.0))?))
    }

    /// Makes drafted tokens final, up to this length.
    fn commit(&self, length: Tokens) -> Outcome<()> {
        Ok(self.sequence.enter()?.commit(length.0)?)
    }

    /// Makes the drafted tokens with these ids final, and removes the other drafted ones.
    fn accept(&self, tokens: Numbers) -> Outcome<()> {
        Ok(self.sequence.enter()?.accept(&tokens.0)?)
    }

    /// Removes tokens from the end, down to this length.
    ///
    /// Raises SequenceError, and changes nothing: of the kind BehindWindow if a group has given up
    /// tokens that the next one would see; of the kind StateAhead if its states hold more tokens,
    /// unless none are left.
    fn truncate(&self, length: Tokens) -> Outcome<()> {
        Ok(self.sequence.enter()?.truncate(length.0)?)
    }

    /// Reserves the blocks that the next `tokens` tokens need in all groups, or raises OutOfBlocks.
    /// Does not wait: see `Pool.reserve_grouped`.
    fn reserve(&self, tokens: Tokens) -> Outcome<()> {
        Ok(self.sequence.enter()?.reserve(tokens.0)?)
    }

    /// Releases the reserved blocks, and returns their number.
    fn release_reservation(&self) -> Outcome<usize> {
        Ok(self.sequence.enter()?.release_reservation())
    }

    /// Closes the sequence to make room, and returns how many blocks became free or stay in the
    /// prefix cache, and how many tokens are still cached. Admit it again, with the same id.
    fn preempt(&self) -> Outcome<PreemptReport> {
        Ok(PreemptReport::from(&self.sequence.take()?.preempt()))
    }

    /// Closes the sequence: its blocks are freed, or stay in the prefix cache, as do its states if
    /// it ends with a full block in every list. Does nothing if it is closed already.
    fn close(&self) -> Outcome<()> {
        self.sequence.take_if_any().map(drop)
    }

    /// Whether the sequence was closed.
    #[getter]
    fn closed(&self) -> Outcome<bool> {
        self.sequence.is_gone()
    }

    /// Number of tokens, including drafted ones. In a pool with states, 0 after an abandoned batch
    /// appended to it: the sequence begins again.
    fn __len__(&self) -> Outcome<usize> {
        Ok(self.sequence.enter()?.len())
    }

    fn __bool__(&self) -> bool {
        true
    }

    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        slf
    }

    /// Closes it.
    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, PyAny>) -> Outcome<()> {
        self.close()
    }

    fn __repr__(&self) -> Outcome<String> {
        Ok(match self.sequence.enter_if_any()? {
            None => format!("<kvpool.GroupedSequence {}, closed>", self.id),
            Some(sequence) => format!(
                "<kvpool.GroupedSequence {}: {} tokens in {} lists and {} states, {} blocks>",
                self.id,
                sequence.len(),
                sequence.groups(),
                sequence.states(),
                sequence.held_blocks()
            ),
        })
    }
}

/// Adds the classes of this file to the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<PyGroupedSequence>()
}
