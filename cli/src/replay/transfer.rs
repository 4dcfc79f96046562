//! Writes tokens to the storage and reads them back, many in one call: the slots of several
//! sequences are gathered first. All buffers are used again.

use std::collections::HashSet;
use std::ops::Range;

use super::content::{Content, Shape};
use super::pool::ReplayPool;
use super::text::Text;

/// Tokens of one call: few enough that the rows of K and V stay in a core's own cache.
pub const PIECE_TOKENS: usize = 1024;

/// A block with a byte that is not as it was written.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Corrupt {
    /// The request.
    pub request: u32,
    /// Its attempt.
    pub attempt: u32,
    /// The block of its table.
    pub block: usize,
}

/// Consecutive tokens of one sequence and one content.
#[derive(Clone, Copy)]
struct Part {
    content: Content,
    request: u32,
    attempt: u32,
    first: usize,
    count: usize,
}

/// See the [module](self).
pub struct Transfer {
    shape: Shape,
    parts: Vec<Part>,
    slots: Vec<i64>,
    k: Vec<u8>,
    v: Vec<u8>,
}

impl Transfer {
    /// Creates empty buffers.
    pub fn new(shape: Shape) -> Self {
        Self {
            shape,
            parts: Vec::new(),
            slots: Vec::with_capacity(PIECE_TOKENS),
            k: vec![0; PIECE_TOKENS * shape.k_bytes],
            v: vec![0; PIECE_TOKENS * shape.v_bytes],
        }
    }

    /// Returns the number of tokens that can be gathered before the next call.
    pub fn room(&self) -> usize {
        PIECE_TOKENS - self.slots.len()
    }

    /// Returns whether no tokens are gathered.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Gathers tokens of a sequence, whose slots `slots` adds.
    pub fn gather(
        &mut self,
        (request, attempt): (u32, u32),
        text: &Text,
        tokens: Range<usize>,
        slots: impl FnOnce(&mut Vec<i64>) -> Result<(), String>,
    ) -> Result<(), String> {
        let before = self.slots.len();
        slots(&mut self.slots)?;
        let (got, wanted) = (self.slots.len() - before, tokens.len());
        if got != wanted {
            return Err(format!("request {request}: {got} slots for {wanted} tokens from {}", tokens.start));
        }
        let part = |(content, part): (Content, Range<usize>)| Part {
            content,
            request,
            attempt,
            first: part.start,
            count: part.len(),
        };
        self.parts.extend(text.parts(tokens).map(part));
        Ok(())
    }

    /// Writes the gathered tokens.
    pub fn write(&mut self, pool: &ReplayPool) -> Result<(), String> {
        let tokens = self.slots.len();
        if tokens == 0 {
            return Ok(());
        }
        for layer in 0..self.shape.layers {
            for (plane, row, rows) in planes(&self.shape, &mut self.k, &mut self.v) {
                let mut at = 0;
                for part in &self.parts {
                    let place = at * row..(at + part.count) * row;
                    part.content.fill(layer, plane, part.first, row, &mut rows[place]);
                    at += part.count;
                }
            }
            let (k, v) = (&self.k[..tokens * self.shape.k_bytes], &self.v[..tokens * self.shape.v_bytes]);
            pool.store(layer, k, v, &self.slots)?;
        }
        self.clear();
        Ok(())
    }

    /// Reads the gathered tokens, adds the blocks with a wrong byte to `corrupt`, and returns the
    /// number of tokens.
    pub fn check(&mut self, pool: &ReplayPool, corrupt: &mut HashSet<Corrupt>) -> Result<u64, String> {
        let tokens = self.slots.len();
        if tokens == 0 {
            return Ok(0);
        }
        for layer in 0..self.shape.layers {
            let (k, v) =
                (&mut self.k[..tokens * self.shape.k_bytes], &mut self.v[..tokens * self.shape.v_bytes]);
            pool.load(layer, &self.slots, k, v)?;
            for (plane, row, rows) in planes(&self.shape, &mut self.k, &mut self.v) {
                let mut at = 0;
                for part in &self.parts {
                    let rows = &rows[at * row..(at + part.count) * row];
                    let block_tokens = self.shape.block_tokens;
                    corrupt.extend(part.corrupt(layer, plane, rows, block_tokens));
                    at += part.count;
                }
            }
        }
        self.clear();
        Ok(tokens as u64)
    }

    fn clear(&mut self) {
        self.parts.clear();
        self.slots.clear();
    }
}

/// Returns the planes of a layer: number, bytes of a row, rows.
fn planes<'a>(
    shape: &Shape,
    k: &'a mut [u8],
    v: &'a mut [u8],
) -> impl Iterator<Item = (usize, usize, &'a mut [u8])> {
    [(0, shape.k_bytes, k), (1, shape.v_bytes, v)].into_iter().filter(|(_, row, _)| *row > 0)
}

impl Part {
    /// Returns the blocks of this part that have a wrong byte in these rows, each once.
    fn corrupt(
        self,
        layer: usize,
        plane: usize,
        rows: &[u8],
        block_tokens: usize,
    ) -> impl Iterator<Item = Corrupt> {
        let row = rows.len() / self.count.max(1);
        let Self { content, request, attempt, first, count } = self;
        let mut from = first;
        std::iter::from_fn(move || {
            let token = content.find_wrong(layer, plane, from, row, &rows[(from - first) * row..])?;
            let block = token / block_tokens;
            from = ((block + 1) * block_tokens).min(first + count);
            Some(Corrupt { request, attempt, block })
        })
    }
}
