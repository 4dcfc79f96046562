use proptest::collection::vec;
use proptest::prelude::*;

use crate::dtype::Dtype;
use crate::storage::layout::{KvLayout, Scales};

use super::*;

fn reach() -> impl Strategy<Value = Reach> {
    prop_oneof![
        Just(Reach::All),
        (1..300_u64).prop_map(|ratio| Reach::Compressed { ratio }),
        (1..5_000_u64, 0..100_u64).prop_map(|(tokens, sinks)| Reach::Window { tokens, sinks }),
        (1..10_000_u64).prop_map(|tokens| Reach::Chunk { tokens }),
        Just(Reach::State),
        (1..200_u64).prop_map(|tokens| Reach::Ring { tokens }),
        (1..8_u64).prop_map(|ahead| Reach::Draft { ahead }),
    ]
}

fn row() -> impl Strategy<Value = Row> {
    prop_oneof![
        (1..17_u64, 1..513_u64, 0..513_u64).prop_map(|(kv_heads, k_dim, v_dim)| Row::Heads {
            kv_heads,
            k_dim,
            v_dim
        }),
        (1..1_000_u64, 0..200_u64).prop_map(|(elements, side_bytes)| Row::Latent { elements, side_bytes }),
        (1..5_000_000_u64, 0..200_u64).prop_map(|(bytes, side_bytes)| Row::Bytes { bytes, side_bytes }),
    ]
}

fn layers() -> impl Strategy<Value = Vec<Vec<LayerCache>>> {
    let cache = (row(), reach()).prop_map(|(row, reach)| LayerCache { row, reach });
    // A few kinds, repeated.
    (vec(cache, 1..5), vec(vec(any::<prop::sample::Index>(), 0..3), 1..40))
        .prop_map(|(kinds, layers)| {
            let one = |picks: &Vec<prop::sample::Index>| picks.iter().map(|pick| *pick.get(&kinds)).collect();
            layers.iter().map(one).collect()
        })
        .prop_filter("a layer caches", |layers: &Vec<Vec<LayerCache>>| {
            layers.iter().any(|caches| !caches.is_empty())
        })
}

/// Counts the blocks with an entry that is kept, after each step of a token.
fn blocks_by_steps(reach: Reach, block_tokens: u64, tokens: u64) -> u64 {
    let kept = |length: u64, token: u64| match reach {
        Reach::Window { tokens, sinks } => token < sinks || token + tokens >= length,
        Reach::Chunk { tokens } => token / tokens == (length - 1) / tokens,
        _ => true,
    };
    (1..=tokens)
        .map(|length| {
            let blocks = 0..length.div_ceil(block_tokens);
            let holds = |block: &u64| {
                (block * block_tokens..length.min((block + 1) * block_tokens))
                    .any(|token| kept(length, token))
            };
            blocks.filter(holds).count() as u64
        })
        .max()
        .unwrap_or(0)
}

fn cases(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases: if cfg!(miri) { 2 } else { cases },
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(cases(128))]

    #[test]
    fn bytes_are_the_sum_over_groups_and_grow_with_the_tokens(
        layers in layers(), mut lengths in vec(0..200_000_u64, 8),
    ) {
        // A ring of large entries beside small blocks takes a long run.
        let options = GroupOptions::new().segment_frames(1 << 32);
        let groups = LayerGroups::of_layers(&layers, options).unwrap();
        let caches: usize = layers.iter().map(Vec::len).sum();
        let places: usize = (0..layers.len()).map(|layer| groups.place(layer).len()).sum();
        let listed: usize = groups.groups().iter().map(|group| group.layers().len()).sum();
        prop_assert_eq!((places, listed), (caches, caches));
        for layer in 0..layers.len() {
            for place in groups.place(layer) {
                prop_assert_eq!(groups.groups()[place.group.0].layers()[place.plane], layer);
            }
        }
        lengths.sort_unstable();
        let mut before = 0;
        for tokens in lengths {
            let sum: u64 = groups.groups().iter().map(|group| group.blocks_held(tokens) * group.block_bytes()).sum();
            prop_assert_eq!(groups.bytes_held(tokens), sum);
            prop_assert!(sum >= before);
            before = sum;
            let memory = sum * 3 + groups.frame_bytes() - 1;
            let fits = groups.sequences_in(memory, tokens);
            prop_assert_eq!((fits, groups.tokens_in(memory, tokens)), if tokens == 0 { (0, 0) } else { (3, 3 * tokens) });
        }
        for group in groups.groups() {
            prop_assert!(group.packed_bytes() <= group.block_bytes());
            let block = group.block_tokens().unwrap_or(HASH_TOKENS);
            prop_assert!(block.is_multiple_of(HASH_TOKENS) || HASH_TOKENS.is_multiple_of(block), "{}", block);
            // All of a long sequence is bounded by what it keeps, one block more on either side.
            if let Some(most) = group.reach().entries_max() && group.block_tokens().is_some() {
                prop_assert!(group.blocks_held(u64::MAX / 2) * block < most + 4 * block);
            }
        }
    }

    #[test]
    fn blocks_are_those_that_a_sequence_holds_step_by_step(
        reach in reach(), block_log2 in 0..7_u32, tokens in 0..600_u64,
    ) {
        let block = 1 << block_log2;
        let by_steps = blocks_by_steps(reach, block, tokens);
        let held = reach.blocks(tokens, block, 1);
        match reach {
            Reach::State | Reach::Ring { .. } => prop_assert_eq!(held, tokens.min(1)),
            Reach::Draft { ahead } => prop_assert!(held >= by_steps && tokens.min(1) * (tokens + ahead) <= held * block),
            Reach::All | Reach::Compressed { .. } => prop_assert_eq!(held, by_steps),
            Reach::Window { sinks: 0, .. } => prop_assert_eq!(held, by_steps),
            // A block with sinks and a window counts twice; a chunk may begin within a block.
            _ => prop_assert!(by_steps <= held && held <= by_steps + 1, "{} {}", by_steps, held),
        }
    }
}

