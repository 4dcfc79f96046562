use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use serde_json::value::RawValue;

use super::error::Reason;
use super::{HashIds, ReadOptions, Request, tokens};

#[derive(Clone, Copy)]
pub(super) struct Hashing {
    /// Tokens per block.
    pub tokens: u32,
    /// The start of a chain, for ids of single blocks, or of prompts of one session; `None` if
    /// equal ids mean equal prefixes.
    pub chain: Option<u64>,
}

impl Hashing {
    /// Returns a request of these fields, without an arrival. Up to a block of its last tokens may
    /// be without an id.
    pub fn request(
        self,
        [(input, input_tokens), (output, output_tokens)]: [(&str, i64); 2],
        ids: Option<&RawValue>,
        options: &ReadOptions,
    ) -> Result<Request, Reason> {
        let input_tokens = tokens(input, input_tokens, 1)?;
        let request = Request::new(Duration::ZERO, input_tokens, tokens(output, output_tokens, 0)?);
        if options.hash_ids == HashIds::Ignored {
            return Ok(request);
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
        let hashed_tokens = input_tokens.min((ids.len() as u32).saturating_mul(self.tokens));
        Ok(Request { hash_ids: ids, hashed_tokens, ..request })
    }
}
