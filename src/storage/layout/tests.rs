use super::*;

fn tiny() -> KvLayoutBuilder {
    KvLayout::named_builder("tiny").unwrap()
}

#[test]
fn known_sizes() {
    let qwen = KvLayout::named("qwen2.5-7b").unwrap();
    assert_eq!((qwen.bytes_per_token(), qwen.bytes_per_block()), (56 << 10, 896 << 10));
    let llama = KvLayout::named_builder("llama-3.1-70b").unwrap().tensor_parallel(8).build().unwrap();
    assert_eq!((llama.kv_heads(), llama.kv_heads_total()), (1, 8));
    assert_eq!(llama.bytes_per_token(), 80 * 2 * 128 * 2);
    let deepseek = KvLayout::named_builder("deepseek-v3").unwrap().tensor_parallel(8).build().unwrap();
    assert_eq!(deepseek.bytes_per_token(), 61 * 576 * 2, "a latent plane is not divided");
    assert_eq!(deepseek.planes(10).unwrap().planes.len(), 61);
    for name in KvLayout::names() {
        let layout = KvLayout::named(name).unwrap();
        assert_eq!(layout.packed_bytes(), layout.bytes_per_block(), "{name} needs no padding");
    }
}

#[test]
fn dynamic_scales_are_counted() {
    let layout = tiny().dtype(Dtype::Int8).scales(Scales::PerTokenHead).build().unwrap();
    assert_eq!(layout.bytes_per_token(), 2 * 2 * 2 * (8 + 4));
    assert_eq!(layout.planes(3).unwrap().planes.len(), 8);
}

fn refused(builder: KvLayoutBuilder) -> String {
    builder.build().unwrap_err().to_string()
}

#[test]
fn bad_fields_are_named() {
    let whole = || KvLayout::builder().layers(1).kv_heads(1).head_dim(1);
    for (builder, field) in [
        (whole().layers(0), "layers"),
        (whole().kv_heads(0), "kv_heads"),
        (whole().head_dim(0), "head_dim"),
        (whole().block_tokens(0), "block_tokens"),
        (whole().tensor_parallel(0), "tensor_parallel"),
        (KvLayout::builder(), "layers"),
    ] {
        assert_eq!(refused(builder), format!("{field}: got 0, or nothing, expected at least 1"));
    }
    for (builder, message) in [
        (
            whole().kv_heads(8).tensor_parallel(3),
            "tensor_parallel: got 3 ranks for 8 KV heads, expected a divisor of the heads",
        ),
        (
            whole().kv_heads(4).tensor_parallel(6).replicate_kv_heads(),
            "tensor_parallel: got 6 ranks for 4 KV heads, expected a divisor of the heads",
        ),
        (whole().kv_heads(2).parts(KvPlanes::Latent), "kv_heads: got 2, expected 1, as the layout is latent"),
    ] {
        assert_eq!(refused(builder), message);
    }
    assert_eq!(KvLayout::named("gpt-17").unwrap_err().what, "model");
    assert_eq!(
        "fp7".parse::<Dtype>().unwrap_err().to_string(),
        "element type: got \"fp7\", expected one of f32, f16, bf16, fp8_e4m3, fp8_e5m2, int8"
    );
    for dtype in Dtype::ALL {
        assert_eq!(dtype.to_string().parse(), Ok(dtype));
    }
}

