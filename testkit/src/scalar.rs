//! The scalar reference of storage: one token at a time, without addresses or a memory layout. It
//! shares no code with the storages under test; 8-bit floats are decoded by their definition and
//! encoded by search.

use std::ops::Range;
use std::sync::OnceLock;

use half::{bf16, f16};
use kvpool::storage::{FrameMove, KvLayout, KvPlanes, Scales};
use kvpool::{Dtype, FrameId, Run};

/// Rows of elements as bytes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Rows {
    /// Element type.
    pub dtype: Dtype,
    /// The elements, `[tokens][kv_heads][head_dim]`, in the machine's byte order.
    pub bytes: Vec<u8>,
}

/// K or V of one token in one layer.
#[derive(Clone, PartialEq, Debug)]
struct Token {
    codes: Vec<u8>,
    /// As bytes, since unpacked data need not be numbers.
    scales: Vec<[u8; 4]>,
}

/// Expected contents of a storage with this layout.
#[derive(Clone, Debug)]
pub struct ScalarStorage {
    layout: KvLayout,
    frames: usize,
    /// By frame, layer, half, offset.
    tokens: Vec<Token>,
}

impl ScalarStorage {
    /// Creates `frames` frames of zeros.
    pub fn new(layout: KvLayout, frames: usize) -> Self {
        let mut storage = Self { layout, frames: 0, tokens: Vec::new() };
        storage.grow(frames);
        storage
    }

    /// Returns the layout.
    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    /// Returns the number of usable frames.
    pub fn frames(&self) -> usize {
        self.frames
    }

    /// Adds frames.
    pub fn grow(&mut self, total: usize) {
        self.frames = self.frames.max(total);
        let zero = self.zero_token();
        self.tokens.resize(self.frames * self.tokens_per_frame(), zero);
    }

    /// Returns 2 for K and V, 1 for a latent vector.
    pub fn halves(&self) -> usize {
        if self.layout.parts() == KvPlanes::Latent { 1 } else { 2 }
    }

    /// Returns the element types that stores accept and loads return.
    pub fn dtypes(&self) -> Vec<Dtype> {
        let own = self.layout.dtype();
        let mut dtypes = Vec::new();
        if !(own.is_quantised() && *self.layout.scales() == Scales::PerTokenHead) {
            dtypes.push(own);
        }
        if own.is_quantised() {
            dtypes.extend([Dtype::F32, Dtype::F16, Dtype::Bf16]);
        }
        dtypes
    }

    /// Returns whether slots may be loaded, or stored to if `unique`.
    pub fn slots_are_good(&self, slots: &[i64], unique: bool) -> bool {
        let end = (self.frames * self.layout.block_tokens()) as i64;
        let repeated = |index: usize| slots[..index].contains(&slots[index]);
        !(0..slots.len()).any(|index| slots[index] >= end || (unique && slots[index] >= 0 && repeated(index)))
    }

    /// Returns whether moves are valid.
    pub fn moves_are_good(&self, moves: &[FrameMove]) -> bool {
        let count = |frame| moves.iter().filter(|step| step.dst == frame).count();
        moves.iter().all(|step| {
            let inside = step.src.index() < self.frames && step.dst.index() < self.frames;
            inside && count(step.dst) == 1 && count(step.src) == 0
        })
    }

    /// Returns whether runs may be read, or written if `disjoint`.
    pub fn runs_are_good(&self, runs: &[Run], disjoint: bool) -> bool {
        let inside = |run: &Run| run.start.index() + run.len as usize <= self.frames;
        if !runs.iter().all(inside) {
            return false;
        }
        let mut frames: Vec<_> = runs.iter().flat_map(|run| run.frames()).collect();
        let count = frames.len();
        frames.sort_unstable();
        frames.dedup();
        !disjoint || frames.len() == count
    }

