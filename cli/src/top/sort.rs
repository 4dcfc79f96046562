use std::cmp::Reverse;

use kvpool_node::admin::OwnerRecord;

/// An order of owners; the first is that of the node.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(super) enum OwnerOrder {
    #[default]
    Blocks,
    Age,
    Tokens,
    Shared,
    Sequence,
}

impl OwnerOrder {
    pub fn next(self) -> Self {
        match self {
            Self::Blocks => Self::Age,
            Self::Age => Self::Tokens,
            Self::Tokens => Self::Shared,
            Self::Shared => Self::Sequence,
            Self::Sequence => Self::Blocks,
        }
    }

    pub const fn name(self) -> &'static str {
        match self {
            Self::Blocks => "blocks",
            Self::Age => "age",
            Self::Tokens => "tokens",
            Self::Shared => "shared blocks",
            Self::Sequence => "sequence",
        }
    }

    /// Returns the owners in this order: largest first, sequences by id. The sort is stable, and
    /// owners without a value come last.
    pub fn sorted(self, owners: &[OwnerRecord]) -> Vec<&OwnerRecord> {
        let mut sorted: Vec<&OwnerRecord> = owners.iter().collect();
        match self {
            Self::Blocks => sorted.sort_by_key(|owner| Reverse(owner.blocks + owner.reserved_blocks)),
            Self::Age => sorted.sort_by(|a, b| {
                let age = |owner: &OwnerRecord| owner.held_s.unwrap_or(-1.0);
                age(b).total_cmp(&age(a))
            }),
            Self::Tokens => sorted.sort_by_key(|owner| Reverse(owner.tokens)),
            Self::Shared => sorted.sort_by_key(|owner| Reverse(owner.shared_blocks)),
            Self::Sequence => sorted.sort_by_key(|owner| (owner.sequence.is_none(), owner.sequence)),
        }
        sorted
    }
}
