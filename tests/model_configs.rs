//! Groups of layers from the configurations of `tests/configs`, which have the public shapes of
//! models, with the fields from which a shape is known and no others. The expected numbers are
//! products of these shapes.

use std::path::PathBuf;

use kvpool::storage::groups::{DraftLayers, GroupOptions, LayerGroup, LayerGroups, LayersError, Reach};
use kvpool::{Dtype, KvLayout};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

/// What is expected of a group: its reach, number of layers, and bytes of an entry in all of them.
type Expected = (Reach, usize, u64);

const ALL: Reach = Reach::All;
const STATE: Reach = Reach::State;

const fn window(tokens: u64) -> Reach {
    Reach::Window { tokens, sinks: 0 }
}

const fn compressed(ratio: u64) -> Reach {
    Reach::Compressed { ratio }
}

/// Name, groups, bytes per token of growth, and fixed bytes per sequence in tenths of a MiB.
const MODELS: &[(&str, &[Expected], f64, u64)] = &[
    ("llama-3.1-70b", &[(ALL, 80, 80 * 4096)], 327_680.0, 0),
    ("gemma-3-27b", &[(window(1024), 52, 52 * 8192), (ALL, 10, 10 * 8192)], 81_920.0, 4_160),
    ("gemma-4-26b-a4b", &[(window(1024), 25, 25 * 8192), (ALL, 5, 5 * 4096)], 20_480.0, 2_000),
    ("gemma-4-31b", &[(window(1024), 50, 50 * 16_384), (ALL, 10, 10 * 8192)], 81_920.0, 8_000),
    ("gpt-oss-120b", &[(window(128), 18, 18 * 2048), (ALL, 18, 18 * 2048)], 36_864.0, 45),
    (
        "llama-4-scout",
        &[(Reach::Chunk { tokens: 8192 }, 36, 36 * 4096), (ALL, 12, 12 * 4096)],
        49_152.0,
        11_520,
    ),
    ("mimo-v2-flash", &[(ALL, 9, 9 * 2560), (window(128), 39, 39 * 5120)], 23_040.0, 244),
    ("inkling", &[(ALL, 11, 11 * 4096), (window(512), 55, 55 * 8192)], 45_056.0, 2_200),
    ("qwen3-next-80b", &[(STATE, 36, 36 * 1_097_728), (ALL, 12, 12 * 2048)], 24_576.0, 377),
    ("qwen3.5-27b", &[(STATE, 48, 48 * 3_207_168), (ALL, 16, 16 * 4096)], 65_536.0, 1_468),
    ("qwen3.5-35b-a3b", &[(STATE, 30, 30 * 2_146_304), (ALL, 10, 10 * 2048)], 20_480.0, 614),
    ("qwen3.5-397b-a17b", &[(STATE, 45, 45 * 4_268_032), (ALL, 15, 15 * 2048)], 30_720.0, 1_832),
    ("nemotron-3-nano-30b", &[(STATE, 23, 23 * 2_134_016), (ALL, 6, 6 * 1024)], 6_144.0, 468),
    ("nemotron-3-super-120b", &[(STATE, 40, 40 * 4_255_744), (ALL, 8, 8 * 1024)], 8_192.0, 1_623),
    ("nemotron-3-ultra-550b", &[(STATE, 48, 48 * 8_499_200), (ALL, 12, 12 * 1024)], 12_288.0, 3_891),
    ("kimi-linear-48b", &[(STATE, 20, 20 * 2_170_880), (ALL, 7, 7 * 1152)], 8_064.0, 414),
    ("kimi-k3", &[(STATE, 69, 69 * 6_512_640), (ALL, 24, 24 * 1152)], 27_648.0, 4_286),
    ("glm-5.3-flash", &[(STATE, 34, 34 * 4_341_760), (ALL, 11, 11 * 1152)], 12_672.0, 1_408),
    ("jamba-1.5-mini", &[(STATE, 28, 28 * 311_296), (ALL, 4, 4 * 4096)], 16_384.0, 83),
];

