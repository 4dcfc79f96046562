//! Conformance suite of storage backends: on every device, the same bytes.
//!
//! Each check runs a storage and the [scalar reference](crate::scalar) side by side, and after each
//! step compares *all* frames, so that a stray write is detected too. A refused operation must
//! leave every byte unchanged.

use kvpool::storage::{Arrangement, Dtype, KvLayout, KvPlanes, Scales, Storage};

mod in_place;
mod ops;
mod receive;
mod refusals;

pub use ops::{Op, Pair};

use crate::rng::Rng;

/// Initial number of frames of a storage under test.
pub const FRAMES: usize = 6;

/// Maximum number of frames, if the storage can grow.
pub const FRAMES_MAX: usize = 9;

/// Runs the whole suite over every layout. `make` is called with a layout, [`FRAMES`] and
/// [`FRAMES_MAX`]; a backend that cannot grow ignores the last.
///
/// # Panics
/// If the backend is wrong; the message says how and in which layout.
pub fn run(make: impl Fn(&KvLayout, usize, usize) -> Box<dyn Storage>) {
    for (index, layout) in layouts().into_iter().enumerate() {
        // Under Miri each layout takes a while; these few cover every kind of scale, part and
        // arrangement.
        if cfg!(miri) && index % 23 != 0 {
            continue;
        }
        run_layout(&layout, &make, index as u64);
    }
    if !cfg!(miri) {
        for (index, layout) in wide_layouts().into_iter().enumerate() {
            run_wide(&layout, &make, index as u64);
        }
        receive::large_blocks(make);
    }
}

/// Runs the whole suite over one layout.
///
/// # Panics
/// As [`run`].
pub fn run_layout(layout: &KvLayout, make: impl Fn(&KvLayout, usize, usize) -> Box<dyn Storage>, seed: u64) {
    eprintln!("{layout}, {:?}, {:?}, {:?}", layout.arrangement(), layout.parts(), layout.scales());
    let storage = || make(layout, FRAMES, FRAMES_MAX);
    answers(&*storage());
    ops::every_operation(&*storage(), seed);
    ops::random_operations(&*storage(), seed, if cfg!(miri) { 3 } else { 60 });
    ops::growing(&*storage());
    ops::shrinking(&*storage());
    ops::neighbours_at_once(&*storage());
    in_place::planes(&*storage());
    in_place::tiles(&*storage());
    receive::receiving(&*storage(), &*storage());
    refusals::every_refusal(&*storage());
    receive::refusals(&*storage(), &*storage());
}

/// Runs the operations over one wide layout, whose scalar reference is slow.
///
/// # Panics
/// As [`run`].
fn run_wide(layout: &KvLayout, make: impl Fn(&KvLayout, usize, usize) -> Box<dyn Storage>, seed: u64) {
    eprintln!("{layout}, {:?}, {:?}, {:?}", layout.arrangement(), layout.parts(), layout.scales());
    let storage = || make(layout, FRAMES, FRAMES_MAX);
    ops::every_operation(&*storage(), seed);
    ops::random_operations(&*storage(), seed, 4);
    receive::receiving(&*storage(), &*storage());
}

/// Returns layouts with the head dimensions of models: a head takes 16 or 32 lanes of a warp, or
/// several steps of one; some tiles exceed 16 KiB, so that kernels cut them into pieces.
pub fn wide_layouts() -> Vec<KvLayout> {
    let mut layouts = Vec::new();
    // 128 and 256 as in Llama and Gemma; 576 is the latent vector of DeepSeek.
    for (head_dim, heads, block_tokens) in [(128, 2, 65), (256, 2, 5), (576, 1, 3)] {
        for dtype in [Dtype::Fp8E4M3, Dtype::Fp8E5M2, Dtype::Int8] {
            let index = layouts.len();
            let parts = match (heads, index % 2) {
                (1, _) => KvPlanes::Latent,
                (_, 0) => KvPlanes::Separate,
                _ => KvPlanes::Joined,
            };
            let scale = |head: usize| 0.02 * (head + 1) as f32;
            let scales = match index % 3 {
                2 => Scales::PerHead {
                    k: (0..heads).map(scale).collect(),
                    v: (0..if heads == 1 { 0 } else { heads }).map(scale).collect(),
                },
                _ => Scales::PerTokenHead,
            };
            let layout = KvLayout::builder().layers(1).kv_heads(heads).head_dim(head_dim).parts(parts);
            let arrangement = [Arrangement::LayerFirst, Arrangement::BlockFirst][index / 2 % 2];
            let layout = layout.block_tokens(block_tokens).dtype(dtype).arrangement(arrangement);
            layouts.push(layout.scales(scales).build().expect("a valid layout"));
        }
    }
    layouts
}

/// Returns every valid combination of dtype, arrangement, part and kind of scale; sizes vary, odd
/// ones among them.
pub fn layouts() -> Vec<KvLayout> {
    let mut layouts = Vec::new();
    let sizes = [(2, 4, 4), (1, 3, 5), (3, 8, 1), (2, 5, 3), (1, 16, 2)];
    for dtype in Dtype::ALL {
        for parts in [KvPlanes::Separate, KvPlanes::Joined, KvPlanes::Latent] {
            for arrangement in [Arrangement::LayerFirst, Arrangement::BlockFirst] {
                for kind in 0..if dtype.is_quantised() { 3 } else { 1 } {
                    let (heads, head_dim, block_tokens) = sizes[layouts.len() % sizes.len()];
                    let heads = if parts == KvPlanes::Latent { 1 } else { heads };
                    let scale = |index: usize| 0.01 * (index + 1) as f32;
                    let scales = match kind {
                        0 => Scales::Unit,
                        1 => Scales::PerTokenHead,
                        _ => Scales::PerHead {
                            k: (0..2 * heads).map(scale).collect(),
                            v: (0..if parts == KvPlanes::Latent { 0 } else { 2 * heads })
                                .map(scale)
                                .collect(),
                        },
                    };
                    let layout =
                        KvLayout::builder().layers(2).kv_heads(heads).head_dim(head_dim).parts(parts);
                    let layout = layout.block_tokens(block_tokens).dtype(dtype).arrangement(arrangement);
                    layouts.push(layout.scales(scales).build().expect("a valid layout"));
                }
            }
        }
    }
    layouts
}

/// Checks the properties that a storage reports of itself.
fn answers(storage: &dyn Storage) {
    assert_eq!(storage.frames(), FRAMES);
    assert!(storage.frames_max() == FRAMES || storage.frames_max() == FRAMES_MAX);
}

/// Returns elements of a type: mostly ordinary numbers, and the special values that conversions get
/// wrong.
pub fn elements(dtype: Dtype, count: usize, rng: &mut Rng) -> crate::scalar::Rows {
    const ODD: [f32; 12] = [
        0.0,
        -0.0,
        f32::NAN,
        f32::INFINITY,
        f32::NEG_INFINITY,
        f32::MIN_POSITIVE,
        1e-44,
        f32::MAX,
        448.0,
        -464.0,
        57344.0,
        0.5,
    ];
    let mut bytes = vec![0; count * dtype.bytes()];
    for element in bytes.chunks_mut(dtype.bytes()) {
        if dtype.is_quantised() {
            element[0] = rng.bits() as u8;
            continue;
        }
        let odd = rng.below(12) == 0;
        let ordinary = (rng.bits() as i32 as f32) * crate::scalar::power_of_two(rng.below(24) as i32 - 44);
        crate::scalar::narrow(dtype, if odd { ODD[rng.below(ODD.len())] } else { ordinary }, element);
    }
    crate::scalar::Rows { dtype, bytes }
}
