//! Weights from files: a round trip of a random model, and files that do not fit.

use std::path::Path;

use kvpool_engine::config::{ConfigError, ModelConfig};
use kvpool_engine::weights::{Weights, WeightsError, random_tensor};
use safetensors::Dtype;
use safetensors::tensor::{TensorView, serialize_to_file};

const CONFIG: &str = r#"{
    "model_type": "qwen2", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 40, "vocab_size": 64, "rope_theta": 10000.0,
    "rms_norm_eps": 1e-06, "tie_word_embeddings": false, "eos_token_id": [7, 8]
}"#;

/// A tensor as it is written to a file.
struct Tensor {
    name: String,
    shape: Vec<usize>,
    dtype: Dtype,
    bytes: Vec<u8>,
}

/// Returns the tensors of a random model in a type, and the weights that they mean.
fn tensors(config: &ModelConfig, dtype: Dtype) -> (Vec<Tensor>, Weights) {
    let (mut rng, mut tensors) = (fastrand::Rng::with_seed(5), Vec::new());
    let weights = Weights::build::<()>(config, |name, shape| {
        let exact = random_tensor(&mut rng, name, shape);
        let (bytes, elements): (Vec<u8>, Vec<f32>) = match dtype {
            Dtype::BF16 => {
                let rounded: Vec<half::bf16> = exact.into_iter().map(half::bf16::from_f32).collect();
                let bytes = rounded.iter().flat_map(|element| element.to_le_bytes()).collect();
                (bytes, rounded.iter().map(|element| element.to_f32()).collect())
            }
            Dtype::F16 => {
                let rounded: Vec<half::f16> = exact.into_iter().map(half::f16::from_f32).collect();
                let bytes = rounded.iter().flat_map(|element| element.to_le_bytes()).collect();
                (bytes, rounded.iter().map(|element| element.to_f32()).collect())
            }
            _ => (exact.iter().flat_map(|element| element.to_le_bytes()).collect(), exact),
        };
        tensors.push(Tensor { name: name.into(), shape: shape.into(), dtype, bytes });
        Ok(elements)
    });
    (tensors, weights.unwrap())
}

fn write(tensors: &[Tensor], path: &Path) {
    let views = tensors.iter().map(|tensor| {
        let view = TensorView::new(tensor.dtype, tensor.shape.clone(), &tensor.bytes).unwrap();
        (tensor.name.clone(), view)
    });
    serialize_to_file(views, None, path).unwrap();
}

#[test]
fn a_model_is_read_as_it_was_written() {
    let folder = tempfile::tempdir().unwrap();
    let (config_file, file) = (folder.path().join("config.json"), folder.path().join("model.safetensors"));
    std::fs::write(&config_file, CONFIG).unwrap();
    let qwen2 = ModelConfig::read(&config_file).unwrap();
    assert_eq!(qwen2, ModelConfig { end: Some(7), ..ModelConfig::tiny() });
    let llama = CONFIG.replace("qwen2", "llama").replace("false", "true");
    std::fs::write(&config_file, llama).unwrap();
    let llama = ModelConfig::read(&config_file).unwrap();
    assert!(llama.tied && !llama.qkv_bias);
    for config in [qwen2, llama] {
        for dtype in [Dtype::F32, Dtype::F16, Dtype::BF16] {
            let (tensors, weights) = tensors(&config, dtype);
            assert!(tensors.iter().any(|tensor| tensor.name == "model.layers.1.self_attn.q_proj.weight"));
            write(&tensors, &file);
            assert_eq!(Weights::load(&config, &file).unwrap(), weights);
        }
    }
}

#[test]
fn files_that_do_not_fit_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let config = ModelConfig::tiny();
    let refusal = |tensors: &[Tensor]| {
        write(tensors, &file);
        Weights::load(&config, &file).unwrap_err()
    };
    const DOWN: &str = "model.layers.1.mlp.down_proj.weight";
    let (mut all, _) = tensors(&config, Dtype::F32);
    let at = all.iter().position(|tensor| tensor.name == DOWN).unwrap();

    all[at].shape.reverse();
    match refusal(&all) {
        WeightsError::Shape { name, shape, expected } => {
            assert_eq!((&*name, shape, expected), (DOWN, vec![40, 32], vec![32, 40]));
        }
        other => panic!("{other}"),
    }
    all[at].shape.reverse();
    all[at].dtype = Dtype::I32;
    let error = refusal(&all);
    assert!(matches!(&error, WeightsError::Type { name, dtype: Dtype::I32 } if name == DOWN), "{error}");
    all.remove(at);
    let error = refusal(&all);
    assert!(matches!(&error, WeightsError::Missing { name } if name == DOWN), "{error}");
    assert_eq!(error.to_string(), format!("tensor {DOWN} is missing"));

    std::fs::write(&file, b"not a model").unwrap();
    assert!(matches!(Weights::load(&config, &file), Err(WeightsError::Format { .. })));
    let absent = folder.path().join("absent");
    assert!(matches!(Weights::load(&config, &absent), Err(WeightsError::Io { .. })));
}

#[test]
fn configurations_that_do_not_fit_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("config.json");
    let refusal = |from: &str, to: &str| {
        assert!(CONFIG.contains(from));
        std::fs::write(&file, CONFIG.replace(from, to)).unwrap();
        ModelConfig::read(&file).unwrap_err()
    };
    for (from, to, expected) in [
        ("qwen2", "gpt2", "model_type"),
        (r#""num_key_value_heads": 2"#, r#""num_key_value_heads": 3"#, "num_key_value_heads"),
        (r#""hidden_size": 32"#, r#""hidden_size": 0"#, "hidden_size"),
        (r#""num_attention_heads": 4"#, r#""num_attention_heads": 0"#, "num_attention_heads"),
        (r#""hidden_size": 32"#, r#""hidden_size": 32, "head_dim": 7"#, "head_dim"),
        (r#""hidden_size": 32"#, r#""hidden_size": 32, "rope_scaling": {"factor": 8}"#, "rope_scaling"),
    ] {
        let error = refusal(from, to);
        assert!(matches!(&error, ConfigError::Unsupported { field, .. } if *field == expected), "{error}");
    }
    assert!(matches!(refusal(r#""vocab_size": 64,"#, ""), ConfigError::Json { .. }));
    assert!(matches!(refusal("{", ""), ConfigError::Json { .. }));
    assert!(matches!(ModelConfig::read(Path::new("/absent/config.json")), Err(ConfigError::Io { .. })));
}