/// The same in 8 bits, with the index and the states that these models keep.
const MODELS_FP8: &[(&str, &[Expected], f64, u64)] = &[
    ("deepseek-v3.2", &[(ALL, 61, 61 * (656 + 132))], 48_068.0, 0),
    ("glm-5.2", &[(ALL, 78, 78 * 656 + 21 * 132)], 53_940.0, 0),
    (
        "deepseek-v4-flash",
        &[
            (window(128), 43, 43 * 584),
            (compressed(4), 21, 21 * (584 + 132)),
            (window(8), 21, 21 * (8192 + 2048)),
            (compressed(128), 20, 20 * 584),
            (window(128), 20, 20 * 4096),
        ],
        3_850.25,
        147,
    ),
    (
        "deepseek-v4-pro",
        &[
            (window(128), 61, 61 * 584),
            (compressed(128), 31, 31 * 584),
            (window(128), 31, 31 * 4096),
            (compressed(4), 30, 30 * (584 + 132)),
            (window(8), 30, 30 * (8192 + 2048)),
        ],
        5_511.437_5,
        222,
    ),
];

fn path(name: &str) -> PathBuf {
    [env!("CARGO_MANIFEST_DIR"), "tests/configs", &format!("{name}.json")].iter().collect()
}

fn text(name: &str) -> String {
    std::fs::read_to_string(path(name)).unwrap()
}

fn groups(name: &str, options: GroupOptions) -> LayerGroups {
    LayerGroups::from_config(&text(name), options).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn models() -> impl Iterator<Item = (&'static str, &'static [Expected], f64, u64, GroupOptions)> {
    let of = |models: &'static [(&'static str, &'static [Expected], f64, u64)], options| {
        models.iter().map(move |&(name, groups, growth, fixed)| (name, groups, growth, fixed, options))
    };
    let options = GroupOptions::new();
    of(MODELS, options).chain(of(MODELS_FP8, options.dtype(Dtype::Fp8E4M3)))
}

#[test]
fn every_configuration_has_the_groups_of_its_model() {
    for (name, expected, growth, fixed, options) in models() {
        let groups = groups(name, options);
        let of = |group: &LayerGroup| (group.reach(), group.layers().len(), group.entry_bytes());
        assert_eq!(groups.groups().iter().map(of).collect::<Vec<_>>(), expected, "{name}");
        assert_eq!(groups.bytes_per_token(), growth, "{name}");
        let tenths = (groups.fixed_bytes() as f64 / (1 << 20) as f64 * 10.0).round() as u64;
        assert_eq!(tenths, fixed, "{name}: {} bytes", groups.fixed_bytes());
    }
    assert_eq!(models().count(), std::fs::read_dir(path("x").parent().unwrap()).unwrap().count());
}

/// Writes a number with commas, and with decimals unless these are zeros.
fn count(number: f64, decimals: usize) -> String {
    let text = format!("{number:.decimals$}");
    let (whole, rest) = text.split_once('.').unwrap_or((&text, ""));
    let digits = whole.as_bytes().rchunks(3).rev().map(|three| std::str::from_utf8(three).unwrap());
    let rest = rest.trim_end_matches('0');
    let point = if rest.is_empty() { "" } else { "." };
    format!("{}{point}{rest}", digits.collect::<Vec<_>>().join(","))
}