    /// Stores rows of one half.
    pub fn store(&mut self, layer: usize, half: usize, rows: &Rows, slots: &[i64]) {
        let row = self.layout.row_elements();
        for (index, &slot) in slots.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
            let size = rows.dtype.bytes();
            let bytes = &rows.bytes[index * row * size..][..row * size];
            let token = if rows.dtype == self.layout.dtype() {
                Token { codes: bytes.to_vec(), scales: vec![[0; 4]; self.scales_per_row()] }
            } else {
                let values: Vec<f32> = bytes.chunks(size).map(|bytes| widen(rows.dtype, bytes)).collect();
                self.quantise(layer, half, &values)
            };
            let place = self.place(layer, half, slot);
            self.tokens[place] = token;
        }
    }

    /// Loads rows of one half into `rows`.
    pub fn load(&self, layer: usize, half: usize, slots: &[i64], rows: &mut Rows) {
        let row = self.layout.row_elements();
        for (index, &slot) in slots.iter().enumerate().filter(|(_, slot)| **slot >= 0) {
            let token = &self.tokens[self.place(layer, half, slot)];
            let size = rows.dtype.bytes();
            let bytes = &mut rows.bytes[index * row * size..][..row * size];
            if rows.dtype == self.layout.dtype() {
                bytes.copy_from_slice(&token.codes);
                continue;
            }
            for (element, bytes) in bytes.chunks_mut(size).enumerate() {
                let head = element / self.layout.head_dim();
                let scale = match self.layout.scales() {
                    Scales::PerTokenHead => f32::from_ne_bytes(token.scales[head]),
                    _ => self.static_scale(layer, half, head),
                };
                let value = decode(self.layout.dtype(), token.codes[element]) * scale;
                narrow(rows.dtype, value, bytes);
            }
        }
    }

    /// Copies frames.
    pub fn copy(&mut self, moves: &[FrameMove]) {
        let before = self.tokens.clone();
        for step in moves {
            let from = self.frame(step.src);
            let to = self.frame(step.dst);
            self.tokens[to].clone_from_slice(&before[from]);
        }
    }

    /// Fills frames with zeros.
    pub fn zero(&mut self, runs: &[Run]) {
        let zero = self.zero_token();
        for frame in runs.iter().flat_map(|run| run.frames()) {
            let tokens = self.frame(frame);
            self.tokens[tokens].fill(zero.clone());
        }
    }

    /// Returns the packed form: frame by frame; by layer all K, all V, all scales of K, all scales
    /// of V.
    pub fn pack(&self, runs: &[Run]) -> Vec<u8> {
        let mut packed = Vec::new();
        for frame in runs.iter().flat_map(|run| run.frames()) {
            for layer in self.tokens[self.frame(frame)].chunks(self.halves() * self.layout.block_tokens()) {
                layer.iter().for_each(|token| packed.extend_from_slice(&token.codes));
                layer.iter().for_each(|token| packed.extend_from_slice(token.scales.as_flattened()));
            }
        }
        packed
    }

    /// Writes the packed form: the inverse of [`pack`](Self::pack).
    pub fn unpack(&mut self, runs: &[Run], packed: &[u8]) {
        let mut rest = packed;
        let mut take = |bytes: usize| {
            let (taken, after) = rest.split_at(bytes);
            rest = after;
            taken
        };
        let row_bytes = self.layout.row_elements() * self.layout.dtype().bytes();
        let scale_bytes = 4 * self.scales_per_row();
        let layer_tokens = self.halves() * self.layout.block_tokens();
        for frame in runs.iter().flat_map(|run| run.frames()) {
            let tokens = self.frame(frame);
            for layer in self.tokens[tokens].chunks_mut(layer_tokens) {
                layer.iter_mut().for_each(|token| token.codes = take(row_bytes).to_vec());
                layer.iter_mut().for_each(|token| token.scales = take(scale_bytes).as_chunks().0.to_vec());
            }
        }
    }

    fn place(&self, layer: usize, half: usize, slot: i64) -> usize {
        let tokens = self.layout.block_tokens();
        let (frame, offset) = (slot as usize / tokens, slot as usize % tokens);
        ((frame * self.layout.layers() + layer) * self.halves() + half) * tokens + offset
    }

    fn tokens_per_frame(&self) -> usize {
        self.layout.layers() * self.halves() * self.layout.block_tokens()
    }

    /// Returns the tokens of a frame.
    fn frame(&self, frame: FrameId) -> Range<usize> {
        let tokens = self.tokens_per_frame();
        frame.index() * tokens..(frame.index() + 1) * tokens
    }

    fn zero_token(&self) -> Token {
        Token {
            codes: vec![0; self.layout.row_elements() * self.layout.dtype().bytes()],
            scales: vec![[0; 4]; self.scales_per_row()],
        }
    }

    fn scales_per_row(&self) -> usize {
        if *self.layout.scales() == Scales::PerTokenHead { self.layout.kv_heads() } else { 0 }
    }

    fn static_scale(&self, layer: usize, half: usize, head: usize) -> f32 {
        match self.layout.scales() {
            Scales::PerHead { k, v } => [k, v][half][layer * self.layout.kv_heads() + head],
            _ => 1.0,
        }
    }

    fn quantise(&self, layer: usize, half: usize, values: &[f32]) -> Token {
        let dtype = self.layout.dtype();
        let (mut codes, mut scales) = (Vec::new(), Vec::new());
        for (head, values) in values.chunks(self.layout.head_dim()).enumerate() {
            let mut scale = self.static_scale(layer, half, head);
            if *self.layout.scales() == Scales::PerTokenHead {
                let mut largest = 0.0;
                for value in values.iter().filter(|value| value.is_finite()) {
                    largest = f32::max(largest, value.abs());
                }
                let max = match dtype {
                    Dtype::Fp8E4M3 => 448.0,
                    Dtype::Fp8E5M2 => 57344.0,
                    _ => 127.0,
                };
                scale = f32::max(largest / max, f32::MIN_POSITIVE);
                scales.push(scale.to_ne_bytes());
            }
            codes.extend(values.iter().map(|value| encode(dtype, value * (1.0 / scale))));
        }
        Token { codes, scales }
    }
}

