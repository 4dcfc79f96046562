use super::*;

fn layout(text: &str) -> Result<KvLayout, String> {
    builder(text)?.build().map_err(|error| error.to_string())
}

#[test]
fn uniform_models_have_the_layouts_of_their_names() {
    for (name, config) in [
        (
            "Qwen/Qwen2.5-0.5B",
            r#"{"model_type": "qwen2", "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
                "hidden_size": 896, "torch_dtype": "bfloat16", "max_window_layers": 24, "sliding_window": 32768,
                "use_sliding_window": false}"#,
        ),
        (
            "Qwen/Qwen3-8B",
            r#"{"model_type": "qwen3", "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
                "head_dim": 128, "hidden_size": 4096, "dtype": "bfloat16", "torch_dtype": null,
                "layer_types": ["full_attention", "full_attention"]}"#,
        ),
        (
            "facebook/opt-125m",
            "\u{feff}{\"num_hidden_layers\": 12, \"num_attention_heads\": 12, \"hidden_size\": 768, \"kv_lora_rank\": 0, \
             \"qk_rope_head_dim\": 64}",
        ),
        (
            "deepseek-ai/DeepSeek-V3-0324",
            r#"{"model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128,
                "num_key_value_heads": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "torch_dtype": "bfloat16"}"#,
        ),
        (
            "mistralai/Mistral-Small-24B-Instruct-2501",
            r#"{"model_type": "mistral3", "torch_dtype": "bfloat16", "vision_config": {"num_hidden_layers": 24},
                "text_config": {"num_hidden_layers": 40, "num_key_value_heads": 8, "num_attention_heads": 32,
                "head_dim": 128, "hidden_size": 5120, "sliding_window": null}}"#,
        ),
        (
            "MiniMaxAI/MiniMax-M2",
            r#"{"model_type": "minimax_m2", "num_hidden_layers": 62, "num_key_value_heads": 8, "head_dim": 128,
                "attn_type_list": [1, 1, 1]}"#,
        ),
    ] {
        assert_eq!(layout(config), Ok(KvLayout::named(name).unwrap()), "{name}");
    }
    let f16 = layout(
        r#"{"num_hidden_layers": 2, "num_key_value_heads": 3, "head_dim": 8, "torch_dtype": "float16"}"#,
    );
    let numbers = KvLayout::described("layers=2, kv_heads=3, head-dim=8, dtype=f16").unwrap();
    assert_eq!(f16, Ok(numbers.build().unwrap()));
}

#[test]
fn models_with_other_state_are_refused() {
    for (config, by) in [
        (
            r#""layer_types": ["full_attention", "sliding_attention"]"#,
            "layer types full_attention, sliding_attention",
        ),
        (r#""layer_types": ["linear_attention"]"#, "layer types linear_attention"),
        (r#""layers_block_type": ["mamba", "attention"]"#, "layer types attention, mamba"),
        (r#""model_type": "gemma3_text", "sliding_window": 1024"#, "model_type gemma3_text"),
        (r#""use_sliding_window": true, "max_window_layers": 28"#, "use_sliding_window"),
        (r#""hybrid_override_pattern": "M-M*""#, "hybrid_override_pattern"),
        (r#""index_topk": 2048, "kv_lora_rank": 512"#, "index_topk"),
        (r#""full_attention_interval": 4"#, "full_attention_interval"),
        (r#""attn_type_list": [0, 0, 1]"#, "attn_type_list"),
        (r#""text_config": {"attention_chunk_size": 8192}"#, "attention_chunk_size"),
    ] {
        let error = layout(&format!("{{\"num_hidden_layers\": 2, {config}}}")).unwrap_err();
        assert!(error.starts_with(&format!("the layers of this model differ ({by}), and")), "{error}");
    }
}

#[test]
fn incomplete_configurations_are_named() {
    for (config, reason) in [
        ("{", "EOF while parsing"),
        ("[]", "invalid type"),
        ("{}", "it has no num_hidden_layers"),
        (r#"{"num_hidden_layers": "2"}"#, "num_hidden_layers: invalid type: string"),
        (r#"{"num_hidden_layers": -2}"#, "num_hidden_layers: invalid value: integer `-2`"),
        (r#"{"num_hidden_layers": 2, "num_key_value_heads": [1, 2]}"#, "num_key_value_heads: invalid type"),
        (r#"{"num_hidden_layers": 2, "layer_types": {}}"#, "layer_types: invalid type: map"),
        (
            r#"{"llm_config": {"num_hidden_layers": 2}}"#,
            "it has no num_hidden_layers, but llm_config in it has: save that as a file",
        ),
        (
            r#"{"num_hidden_layers": 2, "num_attention_heads": 7, "hidden_size": 500}"#,
            "it has no head_dim, and hidden_size 500 is no multiple of 7 heads",
        ),
        (r#"{"num_hidden_layers": 2}"#, "it has no num_key_value_heads"),
        (r#"{"num_hidden_layers": 2, "num_key_value_heads": 2}"#, "it has no head_dim"),
        (r#"{"num_hidden_layers": 2, "num_attention_heads": 0, "hidden_size": 8}"#, "it has no head_dim"),
        (r#"{"num_hidden_layers": 2, "kv_lora_rank": 2}"#, "it has no qk_rope_head_dim"),
        (
            r#"{"num_hidden_layers": 2, "multi_query": true, "num_kv_heads": 71}"#,
            "multi_query: not supported",
        ),
        (r#"{"num_hidden_layers": 2, "kv_lora_rank": 18446744073709551615, "qk_rope_head_dim": 9}"#, ""),
        (
            r#"{"num_hidden_layers": 2, "torch_dtype": "float64"}"#,
            "torch_dtype: K and V of dtype \"float64\"",
        ),
    ] {
        let error = layout(config).unwrap_err();
        assert!(error.starts_with(reason), "{error}");
    }
    let missing = KvLayout::described("no/such/config.json").err().unwrap().to_string();
    assert!(missing.starts_with("layout: got no/such/config.json: No such file"), "{missing}");
    let folder = env!("CARGO_MANIFEST_DIR");
    let error = KvLayout::described(folder).err().unwrap().to_string();
    assert!(error.starts_with(&format!("layout: got {folder}: a folder without config.json,")), "{error}");
}
