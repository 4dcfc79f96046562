//! What a sequence knows of its tokens does not depend on who listens to the cache's events: after
//! every cut, and after a swap, its blocks are found as a naive model says.
#![cfg(not(any(kvpool_loom, miri)))]

use kvpool::prefix::{HashKey, KvEvent, PrefixConfig};
use kvpool::storage::KvLayout;
use kvpool::{Append, Pool, Sequence, SequenceError, SequenceId, Tokens};

const BLOCKS: usize = 200;

fn pool(block_tokens: usize) -> Pool {
    let layout = KvLayout::builder().layers(1).kv_heads(1).head_dim(1).block_tokens(block_tokens);
    let cache = PrefixConfig::new().key(HashKey::from_bytes([5; 32]));
    let builder = Pool::builder(layout.build().unwrap()).blocks(BLOCKS).magazine_blocks(0);
    builder.prefix_cache(cache).build().unwrap()
}

/// How the tokens after a cut are announced.
#[derive(Clone, Copy, Debug)]
enum Way {
    AppendTokens,
    Announce,
    DecodeTokens,
}

impl Way {
    const ALL: [Self; 3] = [Self::AppendTokens, Self::Announce, Self::DecodeTokens];

    fn go_on(self, pool: &Pool, sequence: &mut Sequence, tokens: &[u32]) -> Result<(), String> {
        let mut batch = pool.begin_batch();
        let outcome = match self {
            Self::AppendTokens => batch.append(sequence, tokens).map(drop),
            Self::Announce => {
                sequence.announce(tokens).and_then(|()| batch.append(sequence, tokens.len()).map(drop))
            }
            Self::DecodeTokens => {
                for &token in tokens {
                    batch.step(&mut [Append::new(sequence, &[token])]).map_err(|error| error.to_string())?;
                }
                Ok(())
            }
        };
        batch.finish();
        outcome.map_err(|error| error.to_string())
    }
}

/// A prompt, drafts of which some ids are announced, a cut anywhere, and more tokens: the cut is
/// refused more tokens only if ids of kept tokens are unknown, and all full blocks of known tokens
/// are found.
#[test]
fn tokens_after_every_cut_are_found() {
    let (mut wrong, mut tried, mut number) = (Vec::new(), 0, 0);
    for block_tokens in [1, 2, 3, 4, 16] {
        for is_observed in [false, true] {
            let pool = pool(block_tokens);
            let _events = is_observed.then(|| pool.prefix_cache().unwrap().events().subscribe().unwrap());
            let prompts = [block_tokens, 2 * block_tokens + 1, 3 * block_tokens - 1];
            let drafts = [0, 1, block_tokens, block_tokens + 2];
            for (prompt, drafted) in
                prompts.iter().flat_map(|&prompt| drafts.map(|drafted| (prompt, drafted)))
            {
                for (announced, cut) in (0..=drafted)
                    .flat_map(|announced| (0..=prompt + drafted).map(move |cut| (announced, cut)))
                {
                    for way in Way::ALL {
                        (tried, number) = (tried + 1, number + 1000);
                        let tokens: Vec<u32> = (number..number + 500).collect();
                        let case = format!(
                            "blocks of {block_tokens}, observed: {is_observed}: {prompt} tokens, {drafted} drafted, \
                             {announced} announced, cut to {cut}, {way:?}"
                        );
                        let mut sequence = pool.sequence(SequenceId(1)).tokens(&tokens[..prompt]).unwrap();
                        let mut batch = pool.begin_batch();
                        batch.append(&mut sequence, prompt).unwrap();
                        if drafted > 0 {
                            batch.append(&mut sequence, Tokens::Draft(drafted)).unwrap();
                        }
                        sequence.announce(&tokens[prompt..prompt + announced]).unwrap();
                        batch.finish();
                        sequence.commit(cut).unwrap();
                        sequence.truncate(cut).unwrap();
                        // Other tokens than the drafted ones.
                        let mut all = tokens[..cut].to_vec();
                        all.extend((0..block_tokens as u32 + 2).map(|token| number + 600 + token));
                        let is_known = cut <= prompt + announced;
                        let more = way.go_on(&pool, &mut sequence, &all[cut..]);
                        if more.is_ok() != is_known {
                            wrong.push(format!("{case}: {more:?}"));
                        }
                        let expected = if is_known { all.len() } else { prompt + announced };
                        drop(sequence);
                        all.push(0);
                        let found = pool.sequence(SequenceId(2)).tokens(&all).unwrap().len();
                        if more.is_ok() && found != expected / block_tokens * block_tokens {
                            wrong.push(format!("{case}: found {found} of {expected}"));
                        }
                    }
                }
            }
            assert_eq!(pool.audit().unwrap().owned, 0);
        }
    }
    assert!(wrong.is_empty(), "{} of {tried} combinations, the first: {}", wrong.len(), wrong[0]);
}

