//! The layouts under test: every dtype, part, arrangement and kind of scales, and shapes divisible
//! by 16, by 4, and by neither.

use kvpool::Dtype;
use kvpool::storage::{Arrangement, KvLayout, KvPlanes, Scales};
use kvpool_testkit::rng::Rng;

/// Layers, heads, head dimension, tokens per block.
const SHAPES: [(usize, usize, usize, usize); 6] = [
    (2, 3, 5, 3),    // divisible by neither
    (1, 2, 12, 7),   // codes divisible by 4
    (2, 2, 64, 16),  // eight lanes per head
    (1, 5, 80, 4),   // ten steps on sixteen lanes
    (1, 1, 272, 16), // longer than a warp's step
    (1, 8, 128, 16), // tiles of several pieces in f32
];

/// Returns every layout of every shape.
pub fn layouts() -> Vec<KvLayout> {
    let mut rng = Rng(7);
    let mut layouts = Vec::new();
    for shape in SHAPES {
        for dtype in Dtype::ALL {
            for parts in [KvPlanes::Separate, KvPlanes::Joined, KvPlanes::Latent] {
                for arrangement in [Arrangement::LayerFirst, Arrangement::BlockFirst] {
                    for scales in ["unit", "per head", "dynamic"] {
                        let is_possible = scales == "unit" || dtype.is_quantised();
                        // Unoptimized, the full list would take minutes: takes every fourth at
                        // random, so that every kind occurs.
                        let is_due = !cfg!(debug_assertions) || rng.below(4) == 0;
                        if is_possible && is_due {
                            layouts.push(layout(shape, dtype, parts, arrangement, scales, &mut rng));
                        }
                    }
                }
            }
        }
    }
    layouts
}

fn layout(
    (layers, heads, head_dim, block_tokens): (usize, usize, usize, usize),
    dtype: Dtype,
    parts: KvPlanes,
    arrangement: Arrangement,
    scales: &str,
    rng: &mut Rng,
) -> KvLayout {
    let mut builder = KvLayout::builder().layers(layers).block_tokens(block_tokens).dtype(dtype);
    builder = match parts {
        KvPlanes::Latent => builder.latent(head_dim),
        _ => builder.kv_heads(heads).head_dim(head_dim).parts(parts),
    };
    let (heads, halves) = if parts == KvPlanes::Latent { (1, 1) } else { (heads, 2) };
    let mut table = |count: usize| -> Box<[f32]> {
        // Most are not powers of two, so that the rounding of the inverse matters.
        (0..count).map(|_| (1 + rng.below(1000)) as f32 / 777.0).collect()
    };
    let scales = match scales {
        "per head" => Scales::PerHead { k: table(layers * heads), v: table(layers * heads * (halves - 1)) },
        "dynamic" => Scales::PerTokenHead,
        _ => Scales::Unit,
    };
    builder.arrangement(arrangement).scales(scales).build().expect("a valid layout")
}