#[test]
fn the_table_of_the_docs_has_these_numbers() {
    let page = include_str!("../docs/hybrid.md");
    let mut rows = 0;
    for (name, .., options) in models() {
        let Some(row) = page.lines().find(|line| line.starts_with(&format!("| {name} |"))) else { continue };
        let groups = groups(name, options);
        let keeps = |group: &LayerGroup| match group.reach() {
            Reach::All => "all".to_owned(),
            Reach::State => "state".to_owned(),
            Reach::Window { tokens, .. } => format!("window {}", count(tokens as f64, 0)),
            Reach::Chunk { tokens } => format!("chunk {}", count(tokens as f64, 0)),
            Reach::Compressed { ratio } => format!("1 in {ratio}"),
            other => panic!("{other:?}"),
        };
        let kinds: Vec<_> = groups
            .groups()
            .iter()
            .map(|group| format!("{} x {}", group.layers().len(), keeps(group)))
            .collect();
        let fixed = groups.fixed_bytes() as f64 / (1 << 20) as f64;
        let expected = [
            kinds.join(" · "),
            count(groups.frame_bytes() as f64, 0),
            format!("{:.2} %", 100.0 * groups.waste()),
            count(groups.bytes_per_token(), 2),
            format!("{}.{}", count(fixed.trunc(), 0), ((fixed.fract() * 10.0).round())),
            count(groups.sequences_in(40 << 30, 32_768) as f64, 0),
        ];
        assert_eq!(row, format!("| {name} | {} |", expected.join(" | ")));
        rows += 1;
    }
    assert_eq!(rows, 9);
}

#[test]
fn padding_is_within_one_part_in_a_hundred_where_that_is_possible() {
    for (name, .., options) in models() {
        let groups = groups(name, options);
        // Five widths, of layers in numbers that have no common divisor.
        let most = if name.starts_with("deepseek-v4") { 0.15 } else { 0.01 };
        assert!(groups.waste() <= most, "{name}: {}", groups.waste());
        for group in groups.groups() {
            assert!(group.block_frames() <= options.segment_frames, "{name}");
            assert_eq!(group.block_bytes(), group.block_frames() * groups.frame_bytes(), "{name}");
            assert!(group.packed_bytes() <= group.block_bytes(), "{name}");
        }
    }
}

/// Models of which frames hold whole layers only in blocks of unequal tokens, or with several
/// groups in a block: the frame, and the group of the block, its tokens and frames by group.
#[test]
fn frames_hold_whole_layers() {
    for (name, frame, blocks) in [
        ("gemma-4-26b-a4b", 655_360, &[(0, 16, 5), (1, 32, 1)][..]),
        ("mimo-v2-flash", 245_760, &[(0, 32, 3), (1, 16, 13)]),
        ("inkling", 1_441_792, &[(0, 32, 1), (1, 16, 5)]),
        ("deepseek-v4-flash", 492_992, &[(0, 16, 4), (1, 128, 1), (2, 4, 2), (1, 128, 1), (0, 16, 4)]),
        ("deepseek-v4-pro", 705_712, &[(0, 16, 4), (1, 128, 1), (0, 16, 4), (1, 128, 1), (4, 4, 2)]),
    ] {
        let (.., options) = models().find(|model| model.0 == name).unwrap();
        let groups = groups(name, options);
        let block = |(index, group): (usize, &LayerGroup)| {
            let of = group.shares_blocks_of().map_or(index, |of| of.0);
            (of, group.block_tokens().unwrap(), group.block_frames())
        };
        assert_eq!(groups.groups().iter().enumerate().map(block).collect::<Vec<_>>(), blocks, "{name}");
        assert_eq!(groups.frame_bytes(), frame, "{name}");
    }
}

#[test]
fn compressed_tokens_in_16_bits_are_not_scaled() {
    // 9.62 GiB for 2^20 tokens, the published figure.
    let pro = groups("deepseek-v4-pro", GroupOptions::new());
    assert_eq!(pro.bytes_per_token(), 9_848.0);
    // A key of an index has 8 bits beside latent vectors of 16.
    let glm = groups("glm-5.2", GroupOptions::new());
    assert_eq!(glm.bytes_per_token(), f64::from(78 * 1152 + 21 * 132));
}

