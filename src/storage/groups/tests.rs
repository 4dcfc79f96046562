use proptest::collection::vec;
use proptest::prelude::*;

use crate::dtype::Dtype;
use crate::storage::layout::{KvLayout, Scales};

use super::options::BLOCK_TOKENS;
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
            let with_blocks = groups.groups().iter().filter(|group| group.shares_blocks_of().is_none());
            let sum: u64 = with_blocks.map(|group| group.blocks_held(tokens) * group.block_bytes()).sum();
            prop_assert_eq!(groups.bytes_held(tokens), sum);
            prop_assert!(sum >= before);
            before = sum;
            let memory = sum * 3 + groups.frame_bytes() - 1;
            let fits = groups.sequences_in(memory, tokens);
            prop_assert_eq!((fits, groups.tokens_in(memory, tokens)), if tokens == 0 { (0, 0) } else { (3, 3 * tokens) });
        }
        for group in groups.groups() {
            prop_assert!(group.packed_bytes() <= group.block_bytes());
            let block = group.block_tokens().unwrap_or(BLOCK_TOKENS);
            prop_assert!(block.is_multiple_of(BLOCK_TOKENS) || BLOCK_TOKENS.is_multiple_of(block), "{}", block);
            // All of a long sequence is bounded by what it keeps, one block more on either side.
            if let Some(most) = group.reach().entries_max() && group.block_tokens().is_some() {
                prop_assert!(group.blocks_held(u64::MAX / 2) * block < most + 4 * block);
            }
        }
    }

    #[test]
    fn frames_hold_whole_layers_of_all_groups_that_share_them(layers in layers()) {
        let groups = LayerGroups::of_layers(&layers, GroupOptions::new().segment_frames(1 << 32)).unwrap();
        let mut widths = vec![Vec::new(); groups.groups().len()];
        for (layer, caches) in layers.iter().enumerate() {
            for (cache, place) in caches.iter().zip(groups.place(layer)) {
                prop_assert_eq!(widths[place.group.0].len(), place.plane);
                widths[place.group.0].push(cache.row.widths(groups.dtype()));
            }
        }
        let mut lists = 0;
        for (first, group) in groups.groups().iter().enumerate() {
            if group.shares_blocks_of().is_some() {
                continue;
            }
            let sharing: Vec<usize> = (first..groups.groups().len())
                .filter(|&other| other == first || groups.groups()[other].shares_blocks_of() == Some(GroupId(first)))
                .collect();
            let of_layer = |of: usize, widths: &[u64; 3], align: u64| -> u64 {
                let of = &groups.groups()[of];
                let entries = of.reach().entries(of.block_tokens().unwrap_or(0));
                widths.iter().map(|width| (width * entries).next_multiple_of(align)).sum()
            };
            // The frame with the most bytes, if there were so many.
            let fullest = |frames: usize| {
                let part = |of: usize, frame: usize| -> u64 {
                    let each = widths[of].len().div_ceil(frames);
                    widths[of].iter().skip(frame * each).take(each).map(|widths| of_layer(of, widths, 16)).sum()
                };
                (0..frames).map(|frame| sharing.iter().map(|&of| part(of, frame)).sum::<u64>()).max().unwrap()
            };
            let (frame, frames) = (groups.frame_bytes(), group.block_frames() as usize);
            if group.block_tokens().is_some() {
                lists += frames;
                prop_assert!(fullest(frames) <= frame, "{} > {} bytes in {} frames", fullest(frames), frame, frames);
                prop_assert!(frames == 1 || fullest(frames - 1) > frame, "{} frames are enough", frames - 1);
            } else {
                prop_assert_eq!(frames as u64, fullest(1).div_ceil(frame));
            }
            let packed: u64 = sharing.iter().flat_map(|&of| widths[of].iter().map(move |widths| of_layer(of, widths, 1))).sum();
            for &of in &sharing {
                let of = &groups.groups()[of];
                prop_assert_eq!(of.packed_bytes(), packed);
                prop_assert_eq!((of.block_tokens(), of.block_frames()), (group.block_tokens(), group.block_frames()));
                prop_assert!((of.waste() - (1.0 - packed as f64 / (frame * frames as u64) as f64)).abs() < 1e-9);
                prop_assert!(of.block_tokens().unwrap_or(0).is_multiple_of(of.reach().ratio()));
                let keeps_all = |reach| matches!(reach, Reach::All | Reach::Compressed { .. });
                prop_assert!(of.reach() == group.reach() || keeps_all(of.reach()) && keeps_all(group.reach()));
            }
        }
        prop_assert!(lists <= 32, "{} lists", lists);
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

/// Returns the block that each group shares, and its tokens and frames.
fn blocks(groups: &LayerGroups) -> Vec<(usize, u64, u64)> {
    let block = |(index, group): (usize, &LayerGroup)| {
        let of = group.shares_blocks_of().map_or(index, |of| of.0);
        (of, group.block_tokens().unwrap_or(0), group.block_frames())
    };
    groups.groups().iter().enumerate().map(block).collect()
}

fn one_of_each(caches: &[(u64, Reach)]) -> LayerGroups {
    let cache = |&(bytes, reach): &(u64, Reach)| LayerCache { row: Row::bytes(bytes), reach };
    LayerGroups::of_layers(&[caches.iter().map(cache).collect()], GroupOptions::new()).unwrap()
}

#[test]
fn groups_that_keep_the_same_tokens_share_blocks() {
    let window = |tokens, sinks| Reach::Window { tokens, sinks };
    let compressed = |ratio| Reach::Compressed { ratio };
    let groups = one_of_each(&[(64, compressed(4)), (64, Reach::All), (64, compressed(128))]);
    assert_eq!(blocks(&groups), [(0, 128, 1), (0, 128, 1), (0, 128, 1)]);
    assert_eq!((groups.frame_bytes(), groups.waste()), (64 * (32 + 128 + 1), 0.0));
    assert_eq!(groups.frames_held(300), 3, "the blocks are counted once");
    assert_eq!(groups.bytes_per_token(), 64.0 * (0.25 + 1.0 + 1.0 / 128.0));
    // No group has blocks of more than 256 tokens because of another.
    let apart = [
        (64, Reach::All),
        (64, compressed(48)),
        (64, compressed(300)),
        (64, compressed(15)),
        (64, compressed(5)),
    ];
    let apart = one_of_each(&apart).groups().iter().map(|of| of.shares_blocks_of()).collect::<Vec<_>>();
    assert_eq!(apart, [None, Some(GroupId(0)), None, Some(GroupId(0)), Some(GroupId(0))]);
    let owners =
        |caches: &[(u64, Reach)]| blocks(&one_of_each(caches)).iter().map(|of| of.0).collect::<Vec<_>>();
    let windows = [
        (64, window(64, 0)),
        (64, window(64, 4)),
        (32, window(64, 4)),
        (32, window(65, 0)),
        (32, window(64, 0)),
    ];
    assert_eq!(owners(&windows), [0, 1, 1, 3, 0]);
    let chunk = |tokens| Reach::Chunk { tokens };
    assert_eq!(
        owners(&[(64, chunk(64)), (32, window(64, 0)), (32, chunk(64)), (16, chunk(32))]),
        [0, 1, 0, 3]
    );
    let alone = |reach| owners(&[(64, reach), (32, reach)]);
    assert_eq!([Reach::State, Reach::Ring { tokens: 64 }, Reach::Draft { ahead: 1 }].map(alone), [[0, 1]; 3]);
}

#[test]
fn layers_with_unequal_columns_are_in_one_frame() {
    let latent = |side_bytes| Row::Latent { elements: 512, side_bytes };
    let window =
        |side_bytes| LayerCache { row: latent(side_bytes), reach: Reach::Window { tokens: 512, sinks: 0 } };
    let layers = |side_bytes| {
        let windows = (0..8).map(|layer| vec![window(if layer % 2 == 0 { 128 } else { side_bytes })]);
        windows
            .chain([vec![LayerCache::all(latent(128))], vec![LayerCache::all(latent(128))]])
            .collect::<Vec<_>>()
    };
    let of = |side_bytes| LayerGroups::of_layers(&layers(side_bytes), GroupOptions::new()).unwrap();
    assert_eq!(blocks(&of(128)), [(0, 16, 4), (1, 16, 1)]);
    let uneven = of(0);
    assert_eq!((uneven.groups()[0].columns()[1].planes, uneven.groups()[0].block_frames()), (4, 1));
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