/// The ids survive a swap through a pool to which nobody listens.
#[test]
fn tokens_go_on_inside_a_block_after_a_swap() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    for block_tokens in [1, 2, 3, 4, 16] {
        for cut in 0..=3 * block_tokens {
            let (near, far) = (pool(block_tokens), pool(block_tokens));
            let mut tokens: Vec<u32> = (0..3 * block_tokens as u32).collect();
            let mut sequence = near.sequence(SequenceId(1)).tokens(&tokens).unwrap();
            let mut batch = near.begin_batch();
            batch.append(&mut sequence, tokens.len()).unwrap();
            batch.finish();
            let (out, _) = runtime.block_on(near.migrate(sequence, &far).into_future()).unwrap();
            let (mut back, _) = runtime.block_on(far.migrate(out, &near).into_future()).unwrap();
            assert_eq!(back.announced(), tokens.len());
            back.truncate(cut).unwrap();
            tokens.truncate(cut);
            let fresh: Vec<u32> = (0..block_tokens as u32 + 1).map(|token| 900 + token).collect();
            let mut batch = near.begin_batch();
            let appended = batch.append(&mut back, &fresh);
            assert!(
                appended.is_ok(),
                "{cut} of {} tokens in blocks of {block_tokens}: {appended:?}",
                3 * block_tokens
            );
            batch.finish();
            drop(back);
            tokens.extend(fresh);
            tokens.push(1);
            let found = near.sequence(SequenceId(2)).tokens(&tokens).unwrap().len();
            assert_eq!(found, (tokens.len() - 1) / block_tokens * block_tokens, "{cut}, {block_tokens}");
        }
    }
}

/// A subscriber that comes later than a sequence receives the ids of the tokens that are appended
/// from then on, and of all others in their blocks.
#[test]
fn a_late_subscriber_receives_the_tokens_of_blocks() {
    let pool = pool(4);
    let mut sequence = pool.sequence(SequenceId(1)).tokens(&[1, 2, 3, 4, 5]).unwrap();
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, 3).unwrap();
    let mut events = pool.prefix_cache().unwrap().events().subscribe().unwrap();
    batch.append(&mut sequence, 2).unwrap();
    batch.append(&mut sequence, &[6, 7, 8]).unwrap();
    batch.finish();
    let mut stored = Vec::new();
    while let Some(numbered) = events.try_recv() {
        let KvEvent::Stored { tokens, .. } = numbered.event else { panic!("{numbered:?}") };
        stored.push(tokens.to_vec());
    }
    assert_eq!(stored, [vec![1, 2, 3, 4], vec![5, 6, 7, 8]]);
}

/// Known tokens, a cut inside a block, one more token.
#[test]
fn a_cut_inside_a_block_leaves_its_tokens_known() {
    let pool = pool(4);
    let tokens: Vec<u32> = (0..20).collect();
    let mut sequence = pool.sequence(SequenceId(1)).tokens(&tokens).unwrap();
    let mut batch = pool.begin_batch();
    batch.append(&mut sequence, 20).unwrap();
    sequence.truncate(14).unwrap();
    assert_eq!((sequence.announced(), batch.append(&mut sequence, &[7]).map(drop)), (14, Ok(())));
    // Tokens that were never announced are unknown still.
    batch.append(&mut sequence, 1).unwrap();
    let unknown = SequenceError::TokensUnknown { id: SequenceId(1), known: 15 };
    assert_eq!(batch.append(&mut sequence, &[7]), Err(unknown));
}
