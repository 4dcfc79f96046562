//! The hash ids of a prompt, checked.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use super::error::Reason;

/// Returns the ids if a prompt of `input_tokens` tokens can have them, and the tokens that they
/// stand for. The last tokens may be without an id if they are fewer than a block. Ids of blocks
/// that were hashed each by itself are chained, so that equal ids mean equal prefixes.
pub(super) fn checked(
    ids: Option<Vec<u64>>,
    input_tokens: u32,
    hash_tokens: u32,
    is_chained: bool,
) -> Result<(Vec<u64>, u32), Reason> {
    let mut ids = ids.ok_or(Reason::NoHashIds)?;
    let (full, all) = ((input_tokens / hash_tokens) as usize, input_tokens.div_ceil(hash_tokens) as usize);
    if ids.len() != all && ids.len() != full {
        let found = ids.len();
        return Err(Reason::HashIds { found, input: input_tokens, expected: all, size: hash_tokens });
    }
    let hashed_tokens = if ids.len() == all { input_tokens } else { full as u32 * hash_tokens };
    if !is_chained {
        let mut before = 0;
        for id in &mut ids {
            *id = combined(before, *id);
            before = *id;
        }
        return Ok((ids, hashed_tokens));
    }
    let mut places = HashMap::with_capacity(ids.len());
    for (&id, second) in ids.iter().zip(1..) {
        if let Some(first) = places.insert(id, second) {
            return Err(Reason::RepeatedHashId { id, first, second });
        }
    }
    Ok((ids, hashed_tokens))
}

/// Returns an id for a pair, which no other pair has.
pub(super) fn combined(scope: u64, id: u64) -> u64 {
    let mut hasher = DefaultHasher::new();
    (scope, id).hash(&mut hasher);
    hasher.finish()
}