/// Exact, which `powi` need not be.
pub fn power_of_two(exponent: i32) -> f32 {
    let factor = if exponent < 0 { 0.5 } else { 2.0 };
    (0..exponent.abs()).fold(1.0, |power, _| power * factor)
}

/// Returns the value of a code, by the definition of the format.
pub fn decode(dtype: Dtype, code: u8) -> f32 {
    let (mantissa_bits, bias) = match dtype {
        Dtype::Fp8E4M3 => (3, 7),
        Dtype::Fp8E5M2 => (2, 15),
        _ => return f32::from(code as i8),
    };
    let exponent = i32::from((code & 0x7F) >> mantissa_bits);
    let fraction = f32::from(code & ((1 << mantissa_bits) - 1)) / f32::from(1u8 << mantissa_bits);
    let magnitude = match (dtype, exponent) {
        (Dtype::Fp8E4M3, 15) if code & 7 == 7 => f32::NAN,
        (Dtype::Fp8E5M2, 31) if code & 3 == 0 => f32::INFINITY,
        (Dtype::Fp8E5M2, 31) => f32::NAN,
        (_, 0) => fraction * power_of_two(1 - bias),
        _ => (1.0 + fraction) * power_of_two(exponent - bias),
    };
    if code & 0x80 == 0 { magnitude } else { -magnitude }
}

/// Returns the code of the nearest finite value, found among all values; ties go to the even code.
pub fn encode(dtype: Dtype, value: f32) -> u8 {
    if dtype == Dtype::Int8 {
        // Far out of range all distances would be equal.
        let value = value.clamp(-1e6, 1e6);
        let nearest = (-127i8..=127).min_by(|&a, &b| {
            let distance = |code: i8| (f64::from(code) - f64::from(value)).abs();
            distance(a).total_cmp(&distance(b)).then((a & 1).cmp(&(b & 1)))
        });
        return if value.is_nan() { 0 } else { nearest.unwrap_or(0) as u8 };
    }
    if value.is_nan() {
        return if dtype == Dtype::Fp8E4M3 { 0x7F } else { 0x7E };
    }
    static VALUES: OnceLock<[[f32; 128]; 2]> = OnceLock::new();
    let values = VALUES.get_or_init(|| {
        [Dtype::Fp8E4M3, Dtype::Fp8E5M2].map(|dtype| std::array::from_fn(|code| decode(dtype, code as u8)))
    });
    let values = &values[usize::from(dtype == Dtype::Fp8E5M2)];
    // As above.
    let magnitude = f64::from(value.abs().min(1e6));
    // Finite values ascend with their codes: the nearest is the last one not above, or the one
    // after it.
    let finite = values.iter().take_while(|value| value.is_finite()).count();
    let above = values[..finite].partition_point(|&value| f64::from(value) <= magnitude).min(finite - 1);
    let distance = |code: usize| (f64::from(values[code]) - magnitude).abs();
    let below = above.saturating_sub(1);
    let nearer = distance(below).total_cmp(&distance(above)).then((below & 1).cmp(&(above & 1)));
    let best = if nearer.is_lt() { below } else { above } as u8;
    if value.is_sign_negative() { best | 0x80 } else { best }
}

/// Converts an f32, f16 or bf16 to f32.
pub fn widen(dtype: Dtype, bytes: &[u8]) -> f32 {
    match dtype {
        Dtype::F16 => f16::from_ne_bytes([bytes[0], bytes[1]]).to_f32(),
        Dtype::Bf16 => bf16::from_ne_bytes([bytes[0], bytes[1]]).to_f32(),
        _ => f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
    }
}

/// Converts an f32 to f32, f16 or bf16.
pub fn narrow(dtype: Dtype, value: f32, bytes: &mut [u8]) {
    match dtype {
        Dtype::F16 => bytes.copy_from_slice(&f16::from_f32(value).to_ne_bytes()),
        Dtype::Bf16 => bytes.copy_from_slice(&bf16::from_f32(value).to_ne_bytes()),
        _ => bytes.copy_from_slice(&value.to_ne_bytes()),
    }
}

/// Returns whether two lists of elements are bitwise equal, treating all NaNs as equal.
pub fn same(a: &Rows, b: &Rows) -> bool {
    if a.dtype != b.dtype || a.bytes.len() != b.bytes.len() {
        return false;
    }
    let size = a.dtype.bytes();
    a.bytes
        .chunks(size)
        .zip(b.bytes.chunks(size))
        .all(|(x, y)| x == y || (size > 1 && widen(a.dtype, x).is_nan() && widen(b.dtype, y).is_nan()))
}
