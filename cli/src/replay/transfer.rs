//! Tokens on their way to storage and back: slots and whose they are, gathered over sequences so that one call moves
//! many, in buffers that are used again.

use std::ops::Range;

use super::content::{Content, Shape};
use super::memory::Memory;
use super::text::Text;

/// Tokens moved by one call: the rows of K and V stay in a core's own cache.
pub const PIECE_TOKENS: usize = 1024;

/// A token that was not read as it was written.
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
    /// Nothing on its way.
    pub fn new(shape: Shape) -> Self {
        Self {
            shape,
            parts: Vec::new(),
            slots: Vec::with_capacity(PIECE_TOKENS),
            k: vec![0; PIECE_TOKENS * shape.k_bytes],
            v: vec![0; PIECE_TOKENS * shape.v_bytes],
        }
    }

    /// Tokens that may still be gathered before they must be moved.
    pub fn room(&self) -> usize {
        PIECE_TOKENS - self.slots.len()
    }

    /// Whether nothing is gathered.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// Gathers tokens of a sequence whose slots `slots` adds.
    ///
    /// # Errors
    /// Those of `slots`, or that there were not as many as tokens.
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

    /// Writes what was gathered.
    ///
    /// # Errors
    /// Those of the memory.
    pub fn write(&mut self, memory: &impl Memory) -> Result<(), String> {
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
            memory.store(layer, k, v, &self.slots)?;
        }
        self.clear();
        Ok(())
    }

    /// Reads what was gathered and compares it with what was written there. Returns how many tokens it was.
    ///
    /// # Errors
    /// Those of the memory.
    pub fn check(&mut self, memory: &impl Memory, found: &mut impl FnMut(Corrupt)) -> Result<u64, String> {
        let tokens = self.slots.len();
        if tokens == 0 {
            return Ok(0);
        }
        for layer in 0..self.shape.layers {
            let (k, v) =
                (&mut self.k[..tokens * self.shape.k_bytes], &mut self.v[..tokens * self.shape.v_bytes]);
            memory.load(layer, &self.slots, k, v)?;
            for (plane, row, rows) in planes(&self.shape, &mut self.k, &mut self.v) {
                let mut at = 0;
                for part in &self.parts {
                    let rows = &rows[at * row..(at + part.count) * row];
                    find_corrupt(part, layer, plane, row, rows, self.shape.block_tokens, found);
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

/// The planes that a token has: number, bytes of a row, rows.
fn planes<'a>(
    shape: &Shape,
    k: &'a mut [u8],
    v: &'a mut [u8],
) -> impl Iterator<Item = (usize, usize, &'a mut [u8])> {
    [(0, shape.k_bytes, k), (1, shape.v_bytes, v)].into_iter().filter(|(_, row, _)| *row > 0)
}

/// Names each block of a part that holds a wrong byte.
fn find_corrupt(
    part: &Part,
    layer: usize,
    plane: usize,
    row: usize,
    rows: &[u8],
    block_tokens: usize,
    found: &mut impl FnMut(Corrupt),
) {
    let content = part.content;
    let (mut from, end) = (part.first, part.first + part.count);
    while let Some(token) = content.find_wrong(layer, plane, from, row, &rows[(from - part.first) * row..]) {
        let block = token / block_tokens;
        found(Corrupt { request: part.request, attempt: part.attempt, block });
        // On behind this block, to name each once.
        from = ((block + 1) * block_tokens).min(end);
    }
}