#[test]
fn a_larger_step_holds_more_of_a_window() {
    let window = Reach::Window { tokens: 128, sinks: 0 };
    assert_eq!([1, 17, 2048].map(|step| window.blocks(100_000, 16, step)), [9, 10, 137]);
    assert_eq!(window.blocks(100, 16, 2048), 7, "no more than the sequence has");
}

#[test]
fn a_layer_that_follows_has_the_place_of_the_other() {
    let row = Row::Latent { elements: 576, side_bytes: 0 };
    let follow = |layer, bytes| LayerCache { row: Row::bytes(bytes), reach: Reach::Follows { layer } };
    let groups = |layers: &[Vec<LayerCache>]| LayerGroups::of_layers(layers, GroupOptions::new());
    let shared = groups(&[vec![LayerCache::all(row)], vec![follow(0, 0)], vec![follow(0, 132)]]).unwrap();
    assert_eq!((shared.place(1), shared.place(2)), (shared.place(0), shared.place(0)));
    let group = &shared.groups()[0];
    assert_eq!((group.layers(), group.entry_bytes()), (&[0][..], 1152 + 132));
    for (layers, layer, target) in [
        (vec![vec![LayerCache::all(row)], vec![follow(2, 0)]], 1, 2),
        (vec![vec![follow(0, 0)]], 0, 0),
        (vec![vec![LayerCache::all(row)], vec![follow(0, 0)], vec![follow(1, 0)]], 2, 1),
    ] {
        assert_eq!(groups(&layers).unwrap_err(), LayersError::Follows { layer, target });
    }
    assert_eq!(groups(&[vec![], vec![]]).unwrap_err(), LayersError::Empty);
    assert_eq!(groups(&[]).unwrap_err(), LayersError::Empty);
}

#[test]
fn numbers_out_of_bounds_are_named() {
    let row = Row::bytes(64);
    let refused = |row, reach| {
        let layers = [vec![], vec![LayerCache { row, reach }]];
        LayerGroups::of_layers(&layers, GroupOptions::new()).unwrap_err().to_string()
    };
    for (reach, field) in [
        (Reach::Window { tokens: 0, sinks: 0 }, "window"),
        (Reach::Window { tokens: 1, sinks: 1 << 40 }, "sinks"),
        (Reach::Chunk { tokens: 0 }, "chunk"),
        (Reach::Ring { tokens: 0 }, "ring"),
        (Reach::Compressed { ratio: 0 }, "ratio"),
        (Reach::Compressed { ratio: 1 << 20 }, "ratio"),
        (Reach::Draft { ahead: 0 }, "tokens ahead"),
    ] {
        let error = refused(row, reach);
        assert!(error.starts_with(&format!("{field} of layer 1 is ")), "{error}");
    }
    for row in [Row::bytes(0), Row::Heads { kv_heads: u64::MAX, k_dim: 2, v_dim: 2 }] {
        assert!(refused(row, Reach::All).starts_with("bytes of an entry of layer 1 is "));
    }
    let layers = [vec![LayerCache::all(row)]];
    for (options, field) in [
        (GroupOptions::new().step_tokens(0), "step_tokens"),
        (GroupOptions::new().segment_frames(0), "segment_frames"),
    ] {
        let error = LayerGroups::of_layers(&layers, options).unwrap_err().to_string();
        assert_eq!(error, format!("{field}: 0 is not from 1 to 4294967296"));
    }
    let many: Vec<_> = (1..40).map(|bytes| vec![LayerCache::all(Row::bytes(bytes))]).collect();
    let error = LayerGroups::of_layers(&many, GroupOptions::new()).unwrap_err().to_string();
    assert_eq!(error, "layer: 32 begins more than 32 groups");
}

#[test]
fn dynamic_scales_of_a_layout_are_counted() {
    let layout = KvLayout::builder().layers(3).kv_heads(4).head_dim(64).dtype(Dtype::Int8);
    let layout = layout.scales(Scales::PerTokenHead).build().unwrap();
    let groups = LayerGroups::of_layout(&layout, GroupOptions::new()).unwrap();
    assert_eq!(groups.bytes_per_token(), layout.bytes_per_token() as f64);
    assert_eq!(groups.frame_bytes(), layout.bytes_per_block() as u64);
}
