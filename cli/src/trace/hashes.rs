//! The hash ids of a prompt, checked.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};

use serde_json::value::RawValue;

use super::error::Reason;
use super::{HashIds, ReadOptions};

/// What the ids of a trace stand for.
#[derive(Clone, Copy)]
pub(super) struct Hashing {
    /// Tokens of a block.
    pub tokens: u32,
    /// The start of a chain of ids that mean blocks by themselves, or prompts of one session only;
    /// `None` if equal ids mean equal prefixes.
    pub chain: Option<u64>,
}

impl Hashing {
    /// Returns the ids if a prompt of `input_tokens` tokens can have them, and the tokens that they
    /// stand for. The last tokens may be without an id if they are fewer than a block.
    pub fn read(
        self,
        ids: Option<&RawValue>,
        input_tokens: u32,
        options: &ReadOptions,
    ) -> Result<(Vec<u64>, u32), Reason> {
        if options.hash_ids == HashIds::Ignored {
            return Ok((Vec::new(), 0));
        }
        let text = ids.ok_or(Reason::NoHashIds)?.get();
        let mut ids: Vec<u64> =
            serde_json::from_str(text).map_err(|e| Reason::json(&e).within("hash_ids"))?;
        let expected = input_tokens.div_ceil(self.tokens) as usize;
        if ids.len() != expected && ids.len() != (input_tokens / self.tokens) as usize {
            let (found, size) = (ids.len(), self.tokens);
            return Err(Reason::HashIds { found, input: input_tokens, expected, size });
        }
        let mut places = HashMap::new();
        for (id, second) in ids.iter_mut().zip(1..).take_while(|_| self.chain.is_none()) {
            if let Some(first) = places.insert(*id, second) {
                return Err(Reason::RepeatedHashId { id: *id, first, second });
            }
        }
        if let Some(mut before) = self.chain {
            for id in &mut ids {
                let mut hasher = DefaultHasher::new();
                (before, *id).hash(&mut hasher);
                *id = hasher.finish();
                before = *id;
            }
        }
        let hashed = input_tokens.min((ids.len() as u32).saturating_mul(self.tokens));
        Ok((ids, hashed))
    }
}