#[test]
fn more_ranks_than_heads_keep_the_same_ones() {
    let whole = || KvLayout::builder().layers(3).kv_heads(2).head_dim(8).tensor_parallel(4);
    let message = refused(whole());
    assert!(message.contains("got 4 ranks for 2 KV heads"), "{message}");
    assert!(message.contains("`replicate_kv_heads`") && message.contains("2 ranks keep each"), "{message}");
    let layout = whole().replicate_kv_heads().build().unwrap();
    assert_eq!((layout.kv_heads(), layout.kv_heads_total(), layout.tensor_parallel()), (1, 2, 4));
    assert_eq!((layout.kv_head_replicas(), layout.bytes_per_token()), (2, 3 * 2 * 8 * 2));
    let one_a_rank = whole().tensor_parallel(2).build().unwrap();
    assert!(layout.packs_as(&one_a_rank), "replication does not change the packed form");
    assert_eq!(one_a_rank.kv_head_replicas(), 1);
    let divided = whole().kv_heads(8).replicate_kv_heads().build().unwrap();
    assert_eq!((divided.kv_heads(), divided.kv_head_replicas()), (2, 1), "the option changes nothing else");
    let latent = whole().latent(8).build().unwrap();
    assert_eq!((latent.kv_heads(), latent.kv_head_replicas()), (1, 4));
    let scales = Scales::PerHead { k: [1.0; 3].into(), v: [1.0; 3].into() };
    let int8 = whole().replicate_kv_heads().dtype(Dtype::Int8).scales(scales);
    assert!(int8.build().is_ok(), "scales are those of this rank's head");
}

#[test]
fn bad_scales_are_named() {
    let scales = |k: &[f32], v: &[f32]| Scales::PerHead { k: k.into(), v: v.into() };
    assert_eq!(
        refused(tiny().scales(Scales::PerTokenHead)),
        "scales: got scales for bf16, expected none, as the type is not quantised"
    );
    let int8 = || tiny().dtype(Dtype::Int8);
    assert!(int8().scales(scales(&[1.0; 4], &[0.5; 4])).build().is_ok());
    assert_eq!(
        refused(int8().scales(scales(&[1.0; 4], &[0.5; 3]))),
        "static scales of v: got 3, expected 4, one for each layer and head"
    );
    for value in [0.0, -1.0, 1e-44, f32::INFINITY, 3e38] {
        let bad = refused(int8().scales(scales(&[1.0, 1.0, 1.0, value], &[0.5; 4])));
        let place = "static scales of k at index 3: got";
        assert!(bad.starts_with(&format!("{place} {value:e} for layer 1, head 1, expected")), "{bad}");
    }
    assert!(int8().scales(scales(&[f32::NAN; 4], &[0.5; 4])).build().is_err());
    let latent = KvLayout::builder().layers(2).latent(8).dtype(Dtype::Fp8E4M3);
    assert!(latent.clone().scales(scales(&[1.0; 2], &[])).build().is_ok());
    assert!(latent.scales(scales(&[1.0; 2], &[1.0; 2])).build().is_err());
}

#[test]
fn absurd_sizes_are_refused() {
    let huge = usize::MAX / 4;
    let whole = || KvLayout::builder().layers(1).kv_heads(1).head_dim(1);
    for builder in [
        whole().layers(huge),
        whole().kv_heads(huge),
        whole().head_dim(huge),
        whole().block_tokens(huge),
        whole().layers(1 << 31).kv_heads(1 << 31).head_dim(1 << 31),
        whole().layers(huge).kv_heads(huge).head_dim(huge).block_tokens(huge),
        whole().dtype(Dtype::Int8).layers(huge).scales(Scales::PerTokenHead),
    ] {
        assert_eq!(builder.build(), Err(too_large("block", "its size")));
    }
    // Within the address space, but with too many planes for a table.
    for layers in [1 << 40, 1 << 32, PLANES_MAX / 2 + 1] {
        assert_eq!(whole().layers(layers).build().unwrap_err().what, "number of planes");
    }
    assert!(whole().layers(PLANES_MAX / 2).build().is_ok());
    for arrangement in [Arrangement::LayerFirst, Arrangement::BlockFirst] {
        let layout = whole().arrangement(arrangement).build().unwrap();
        assert_eq!(layout.planes(usize::MAX / 8).unwrap_err().what, "reservation");
    }
}

