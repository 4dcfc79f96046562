use kvpool::{Sequence, SequenceId};

use crate::{Request, Shape, Text, turn};

/// Bits of a seed: an id is then below 2^53, the limit of integers in many JSON readers.
const SEED_BITS: u32 = 21;

/// The number of a conversation's turn, and the seed of the process that began it. The id of the
/// sequence is `seed * 2^32 + number`, which is unique across processes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Turn {
    pub seed: u32,
    /// Below 2^31.
    pub number: u32,
}

impl Turn {
    pub fn id(self) -> SequenceId {
        SequenceId(u64::from(self.seed) << 32 | u64::from(self.number))
    }

    pub fn text(self) -> (Request, Text) {
        let request = turn(self.seed, self.number);
        let text = Text::of_conversation(self.number, &request);
        (request, text)
    }

    /// Returns the turn of an id; `None` if no traffic gives such an id.
    pub fn of(id: SequenceId) -> Option<Self> {
        let (seed, number) = ((id.0 >> 32) as u32, id.0 as u32);
        (seed >> SEED_BITS == 0 && number >> 31 == 0).then_some(Self { seed, number })
    }
}

/// Returns a seed that other processes are unlikely to have.
pub fn fresh_seed() -> u32 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id()) as u32 >> (32 - SEED_BITS)
}

pub(super) struct Running {
    pub turn: Turn,
    pub sequence: Sequence,
    pub text: Text,
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Tokens of prompt and answer.
    pub total: usize,
    /// Whether another node began it.
    pub is_arrived: bool,
}

impl Running {
    /// Takes over a sequence in a process with a seed; returns it if it is not of synthetic
    /// traffic.
    pub fn of(sequence: Sequence, seed: u32) -> Result<Self, Box<Sequence>> {
        let Some(turn) = Turn::of(sequence.id()) else { return Err(Box::new(sequence)) };
        let (request, text) = turn.text();
        let (prompt, total) = (request.input_tokens as usize, request.tokens() as usize);
        if sequence.len() > total {
            return Err(Box::new(sequence));
        }
        Ok(Self { turn, sequence, text, prompt, total, is_arrived: turn.seed != seed })
    }

    /// Returns the number of blocks that it still needs.
    pub fn pending(&self, shape: Shape) -> usize {
        shape.blocks(self.total as u64) - shape.blocks(self.sequence.len() as u64)
    }

    /// Returns whether it may leave: its prompt is complete, but not its answer.
    pub fn may_leave(&self) -> bool {
        (self.prompt..self.total).contains(&self.sequence.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_name_turns_and_fit_into_json() {
        for turn in [Turn { seed: 0, number: 0 }, Turn { seed: (1 << SEED_BITS) - 1, number: u32::MAX >> 1 }]
        {
            assert_eq!(Turn::of(turn.id()), Some(turn));
            assert!(turn.id().0 < 1 << 53);
        }
        for foreign in [1 << 31, 1 << 53, u64::MAX] {
            assert_eq!(Turn::of(SequenceId(foreign)), None);
        }
        assert!((0..100).all(|_| fresh_seed() >> SEED_BITS == 0));
    }
}
