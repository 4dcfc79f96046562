//! What two nodes say to each other over the control stream of a link.

use serde::{Deserialize, Serialize};

use crate::protocol::{Bytes, CacheAnswer, CacheQuestion, Envelope};
use crate::wire::{Denial, Versions};

/// Versions of these messages that a node speaks; see [`wire`](crate::wire).
pub(super) const VERSIONS: Versions = Versions { min: 4, max: 4 };

/// Most bytes of a transport's metadata.
pub(super) const METADATA_MAX: usize = 64 << 10;

/// A way for the bytes of a grant.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
pub(super) enum Way {
    /// The data streams of the link.
    Tcp,
    /// Remote direct memory access.
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

/// A message between nodes.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) enum NodeMessage {
    /// Of a migration.
    Migration(Envelope),
    /// How the sender can be reached by a way other than the link.
    Reach {
        /// The way.
        way: Way,
        /// Metadata of the sender's transport.
        metadata: Bytes<METADATA_MAX>,
    },
    /// No transfer of the sender into this grant is in flight any more, and none will be.
    Over {
        /// The way.
        way: Way,
        /// The receiver's grant.
        tag: u64,
    },
    /// Asks for [`Over`](Self::Over), which may have been lost; repeated until it comes.
    IsOver {
        /// The way.
        way: Way,
        /// The sender's grant.
        tag: u64,
    },
    /// Asks which blocks the receiver has cached.
    AskCached(CacheQuestion),
    /// Answers [`AskCached`](Self::AskCached), which is not repeated.
    TellCached(CacheAnswer),
    /// The sender refuses the link, and closes it.
    Refused(Denial),
}
