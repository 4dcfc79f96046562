//! Capacities of published models.

use kvpool::storage::groups::{GroupId, GroupOptions, LayerCache, LayerGroups, Reach, Row};
use kvpool::{AdmitRequest, Dtype, Pool, SequenceError, SequenceId, Tokens};

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
        ("gemma-4-26b-a4b", 8, 6),
        ("inkling", 16, 6),
        ("mimo-v2-flash", 4, 16),
        ("deepseek-v4-flash", 8, 7),
        ("deepseek-v4-pro", 8, 7),
    ] {
        let config = std::fs::read_to_string(format!("tests/configs/{name}.json")).unwrap();
        let mut options = GroupOptions::new().step_tokens(256);
        options.dtype = name.starts_with("deepseek-v4").then_some(Dtype::Fp8E4M3);
        let model = LayerGroups::from_config(&config, options).unwrap();
        let is_first = |group: &usize| model.groups()[*group].shares_blocks_of().is_none();
        let first = (0..model.groups().len()).filter(is_first);
        assert_eq!(first.map(|group| Pool::layer_lists(&model, GroupId(group)).len()).sum::<usize>(), lists);
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
}

/// Each model has its lists, and groups that share blocks have the same.
#[test]
fn every_model_has_a_list_for_each_frame_of_a_block() {
    for file in std::fs::read_dir("tests/configs").unwrap() {
        let path = file.unwrap().path();
        let config = std::fs::read_to_string(&path).unwrap();
        let model = LayerGroups::from_config(&config, GroupOptions::new()).unwrap();
        let builder = Pool::layered(&model).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        let (mut next, mut states) = (0, 0);
        for (index, group) in model.groups().iter().enumerate() {
            let lists = Pool::layer_lists(&model, GroupId(index));
            if let Some(shared) = group.shares_blocks_of() {
                assert!(
                    lists == Pool::layer_lists(&model, shared) && lists.end <= next,
                    "{}",
                    path.display()
                );
                continue;
            }
            let is_state = group.reach() == Reach::State;
            assert_eq!(lists.len() as u64, if is_state { 0 } else { group.block_frames() });
            assert_eq!(Pool::layer_state(&model, GroupId(index)), is_state.then_some(states));
            assert_eq!(lists.start, next);
            (next, states) = (lists.end, states + usize::from(is_state));
        }
        assert_eq!(builder.windows().len(), next, "{}", path.display());
        // Each layer of a group has a place of its own: of 10 layers in 4 lists, 3 3 3 1.
        let mut seen = std::collections::HashSet::new();
        for layer in 0..model.layers() {
            for (place, of) in Pool::layer_places(&model, layer).into_iter().zip(model.place(layer)) {
                let (group, lists) = (&model.groups()[of.group.0], Pool::layer_lists(&model, of.group));
                assert_eq!((place.group, place.state), (of.group, Pool::layer_state(&model, of.group)));
                assert_eq!(place.list.is_some(), place.state.is_none());
                assert!(place.list.is_none_or(|list| lists.contains(&list)));
                if group.layers().contains(&layer) {
                    assert!(seen.insert(place), "{place:?} in {}", path.display());
                }
            }
        }
        assert!(next <= 32, "{}: {next} lists", path.display());
    }
}

#[test]
fn rings_are_refused_by_name() {
    let cache = |reach| vec![LayerCache { row: Row::bytes(64), reach }];
    let layers = [Reach::All, Reach::Ring { tokens: 64 }].map(cache);
    let model = LayerGroups::of_layers(&layers, GroupOptions::new()).unwrap();
    let error = Pool::layered(&model).map(drop).unwrap_err().to_string();
    assert!(error.contains("Ring { tokens: 64 }") && error.contains("group of layers at index 1"), "{error}");
}

/// A layer that drafts has a list of its own, with entries for the drafts that a step appends.
#[test]
fn drafts_ahead_have_a_list() {
    let cache = |reach| vec![LayerCache { row: Row::bytes(64), reach }];
    let layers = [cache(Reach::All), cache(Reach::Draft { ahead: 3 }), cache(Reach::State)];
    let model = LayerGroups::of_layers(&layers, GroupOptions::new()).unwrap();
    let pool = Pool::layered(&model).unwrap().blocks(100).build().unwrap();
    let mut sequence = pool.admit_grouped(&AdmitRequest::new(SequenceId(1), &[7; 15])).unwrap();
    let mut batch = pool.begin_batch();
    batch.append_grouped(&mut sequence, 15).unwrap();
    let drafted = batch.append_grouped(&mut sequence, Tokens::Draft(3)).unwrap();
    let list = Pool::layer_places(&model, 1)[0].list.unwrap();
    let mut slots = Vec::new();
    batch.slot_mapping(sequence.group(list), drafted.tokens, &mut slots).unwrap();
    batch.finish();
    assert_eq!((slots.len(), sequence.len(), sequence.committed(), sequence.groups()), (3, 18, 15, 2));
    sequence.accept(&[1]).unwrap();
    assert_eq!((sequence.len(), sequence.committed()), (16, 16));
}
