//! The engine's memory: frames of one size, which hold K and V of any group of layers, and states.
//!
//! ```text
//! a frame of a list     [layers of the frame][tokens of a block][K, V]
//! the run of a state    [layers][heads][dim][dim], across the frames, which are consecutive
//! ```
//!
//! The pool names frames and slots; what lies where in a frame is the engine's choice, as long as
//! the layers of a frame fit into it.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering::Relaxed};

use kvpool::storage::groups::{GroupOptions, LayerGroups};
use kvpool::storage::{CopyDone, FrameMove};
use kvpool::{Batch, Dtype, GroupCopy, GroupedSequence, Pool, SequenceError, prefix::PrefixConfig};

use super::model::{Keeps, LayerMemory, LayerShape};

/// The bytes of all frames.
pub struct Frames {
    /// Relaxed: the pool orders what threads do to a frame. Plain numbers would do as well, if the
    /// pool is right.
    words: Vec<AtomicU32>,
    frame_words: usize,
    moved: AtomicUsize,
}

impl Frames {
    fn write(&self, at: usize, values: &[f32]) {
        let words = &self.words[at..at + values.len()];
        words.iter().zip(values).for_each(|(word, value)| word.store(value.to_bits(), Relaxed));
    }

    fn read(&self, at: usize, count: usize) -> impl Iterator<Item = f32> {
        self.words[at..at + count].iter().map(|word| f32::from_bits(word.load(Relaxed)))
    }

    /// Copies whole frames.
    pub fn copy(&self, moves: &[FrameMove]) {
        for frames in moves {
            let of = |frame: usize| &self.words[frame * self.frame_words..][..self.frame_words];
            let pairs = of(frames.src.index()).iter().zip(of(frames.dst.index()));
            pairs.for_each(|(from, to)| to.store(from.load(Relaxed), Relaxed));
        }
    }

    /// Makes the copies of an append or a checkpoint.
    pub fn make(&self, copies: &[GroupCopy]) {
        copies.iter().for_each(|copy| self.copy(&copy.frames));
    }
}

/// Where a layer keeps what it computes, in words of 4 bytes.
#[derive(Clone, Copy, Debug)]
enum Place {
    /// In a list of blocks, at this offset in each frame; `row` words of K, then of V, a token.
    Blocks { list: usize, offset: usize, row: usize },
    /// In the run of a state.
    Run { state: usize, offset: usize, words: usize },
}

/// A pool of frames for a model, and the memory.
pub struct Paged {
    pool: Pool,
    memory: Arc<Frames>,
    places: Vec<Place>,
}

impl Paged {
    /// Builds a pool of this number of blocks, for steps of up to `step_tokens` tokens.
    ///
    /// # Errors
    ///
    /// The shapes cannot be grouped, or the pool cannot be built.
    pub fn new(
        shapes: &[LayerShape],
        blocks: usize,
        step_tokens: usize,
    ) -> Result<Self, Box<dyn std::error::Error>> {
        let options = GroupOptions::new().dtype(Dtype::F32).step_tokens(step_tokens as u64);
        let layers: Vec<_> = shapes.iter().map(|shape| vec![shape.cache()]).collect();
        let model = LayerGroups::of_layers(&layers, options)?;
        let frame_words = model.frame_bytes() as usize / Dtype::F32.bytes();
        // One frame more, for the null block.
        let words = (0..(blocks + 1) * frame_words).map(|_| AtomicU32::new(0)).collect();
        let memory = Arc::new(Frames { words, frame_words, moved: AtomicUsize::new(0) });
        let of_copier = memory.clone();
        let copier = Arc::new(move |moves: &[FrameMove], done: CopyDone| {
            of_copier.copy(moves);
            of_copier.moved.fetch_add(moves.len(), Relaxed);
            done(Ok(()));
        });
        let builder = Pool::layered(&model)?.blocks(blocks).engine_copies(copier);
        let pool = builder.prefix_cache(PrefixConfig::new()).build()?;
        Ok(Self { places: places(&model, shapes, &pool, frame_words), pool, memory })
    }

    /// Returns the pool.
    pub fn pool(&self) -> &Pool {
        &self.pool
    }

    /// Returns the memory.
    pub fn memory(&self) -> &Frames {
        &self.memory
    }

    /// Returns the number of blocks that were moved.
    pub fn moved(&self) -> usize {
        self.memory.moved.load(Relaxed)
    }

