//! Writes tokens to the storage, or reads them back and compares them, in large calls that gather
//! the slots of several sequences. All buffers are reused.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use kvpool::{Batch, Sequence};

use crate::content::{Content, Shape};
use crate::rows::Rows;
use crate::text::Text;

/// Tokens per call: few enough that the rows of K and V stay in a core's private cache.
pub const PIECE_TOKENS: usize = 1024;

/// The direction of a transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// Tokens are written.
    Write,
    /// Tokens are read back and compared.
    Check,
}

/// A block with a wrong byte.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Corrupt {
    /// The request.
    pub request: u32,
    /// Its attempt.
    pub attempt: u32,
    /// The list of the sequence that has the block: 0, unless the pool has several.
    pub list: usize,
    /// Index of the block in its table; of a list with fewer tokens per block than others, the
    /// index at which its tokens would be in a list with the most.
    pub block: usize,
}

/// Consecutive tokens of one sequence and one content.
#[derive(Clone, Copy)]
struct Part {
    content: Content,
    request: u32,
    attempt: u32,
    list: usize,
    first: usize,
    count: usize,
}

/// Moves tokens between a pool and the text. Those between two calls of [`flush`](Self::flush) have
/// one direction.
pub struct Transfer<'a> {
    rows: &'a Rows,
    /// The number of calls, over all threads.
    transfers: &'a AtomicU64,
    shape: Shape,
    parts: Vec<Part>,
    slots: Vec<i64>,
    k: Vec<u8>,
    v: Vec<u8>,
    /// Blocks with a wrong byte.
    pub corrupt: HashSet<Corrupt>,
    /// Tokens read back and compared.
    pub tokens_verified: u64,
}

impl<'a> Transfer<'a> {
    /// Creates empty buffers.
    pub fn new(rows: &'a Rows, transfers: &'a AtomicU64) -> Self {
        let shape = rows.shape();
        Self {
            rows,
            transfers,
            shape,
            parts: Vec::new(),
            slots: Vec::with_capacity(PIECE_TOKENS),
            k: vec![0; PIECE_TOKENS * shape.k_bytes],
            v: vec![0; PIECE_TOKENS * shape.v_bytes],
            corrupt: HashSet::new(),
            tokens_verified: 0,
        }
    }

    /// Returns the sizes of a token.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Gathers tokens in one list of a sequence, whose slots `slots` appends, and transfers them in
    /// full calls. Each list has other layers, and so other bytes for the same text. The rest waits
    /// for the next call, or for [`flush`](Self::flush).
    pub fn add(
        &mut self,
        access: Access,
        (request, attempt, list): (u32, u32, usize),
        text: &Text,
        tokens: Range<usize>,
        slots: impl Fn(Range<usize>, &mut Vec<i64>) -> Result<(), String>,
    ) -> Result<(), String> {
        let mut at = tokens.start;
        while at < tokens.end {
            let before = self.slots.len();
            let piece = at..tokens.end.min(at + PIECE_TOKENS - before);
            slots(piece.clone(), &mut self.slots)?;
            let (got, wanted) = (self.slots.len() - before, piece.len());
            if got != wanted {
                return Err(format!("request {request}: {got} slots for {wanted} tokens from {at}"));
            }
            at = piece.end;
            self.parts.extend(text.parts(piece).map(|(content, part)| Part {
                content,
                request,
                attempt,
                list,
                first: part.start,
                count: part.len(),
            }));
            if self.slots.len() == PIECE_TOKENS {
                self.flush(access)?;
            }
        }
        Ok(())
    }

    /// Transfers the gathered tokens.
    pub fn flush(&mut self, access: Access) -> Result<(), String> {
        let Self { rows: storage, shape, parts, slots, k, v, .. } = self;
        if slots.is_empty() {
            return Ok(());
        }
        self.transfers.fetch_add(1, Relaxed);
        let (k, v) = (&mut k[..slots.len() * shape.k_bytes], &mut v[..slots.len() * shape.v_bytes]);
        for layer in 0..shape.layers {
            if access == Access::Check {
                storage.load(layer, slots, k, v)?;
            }
            for (plane, row, rows) in [(0, shape.k_bytes, &mut *k), (1, shape.v_bytes, &mut *v)] {
                let mut at = 0;
                for part in parts.iter().filter(|_| row > 0) {
                    let rows = &mut rows[at * row..(at + part.count) * row];
                    let of_model = part.list * shape.layers + layer;
                    match access {
                        Access::Write => part.content.fill(of_model, plane, part.first, row, rows),
                        Access::Check => {
                            self.corrupt.extend(part.corrupt(of_model, plane, rows, shape.block_tokens));
                        }
                    }
                    at += part.count;
                }
            }
            if access == Access::Write {
                storage.store(layer, k, v, slots)?;
            }
        }
        if access == Access::Check {
            self.tokens_verified += slots.len() as u64;
        }
        parts.clear();
        slots.clear();
        Ok(())
    }
}

impl Part {
    /// Returns the distinct blocks of this part that have a wrong byte in these rows.
    fn corrupt(
        self,
        layer: usize,
        plane: usize,
        rows: &[u8],
        block_tokens: usize,
    ) -> impl Iterator<Item = Corrupt> {
        let row = rows.len() / self.count.max(1);
        let Self { content, request, attempt, list, first, count } = self;
        let mut from = first;
        std::iter::from_fn(move || {
            let token = content.find_wrong(layer, plane, from, row, &rows[(from - first) * row..])?;
            let block = token / block_tokens;
            from = ((block + 1) * block_tokens).min(first + count);
            Some(Corrupt { request, attempt, list, block })
        })
    }
}

/// Returns a function that appends the slots of some tokens of a sequence, as a kernel gets them:
/// the first ones of a frame of the storage, where that has room for more tokens than the block.
pub fn slots(
    batch: &Batch,
    sequence: &Sequence,
    shape: Shape,
) -> impl Fn(Range<usize>, &mut Vec<i64>) -> Result<(), String> {
    let (in_block, in_frame) = (sequence.block_tokens() as i64, shape.block_tokens as i64);
    move |tokens, out| {
        let before = out.len();
        batch.slot_mapping(sequence, tokens, out).map_err(|error| error.to_string())?;
        if in_block != in_frame {
            let in_storage = |slot: &mut i64| *slot = *slot / in_block * in_frame + *slot % in_block;
            out[before..].iter_mut().for_each(in_storage);
        }
        Ok(())
    }
}
