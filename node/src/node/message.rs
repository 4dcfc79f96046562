use serde::{Deserialize, Serialize};

use crate::protocol::{Bytes, CacheAnswer, CacheQuestion, Envelope};
use crate::wire::{Denial, Versions};

/// Versions of these messages that a node speaks; see [`wire`](crate::wire).
pub(super) const VERSIONS: Versions = Versions { min: 4, max: 4 };

pub(super) const METADATA_MAX: usize = 64 << 10;

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub(super) enum Way {
    Tcp,
    Nixl,
}

impl Way {
    pub(super) fn number(self) -> u8 {
        match self {
            Self::Tcp => 0,
            Self::Nixl => 1,
        }
    }

    pub(super) fn of_number(number: u8) -> Option<Self> {
        [Self::Tcp, Self::Nixl].into_iter().find(|way| way.number() == number)
    }
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) enum NodeMessage {
    Migration(Envelope),
    /// How the sender can be reached other than over the link.
    Reach {
        way: Way,
        metadata: Bytes<METADATA_MAX>,
    },
    /// The sender's transfers into this grant have finished, and no more will begin.
    Over {
        way: Way,
        tag: u64,
    },
    /// Asks for [`Over`](Self::Over), which may have been lost; repeated until it arrives.
    IsOver {
        way: Way,
        tag: u64,
    },
    /// Asks which blocks the receiver has cached. Not repeated.
    AskCached(CacheQuestion),
    TellCached(CacheAnswer),
    /// The sender refuses the link, and closes it.
    Refused(Denial),
}