#[test]
fn tiles_never_overlap() {
    for arrangement in [Arrangement::LayerFirst, Arrangement::BlockFirst] {
        for parts in [KvPlanes::Separate, KvPlanes::Joined] {
            for (head_dim, block_tokens) in [(8, 4), (3, 1), (5, 7), (128, 16)] {
                let layout = tiny().head_dim(head_dim).block_tokens(block_tokens).dtype(Dtype::Int8);
                let layout = layout.arrangement(arrangement).parts(parts).scales(Scales::PerTokenHead);
                let layout = layout.build().unwrap();
                let table = layout.planes(6).unwrap();
                let mut tiles: Vec<_> = (table.planes.iter())
                    .flat_map(|p| (0..6).map(|f| (p.base + f * p.frame_stride, p.tile_bytes)))
                    .collect();
                tiles.sort_unstable();
                assert!(tiles.windows(2).all(|pair| pair[0].0 + pair[0].1 <= pair[1].0));
                assert!(tiles.iter().all(|tile| tile.0 % TILE_ALIGN == 0));
                assert!(tiles.last().is_some_and(|last| last.0 + last.1 <= table.bytes));
                let packed: usize = table.planes.iter().map(|plane| plane.tile_bytes).sum();
                assert_eq!(packed, layout.packed_bytes());
            }
        }
    }
}

#[test]
fn names_are_known_without_regard_to_case_organisation_and_variant() {
    for (name, known) in [
        ("Qwen/Qwen2.5-0.5B", "qwen2.5-0.5b"),
        ("Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-70B", "llama-3.1-70b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("deepseek-ai/DeepSeek-V2-Lite-Chat", "deepseek-v2-lite"),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek-r1"),
        ("moonshotai/Kimi-K2-Instruct", "kimi-k2"),
    ] {
        assert_eq!(KvLayout::named(name), KvLayout::named(known), "{name}");
    }
    let llama = KvLayout::named("llama-3.1-70b").unwrap();
    assert_eq!(llama.bytes_per_token(), 327_680);
    for name in ["", "-", "qwen2.5", "llama-3.1-8b-4bit", "qwen2.5-7b-", "deepseek-v9", "v3", "é/ü-1"] {
        assert_eq!(KvLayout::named(name).unwrap_err().what, "model", "{name}");
    }
    let error = KvLayout::named("Qwen/Qwen2.5-71B").unwrap_err().to_string();
    assert!(error.contains("the closest first: qwen2.5-7b, qwen2.5-72b, qwen2.5-3b, "), "{error}");
    let error = KvLayout::named(&"lama-3.1-8b".repeat(1000)).unwrap_err();
    assert_eq!(error.what, "model");
}

#[test]
fn layouts_are_described_by_numbers() {
    let numbers = |text: &str| KvLayout::described(text).and_then(KvLayoutBuilder::build);
    assert_eq!(numbers("layers=32,kv-heads=8,head-dim=128"), KvLayout::named("llama-3.1-8b"));
    assert_eq!(numbers("layers=61, latent = 576, dtype=bf16"), KvLayout::named("deepseek-v3"));
    let f8 = numbers("layers=1,kv-heads=1,head-dim=16,dtype=fp8_e4m3").unwrap();
    assert_eq!(f8.dtype(), Dtype::Fp8E4M3);
    for (text, item) in [("layers=2,", ""), ("layers=-2", "layers=-2"), ("layers=2,heads=3", "heads=3")] {
        let error = numbers(text).unwrap_err().to_string();
        assert!(
            error.starts_with(&format!("layout: got {item:?}, expected a part of layers=32,")),
            "{error}"
        );
    }
    for (text, got) in [
        ("layers=2,layers=3,latent=576", "\"layers=3\" beside layers"),
        ("layers=2,kv-heads=2,kv_heads=3,head-dim=8", "\"kv_heads=3\" beside kv-heads"),
        ("layers=2,latent=576,head-dim=64", "\"head-dim=64\" beside latent"),
        ("layers=2,kv-heads=4,latent=64", "\"latent=64\" beside kv-heads"),
    ] {
        assert_eq!(*numbers(text).unwrap_err().got, *got);
    }
    for (text, what) in [("layers=2,kv-heads=1", "head_dim"), ("layers=2,dtype=f64", "element type")] {
        assert_eq!(numbers(text).unwrap_err().what, what);
    }
}
