//! Rows of single tokens: stored and loaded unconverted, converted to codes and back.

use kvpool::Dtype;
use kvpool::storage::{KvLayout, PlaneKind, Scales};
use kvpool_cuda::params::{
    QuantParams, RowsParams, SCALES_PER_HEAD, SCALES_PER_TOKEN_HEAD, SCALES_UNIT, Way, code_type, row_type,
    unit,
};
use kvpool_cuda_tests::host::launch;
use kvpool_testkit::rng::Rng;
use kvpool_testkit::scalar::{Rows, narrow, same};

use crate::arena::{Arena, FRAMES};
use crate::buffer::{Buffer, POISON, any_launch, any_unit};
use crate::layouts::layouts;

/// Special values: values that round or saturate, infinities and NaN.
const ODD: [f32; 12] = [
    0.0,
    -0.0,
    f32::NAN,
    f32::INFINITY,
    f32::NEG_INFINITY,
    f32::MIN_POSITIVE,
    1e-45,
    -1e-40,
    f32::MAX,
    -448.0,
    57344.0,
    0.5,
];

/// Rows of the caller, with a gap after each.
struct Outside {
    buffer: Buffer,
    dtype: Dtype,
    row: usize,
    stride: usize,
}

impl Outside {
    fn new(dtype: Dtype, elements: usize, tokens: usize, rng: &mut Rng) -> Self {
        let row = elements * dtype.bytes();
        // Elements are aligned to their size.
        let odd = dtype.bytes() * rng.below(3);
        let stride = row + if rng.below(2) == 0 { 16 * rng.below(3) } else { odd };
        let skew = if rng.below(3) == 0 { odd } else { 0 };
        Self { buffer: Buffer::poisoned(tokens * stride, skew), dtype, row, stride }
    }

    fn fill(&mut self, rows: &Rows) {
        for (to, from) in self.buffer.bytes_mut().chunks_mut(self.stride).zip(rows.bytes.chunks(self.row)) {
            to[..self.row].copy_from_slice(from);
        }
    }

    fn rows(&self) -> Rows {
        let rows = self.buffer.bytes().chunks(self.stride);
        Rows { dtype: self.dtype, bytes: rows.flat_map(|row| row[..self.row].to_vec()).collect() }
    }

    /// Asserts that the gaps are unchanged.
    fn check_gaps(&self) {
        for row in self.buffer.bytes().chunks(self.stride) {
            assert!(row[self.row..].iter().all(|&byte| byte == POISON), "the gap after a row was written");
        }
        self.buffer.check_guards();
    }
}

/// Returns random rows: random bits, typical values, and special ones.
fn any_rows(dtype: Dtype, elements: usize, rng: &mut Rng) -> Rows {
    let mut bytes = rng.bytes(elements * dtype.bytes());
    if !dtype.is_quantised() {
        // One factor per batch, so that dynamic scales of all sizes occur, the smallest too.
        let factor = [1.0, 1e-30, 1e20, 300.0, 0.01, 0.0, 1e-39][rng.below(7)];
        for bytes in bytes.chunks_mut(dtype.bytes()) {
            match rng.below(16) {
                0 => {}
                1 => narrow(dtype, ODD[rng.below(ODD.len())], bytes),
                _ => narrow(dtype, (rng.below(1 << 20) as f32 / 65536.0 - 8.0) * factor, bytes),
            }
        }
    }
    Rows { dtype, bytes }
}

/// Returns unique slots in random order, some of them padding.
fn any_slots(layout: &KvLayout, rng: &mut Rng) -> Vec<i64> {
    let mut slots: Vec<i64> = (0..(FRAMES * layout.block_tokens()) as i64).collect();
    (1..slots.len()).rev().for_each(|i| slots.swap(i, rng.below(i + 1)));
    slots.truncate(1 + rng.below(slots.len()));
    for slot in &mut slots {
        if rng.below(6) == 0 {
            *slot = [-1, i64::MIN, -7][rng.below(3)];
        }
    }
    slots
}

struct Launch {
    params: QuantParams,
    /// Buffers that the parameters point to.
    _keeps: [Buffer; 3],
}

