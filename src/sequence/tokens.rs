//! What an append adds to a sequence.

use super::sequence::Sequence;

/// Tokens to [append](super::Batch::append). A number converts into [`Final`](Self::Final) tokens,
/// a slice into [`Ids`](Self::Ids).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Tokens<'a> {
    /// This many final tokens: a prompt, a chunk of one, or a decoded token. If there are more than
    /// were announced, the blocks from there on are not cached, and [`Ids`](Self::Ids) rejected.
    Final(usize),
    /// Final tokens with these ids, which are [announced](super::Sequence::announce) with them.
    Ids(&'a [u32]),
    /// At most this many of the announced tokens not yet appended; there may be none.
    Announced(usize),
    /// This many speculative tokens: [`Sequence::accept`](super::Sequence::accept) or
    /// [`commit`](super::Sequence::commit) makes some of them final. States are stepped over these
    /// [only](super::GroupedAppended::stepped).
    Draft(usize),
}

impl Tokens<'_> {
    #[inline(always)]
    pub(super) fn count(self, sequence: &Sequence) -> usize {
        match self {
            Self::Final(tokens) | Self::Draft(tokens) => tokens,
            Self::Ids(ids) => ids.len(),
            Self::Announced(max) => {
                let announced = sequence.known.as_ref().map_or(0, |known| known.announced());
                announced.saturating_sub(sequence.list.tokens() as usize).min(max)
            }
        }
    }
}

impl From<usize> for Tokens<'_> {
    #[inline]
    fn from(tokens: usize) -> Self {
        Self::Final(tokens)
    }
}

impl<'a> From<&'a [u32]> for Tokens<'a> {
    #[inline]
    fn from(ids: &'a [u32]) -> Self {
        Self::Ids(ids)
    }
}

impl<'a, const N: usize> From<&'a [u32; N]> for Tokens<'a> {
    #[inline]
    fn from(ids: &'a [u32; N]) -> Self {
        Self::Ids(ids)
    }
}

impl<'a> From<&'a Vec<u32>> for Tokens<'a> {
    #[inline]
    fn from(ids: &'a Vec<u32>) -> Self {
        Self::Ids(ids)
    }
}
