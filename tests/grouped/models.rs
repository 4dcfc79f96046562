//! Capacities of published models.

use kvpool::storage::groups::{GroupId, GroupOptions, LayerGroups};
use kvpool::{AdmitRequest, Pool, SequenceError, SequenceId};

/// Models whose layers differ, by their configurations: at least as many sequences fit as the
/// arithmetic of [`LayerGroups`] says for steps of 256 tokens.
#[test]
fn models_hold_what_their_layers_need() {
    for (name, gib, lists) in [
        ("gpt-oss-120b", 4, 2),
        ("gemma-4-31b", 16, 11),
        ("gemma-3-27b", 8, 31),
        ("llama-4-scout", 4, 4),
        ("qwen3.5-35b-a3b", 8, 2),
        ("nemotron-3-super-120b", 16, 1),
        ("kimi-k3", 16, 1),
        ("jamba-1.5-mini", 2, 4),
    ] {
        let config = std::fs::read_to_string(format!("tests/configs/{name}.json")).unwrap();
        let model = LayerGroups::from_config(&config, GroupOptions::new().step_tokens(256)).unwrap();
        assert_eq!(
            (0..model.groups().len()).map(|g| Pool::layer_lists(&model, GroupId(g)).len()).sum::<usize>(),
            lists
        );
        for tokens in [600_usize, 4_096, 9_000] {
            let memory = (gib as u64) << 30;
            let blocks = (memory / model.frame_bytes()) as usize;
            let pool = Pool::layered(&model).unwrap().blocks(blocks).threads(1).build().unwrap();
            let (mut open, mut id) = (Vec::new(), 0);
            // Chunks of 256 tokens, so that a window holds little beyond itself.
            let refused = 'full: loop {
                id += 1;
                let prompt: Vec<u32> = vec![0; tokens];
                let request = AdmitRequest::new(SequenceId(id), &prompt).chunk(256);
                let mut sequence = match pool.admit_grouped(&request) {
                    Ok(sequence) => sequence,
                    Err(error) => break error,
                };
                while sequence.len() < tokens {
                    let (mut batch, chunk) = (pool.begin_batch(), (tokens - sequence.len()).min(256));
                    if let Err(error) = batch.append_grouped(&mut sequence, chunk) {
                        break 'full error;
                    }
                    batch.finish();
                }
                open.push(sequence);
            };
            assert!(matches!(refused, SequenceError::Alloc(_)), "{refused}");
            let (held, exact) = (open.len() as f64, model.sequences_in(memory, tokens as u64) as f64);
            println!("{name}: {held} sequences of {tokens} tokens in {gib} GiB; {exact} fit exactly");
            assert!(held >= 0.97 * exact, "{name}: {held} of {exact} sequences of {tokens} tokens");
            open.clear();
            pool.audit().unwrap();
            assert_eq!(pool.stats().used, 0);
        }
    }
    for (name, why) in [("deepseek-v4-flash", "138 frames"), ("mimo-v2-flash", "whole layers")] {
        let config = std::fs::read_to_string(format!("tests/configs/{name}.json")).unwrap();
        let model = LayerGroups::from_config(&config, GroupOptions::new()).unwrap();
        let error = Pool::layered(&model).map(drop).unwrap_err().to_string();
        assert!(error.contains(why) && error.contains("group of layers at index"), "{name}: {error}");
    }
}