/// Prepares the parameters, with the widest unit.
fn prepare(arena: &mut Arena, way: Way, layer: usize, slots: &[i64], sides: &mut [Outside]) -> Launch {
    let layout = arena.layout.clone();
    let mut slots_at = Buffer::of_values(slots);
    let mut scales = [0, 1].map(|half| Buffer::of_values(arena.static_scales(layer, half)));
    let row_bytes = layout.row_elements() * layout.dtype().bytes();
    let address = |side: Option<&mut Outside>| side.map_or((0, 0), |s| (s.buffer.address(), s.stride as u64));
    let (k, k_stride) = address(sides.get_mut(0));
    let (v, v_stride) = address(sides.get_mut(1));
    let lane = |arena: &mut Arena, kind, half| arena.lane(layer, kind, half);
    let (k_lane, v_lane) = (lane(arena, PlaneKind::Values, 0), lane(arena, PlaneKind::Values, 1));
    let is_converted = sides[0].dtype != layout.dtype();
    let mut numbers = vec![k, v, k_stride, v_stride, row_bytes as u64];
    numbers.extend([k_lane.base, v_lane.base, k_lane.frame_stride, v_lane.frame_stride]);
    if is_converted {
        numbers.push(layout.head_dim() as u64);
    }
    let rows = RowsParams {
        k,
        v,
        k_stride,
        v_stride,
        slots: slots_at.address(),
        k_lane,
        v_lane,
        row_bytes: row_bytes as u32,
        block_tokens: layout.block_tokens() as u32,
        n_tokens: slots.len() as u32,
        unit: unit(numbers),
        way,
        row_type: row_type(sides[0].dtype).unwrap_or(0),
    };
    let params = QuantParams {
        rows,
        k_scales: scales[0].address(),
        v_scales: scales[1].address(),
        k_scale_lane: lane(arena, PlaneKind::Scales, 0),
        v_scale_lane: lane(arena, PlaneKind::Scales, 1),
        heads: layout.kv_heads() as u32,
        head_dim: layout.head_dim() as u32,
        mode: match layout.scales() {
            Scales::PerHead { .. } => SCALES_PER_HEAD,
            Scales::PerTokenHead => SCALES_PER_TOKEN_HEAD,
            _ => SCALES_UNIT,
        },
        code_type: code_type(layout.dtype()).unwrap_or(0),
    };
    let [k_scales, v_scales] = scales;
    Launch { params, _keeps: [slots_at, k_scales, v_scales] }
}

fn sides(arena: &Arena, dtype: Dtype, tokens: usize, rng: &mut Rng) -> Vec<Outside> {
    let elements = arena.layout.row_elements();
    (0..arena.reference.halves()).map(|_| Outside::new(dtype, elements, tokens, rng)).collect()
}

fn run(is_converted: bool, mut launched: Launch, rng: &mut Rng) {
    let (ctas, order) = any_launch(rng);
    let params = &mut launched.params;
    params.rows.unit = any_unit(params.rows.unit, rng);
    let is_probed = params.rows.unit == 16
        && (Some(params.rows.row_type), Some(params.code_type))
            == (row_type(Dtype::Bf16), code_type(Dtype::Int8))
        && rng.below(2) == 0;
    let kernel = match (is_converted, params.rows.way, is_probed) {
        (false, ..) => "kvp_rows",
        (true, Way::In, false) => "kvp_quantise",
        (true, Way::Out, false) => "kvp_dequantise",
        // Compiled for this pair of types alone.
        (true, Way::In, true) if rng.below(2) == 0 => "kvp_probe_quantise_row_first",
        (true, Way::In, true) => "kvp_probe_quantise",
        (true, Way::Out, true) => "kvp_probe_dequantise",
    };
    // SAFETY: the slots exist and are unique, each has a row, and the caller holds the memory.
    unsafe {
        if is_converted {
            launch(kernel, ctas, *params, order);
        } else {
            launch(kernel, ctas, params.rows, order);
        }
    }
}

fn store(arena: &mut Arena, dtype: Dtype, rng: &mut Rng) {
    let layout = arena.layout.clone();
    let layer = rng.below(layout.layers());
    let slots = any_slots(&layout, rng);
    let mut sides = sides(arena, dtype, slots.len(), rng);
    let elements = slots.len() * layout.row_elements();
    let rows: Vec<Rows> = sides.iter().map(|_| any_rows(dtype, elements, rng)).collect();
    sides.iter_mut().zip(&rows).for_each(|(side, rows)| side.fill(rows));

    let launched = prepare(arena, Way::In, layer, &slots, &mut sides);
    run(dtype != layout.dtype(), launched, rng);

    for (half, rows) in rows.iter().enumerate() {
        arena.reference.store(layer, half, rows, &slots);
        assert!(&sides[half].rows() == rows, "a store changed the caller's rows");
        sides[half].check_gaps();
    }
    arena.check(&format!("store {dtype}"));
}

fn load(arena: &mut Arena, dtype: Dtype, rng: &mut Rng) {
    let layout = arena.layout.clone();
    let layer = rng.below(layout.layers());
    let mut slots = any_slots(&layout, rng);
    // Several tokens may be loaded from one slot.
    let again = slots[0];
    slots.push(again);
    let mut sides = sides(arena, dtype, slots.len(), rng);

    let launched = prepare(arena, Way::Out, layer, &slots, &mut sides);
    run(dtype != layout.dtype(), launched, rng);

    for (half, side) in sides.iter().enumerate() {
        let bytes = vec![POISON; slots.len() * layout.row_elements() * dtype.bytes()];
        let mut want = Rows { dtype, bytes };
        arena.reference.load(layer, half, &slots, &mut want);
        assert!(same(&side.rows(), &want), "load {dtype}, half {half}, of {layout:?}");
        side.check_gaps();
    }
    arena.check(&format!("load {dtype}"));
}

#[test]
fn rows_are_the_references() {
    for (index, layout) in layouts().iter().enumerate() {
        let mut rng = Rng(1000 + index as u64);
        let mut arena = Arena::new(layout, index % 3 == 1, &mut rng);
        for dtype in arena.reference.dtypes() {
            // Load before any store: the bytes of the frames, scales included, are random.
            load(&mut arena, dtype, &mut rng);
            store(&mut arena, dtype, &mut rng);
            load(&mut arena, dtype, &mut rng);
        }
    }
}