    /// Returns what kernels see of a sequence in a batch that appended to it. The states that its
    /// drafts left go into `ahead`; `accepted` says how many of those that the step before it left
    /// there are final now.
    pub fn view<'a>(
        &'a self,
        batch: &'a Batch,
        sequence: &'a GroupedSequence,
        ahead: &'a mut Ahead,
        accepted: usize,
    ) -> View<'a> {
        let layers = vec![Vec::new(); self.places.len()];
        let before = std::mem::replace(ahead, Ahead { layers });
        View { paged: self, batch, sequence, before, accepted, ahead }
    }
}

/// Assigns each layer the next words in the frames of its list, or in the run of its state.
fn places(model: &LayerGroups, shapes: &[LayerShape], pool: &Pool, frame_words: usize) -> Vec<Place> {
    let lists = pool.cache_groups();
    let (mut used, mut places) = (vec![0; lists.len()], Vec::new());
    for (layer, shape) in shapes.iter().enumerate() {
        let place = Pool::layer_places(model, layer)[0];
        let Some(list) = place.list else {
            let (state, words) = (place.state.expect("a layer keeps tokens or a state"), shape.state_len());
            places.push(Place::Run { state, offset: place.index * words, words });
            continue;
        };
        places.push(Place::Blocks { list, offset: used[list], row: shape.kv_row() });
        used[list] += lists[list].block_tokens as usize * 2 * shape.kv_row();
        assert!(used[list] <= frame_words, "layers exceed a frame");
    }
    places
}

/// The states behind each draft of a step, by layer: copies of the engine's, because the run of a
/// state holds final tokens only.
#[derive(Clone, Default, Debug)]
pub struct Ahead {
    layers: Vec<Vec<Vec<f32>>>,
}

/// The memory of one sequence, by its lists of blocks and its states.
pub struct View<'a> {
    paged: &'a Paged,
    batch: &'a Batch,
    sequence: &'a GroupedSequence,
    before: Ahead,
    accepted: usize,
    ahead: &'a mut Ahead,
}

impl View<'_> {
    /// Returns where K and V of tokens begin, and the elements of each.
    fn rows(&self, layer: usize, tokens: Range<usize>) -> Result<(Vec<usize>, usize), SequenceError> {
        let Place::Blocks { list, offset, row } = self.paged.places[layer] else {
            unreachable!("layer {layer} keeps a state")
        };
        let blocks = self.sequence.group(list);
        let (in_block, mut slots) = (blocks.block_tokens(), Vec::new());
        self.batch.slot_mapping(blocks, tokens, &mut slots)?;
        let frame_words = self.paged.memory.frame_words;
        let word = |slot: usize| slot / in_block * frame_words + offset + slot % in_block * 2 * row;
        Ok((slots.into_iter().map(|slot| word(slot as usize)).collect(), row))
    }

    fn run(&self, layer: usize) -> (usize, usize) {
        let Place::Run { state, offset, words } = self.paged.places[layer] else {
            unreachable!("layer {layer} keeps tokens")
        };
        (self.sequence.state(state).start * self.paged.memory.frame_words + offset, words)
    }
}

impl LayerMemory for View<'_> {
    fn store(&mut self, layer: usize, first: usize, k: &[f32], v: &[f32]) -> Result<(), SequenceError> {
        let Place::Blocks { row, .. } = self.paged.places[layer] else { return Ok(()) };
        let (rows, _) = self.rows(layer, first..first + k.len() / row)?;
        for (at, (k, v)) in rows.into_iter().zip(k.chunks_exact(row).zip(v.chunks_exact(row))) {
            self.paged.memory.write(at, k);
            self.paged.memory.write(at + row, v);
        }
        Ok(())
    }

    fn load(&self, layer: usize, tokens: Range<usize>) -> Result<[Vec<f32>; 2], SequenceError> {
        let (rows, row) = self.rows(layer, tokens)?;
        let all =
            |plane: usize| rows.iter().flat_map(move |at| self.paged.memory.read(at + plane * row, row));
        Ok([all(0).collect(), all(1).collect()])
    }

    fn store_state(&mut self, layer: usize, position: usize, state: &[f32]) {
        let (tokens, held) = (position + 1, self.sequence.state_tokens());
        if tokens == held {
            self.paged.memory.write(self.run(layer).0, state);
        } else if tokens > held {
            self.ahead.layers[layer].push(state.to_vec());
        }
    }

    fn load_state(&self, layer: usize) -> Vec<f32> {
        if let Some(last) = self.accepted.checked_sub(1) {
            return self.before.layers[layer][last].clone();
        }
        let (at, words) = self.run(layer);
        self.paged.memory.read(at, words).collect()
    }
}

/// Returns whether a layer of these keeps a state.
pub fn has_states(shapes: &[LayerShape]) -> bool {
    shapes.iter().any(|shape| shape.keeps == Keeps::State)
}