#[test]
fn a_layer_has_a_place_in_each_of_its_groups() {
    let places = |name: &str, layer: usize| {
        let groups = groups(name, GroupOptions::new());
        groups.place(layer).iter().map(|place| (place.group.0, place.plane)).collect::<Vec<_>>()
    };
    assert_eq!(places("gemma-3-27b", 4), [(0, 4)]);
    assert_eq!(places("gemma-3-27b", 11), [(1, 1)]);
    assert_eq!(places("gemma-3-27b", 62), []);
    assert_eq!(places("nemotron-3-nano-30b", 1), [], "experts cache nothing");
    assert_eq!(places("deepseek-v4-flash", 0), [(0, 0)]);
    assert_eq!(places("deepseek-v4-flash", 4), [(0, 4), (1, 1), (2, 1)]);
    let shared =
        text("gemma-4-26b-a4b").replace("\"num_kv_shared_layers\": 0", "\"num_kv_shared_layers\": 10");
    let groups = LayerGroups::from_config(&shared, GroupOptions::new()).unwrap();
    assert_eq!(groups.groups()[0].layers().len(), 17);
    // The last of each kind before layer 20: 19 is a window, 17 is full.
    assert_eq!((groups.place(20), groups.place(29)), (groups.place(19), groups.place(17)));
}

#[test]
fn draft_layers_are_included_on_request() {
    let with_drafts = GroupOptions::new().drafts(DraftLayers::Included);
    let qwen = groups("qwen3.5-27b", with_drafts);
    assert_eq!(qwen.groups()[2].reach(), Reach::Draft { ahead: 1 });
    assert_eq!((qwen.layers(), qwen.bytes_per_token()), (65, 17.0 * 4096.0));
    let flash = groups("deepseek-v4-flash", with_drafts);
    assert_eq!((flash.layers(), flash.groups()[0].layers().len()), (44, 44));
    let glm = groups("glm-5.2", with_drafts.dtype(Dtype::Fp8E4M3));
    assert_eq!(glm.groups()[1].entry_bytes(), 656 + 132);
}

#[test]
fn layers_that_are_alike_have_one_frame_per_block() {
    let uniform = groups("llama-3.1-70b", GroupOptions::new());
    let layout = KvLayout::described(path("llama-3.1-70b").to_str().unwrap()).unwrap().build().unwrap();
    assert_eq!(layout, KvLayout::named("llama-3.1-70b").unwrap());
    for name in KvLayout::names() {
        let layout = KvLayout::named_builder(name).unwrap().block_tokens(16).build().unwrap();
        let groups = LayerGroups::described(name, GroupOptions::new()).unwrap();
        let [group] = groups.groups() else { panic!("{name}: {groups:?}") };
        assert_eq!((group.block_frames(), group.block_tokens()), (1, Some(16)), "{name}");
        assert_eq!(groups.frame_bytes(), layout.bytes_per_block() as u64, "{name}");
        assert_eq!(group.packed_bytes(), layout.packed_bytes() as u64, "{name}");
    }
    assert_eq!(uniform.frame_bytes(), layout.bytes_per_block() as u64);
}

#[test]
fn other_fields_tell_kinds_too() {
    let counts = |fields: &str| {
        let json = format!(
            "{{\"num_hidden_layers\": 8, \"num_key_value_heads\": 2, \"head_dim\": 64, \"sliding_window\": 32, {fields}}}"
        );
        let groups = LayerGroups::from_config(&json, GroupOptions::new()).unwrap();
        let kind = |group: &LayerGroup| match group.reach() {
            Reach::All => ("all", group.layers().to_vec()),
            Reach::Window { tokens: 32, sinks: 0 } => ("window", group.layers().to_vec()),
            other => panic!("{other:?}"),
        };
        groups.groups().iter().map(kind).collect::<Vec<_>>()
    };
    let every = |full: &[usize]| {
        let is_full = |layer: &usize| full.contains(layer);
        vec![("window", (0..8).filter(|layer| !is_full(layer)).collect::<Vec<_>>()), ("all", full.to_vec())]
    };
    assert_eq!(counts(r#""model_type": "gemma2""#), every(&[1, 3, 5, 7]));
    assert_eq!(counts(r#""model_type": "cohere2""#), every(&[3, 7]));
    assert_eq!(counts(r#""sliding_window_pattern": "LLLG""#), every(&[3, 7]));
    assert_eq!(counts(r#""model_type": "mistral""#), [("window", (0..8).collect())]);
    assert_eq!(counts(r#""use_sliding_window": false"#), [("all", (0..8).collect())]);
    let late = counts(r#""use_sliding_window": true, "max_window_layers": 6"#);
    assert_eq!(late, [("all", (0..6).collect()), ("window", vec![6, 7])]);
}

#[test]
fn what_is_not_known_is_refused_by_name() {
    let refused = |fields: &str| {
        let json =
            format!("{{\"num_hidden_layers\": 4, \"num_key_value_heads\": 2, \"head_dim\": 64, {fields}}}");
        LayerGroups::from_config(&json, GroupOptions::new()).unwrap_err().to_string()
    };
    for (fields, error) in [
        (
            r#""layer_types": ["full_attention", "conv", "conv", "full_attention"]"#,
            "layer_types: the kind \"conv\" of layer 1 is not known",
        ),
        (r#""layer_types": ["full_attention"]"#, "layer_types has 1 entries, and the model has 4 layers"),
        (
            r#""hybrid_override_pattern": "M*?-""#,
            "hybrid_override_pattern: the kind \"?\" of layer 2 is not known",
        ),
        (
            r#""hybrid_override_pattern": "M*""#,
            "hybrid_override_pattern has 2 entries, and the model has 4 layers",
        ),
        (r#""hybrid_override_pattern": "----""#, "no layer caches anything"),
        (
            r#""hybrid_layer_pattern": [0, 1, 2, 1]"#,
            "hybrid_layer_pattern: the kind \"2\" of layer 2 is not known",
        ),
        (r#""compress_ratios": [4, 4]"#, "compress_ratios has 2 entries, and the model has 4 layers"),
        (
            r#""compress_ratios": [4, 4, 4, 4, 0, 0]"#,
            "compress_ratios has 6 entries, and the model has 4 layers",
        ),
        (
            r#""kv_lora_rank": 8, "qk_rope_head_dim": 8, "index_head_dim": 8, "indexer_types": ["full", "x", "full", "full"]"#,
            "indexer_types: the kind \"x\" of layer 1 is not known",
        ),
        (
            r#""linear_attn_config": {"full_attn_layers": [4, 5]}"#,
            "linear_attn_config.full_attn_layers names layer 5, and the model has 4, from 1",
        ),
        (
            r#""linear_attn_config": {"full_attn_layers": [0]}"#,
            "linear_attn_config.full_attn_layers names layer 0, and the model has 4, from 1",
        ),
        (
            r#""num_kv_shared_layers": 4"#,
            "num_kv_shared_layers: layer 0 finds no layer of its kind with a cache",
        ),
        (r#""num_kv_shared_layers": 5"#, "num_kv_shared_layers names layer 5, and the model has 4, from 1"),
        (r#""sliding_window": 0"#, "window of layer 0 is 0, expected 1 to 4294967296"),
        (r#""attention_chunk_size": 0"#, "chunk of layer 0 is 0, expected 1 to 4294967296"),
        (r#""full_attention_interval": 0"#, "full_attention_interval: it is not a number of layers"),
        (r#""attn_layer_period": 0"#, "attn_layer_period: it is not a number of layers"),
        (
            r#""sliding_window_pattern": "LX""#,
            "sliding_window_pattern: the kind \"X\" of layer 1 is not known",
        ),
        (r#""sliding_window_pattern": [1]"#, "sliding_window_pattern: it is not a number of layers"),
        (
            r#""layer_types": ["sliding_attention", "a", "b", "c"]"#,
            "layer_types: the kind \"a\" of layer 1 is not known",
        ),
        (r#""full_attention_interval": 4"#, "it has no linear_key_head_dim"),
        (r#""attn_layer_period": 4"#, "it has no conv_kernel"),
        (r#""model_type": "gpt_oss""#, "it has no layer_types"),
        (r#""mamba_d_state": 16"#, "mamba_d_state: no field says which layers have this state"),
        (
            r#""cross_attention_layers": [3]"#,
            "cross_attention_layers: the layers that it describes are not known",
        ),
        (r#""hybrid_layer_ids": [3]"#, "hybrid_layer_ids: the layers that it describes are not known"),
        (
            r#""attn_type_list": [1, 0, 1, 1]"#,
            "attn_type_list: the states of its linear attention are not known",
        ),
        (r#""index_topk": 4"#, "it has no index_head_dim"),
        (r#""torch_dtype": "float64""#, "torch_dtype: K and V of dtype \"float64\" are not supported"),
        (r#""num_hidden_layers": 100000"#, "num_hidden_layers: 100000 is more than 65536"),
        (r#""num_key_value_heads": 0"#, "bytes of an entry of layer 0 is 0, expected 1 to 4294967296"),
        (
            r#""head_dim": 9999999999999"#,
            "bytes of an entry of layer 0 is 39999999999996, expected 1 to 4294967296",
        ),
    ] {
        assert_eq!(refused(fields), error, "{fields}");
    }
    let long = LayerGroups::from_config(&text("kimi-k3"), GroupOptions::new().segment_frames(8));
    let long = long.unwrap_err();
    assert!(matches!(long, LayersError::BlockTooLarge { group: 0, .. }), "{long}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any value of any field is counted or refused.
    #[test]
    fn no_configuration_panics(
        fields in vec((select(FIELDS), select(VALUES)), 0..12), layers in select(&[0, 1, 4, 300][..]), drafts: bool,
    ) {
        let mut json = format!("\"num_hidden_layers\": {layers}, \"head_dim\": 64, \"num_key_value_heads\": 2");
        for (field, value) in fields {
            json += &format!(", \"{field}\": {value}");
        }
        let drafts = if drafts { DraftLayers::Included } else { DraftLayers::Omitted };
        for dtype in [Dtype::Bf16, Dtype::Int8] {
            let options = GroupOptions::new().drafts(drafts).dtype(dtype);
            if let Ok(groups) = LayerGroups::from_config(&format!("{{{json}}}"), options) {
                prop_assert!((0.0..1.0).contains(&groups.waste()));
                prop_assert!(groups.bytes_held(u64::MAX) >= groups.bytes_held(1));
            }
        }
    }
}

const FIELDS: &[&str] = &[
    "num_hidden_layers",
    "num_key_value_heads",
    "head_dim",
    "v_head_dim",
    "hidden_size",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "sliding_window",
    "attention_chunk_size",
    "layer_types",
    "layers_block_type",
    "hybrid_override_pattern",
    "hybrid_layer_pattern",
    "linear_attn_config",
    "full_attention_interval",
    "attn_layer_period",
    "attn_layer_offset",
    "no_rope_layers",
    "no_rope_layer_interval",
    "sliding_window_pattern",
    "use_sliding_window",
    "max_window_layers",
    "compress_ratios",
    "index_head_dim",
    "indexer_types",
    "num_kv_shared_layers",
    "num_nextn_predict_layers",
    "mamba_num_heads",
    "mamba_head_dim",
    "ssm_state_size",
    "n_groups",
    "conv_kernel",
    "mamba_expand",
    "linear_num_key_heads",
    "linear_key_head_dim",
    "linear_num_value_heads",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
    "mamba_ssm_dtype",
    "torch_dtype",
];

const VALUES: &[&str] = &[
    "0",
    "1",
    "3",
    "64",
    "4294967296",
    "18446744073709551615",
    "-1",
    "1.5",
    "null",
    "true",
    "false",
    "\"M*E-\"",
    "\"LLLG\"",
    "\"\"",
    "\"float32\"",
    "[]",
    "[0, 1, 1, 0]",
    "[4, 128, 0, 3]",
    "[4, 4, 4, 4, 0]",
    "[\"full_attention\", \"sliding_attention\", \"mamba\", \"moe\"]",
    "[\"full\", \"shared\", \"full\", \"full\"]",
    "{\"full_attn_layers\": [1, 4], \"num_heads\": 4, \"head_dim\": 64, \"short_conv_kernel_size\": 0}",
];

#[test]
fn a_layout_of_differing_layers_is_refused_with_a_hint() {
    let error = KvLayout::described(path("gemma-4-31b").to_str().unwrap()).unwrap_err().to_string();
    assert!(error.contains("`kvpool layout` prints its groups of layers"), "{error}");
}
