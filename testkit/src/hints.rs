//! The naive model of hints: which cached block is evicted first, in a pool that one thread drives.
//! Sessions share beginnings of prompts, and blocks have owners while hints name them.
//!
//! [`run`] applies a list of [`HintOperation`]s to a real pool and to the model, and compares each
//! outcome and each eviction. Tests and a fuzz target call it.

use crate::model::Pick;

mod drive;

pub use drive::run;

/// One step.
#[derive(Clone, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "arbitrary", derive(arbitrary::Arbitrary))]
#[non_exhaustive]
pub enum HintOperation {
    /// Open a prompt, and compute it. Two prompts each begin alike.
    Open {
        /// Number of the session; some requests have none.
        session: u8,
        /// Number of the prompt.
        prompt: u8,
        /// Number of full blocks.
        blocks: u8,
    },
    /// Close a sequence.
    Close(Pick),
    /// Give a hint.
    Hint(About, Asked),
    /// Let milliseconds pass.
    Pass(u8),
    /// Evict blocks.
    Evict(u8),
}

/// What a hint is about.
#[derive(Clone, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "arbitrary", derive(arbitrary::Arbitrary))]
pub enum About {
    /// A session.
    Session(u8),
    /// Hashes of a prompt: the first ones left out, and a number.
    Hashes(u8, u8, u8),
    /// Tokens of an open sequence: the first, and a number; without one, all others.
    Tokens(Pick, u8, u8),
}

/// What is asked for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(feature = "arbitrary", derive(arbitrary::Arbitrary))]
pub enum Asked {
    /// Retain with a priority, for so long.
    Retain(u8, u8),
    /// Pin for so long.
    Pin(u8),
    /// Demote.
    Demote,
    /// Release.
    Release,
}

#[cfg(feature = "proptest")]
mod strategy {
    use proptest::prelude::*;

    use super::*;

    fn about() -> impl Strategy<Value = About> {
        prop_oneof![
            4 => any::<u8>().prop_map(About::Session),
            3 => any::<(u8, u8, u8)>().prop_map(|(prompt, first, blocks)| About::Hashes(prompt, first, blocks)),
            3 => (any::<Pick>(), any::<u8>(), prop_oneof![Just(0), any::<u8>()])
                .prop_map(|(pick, start, tokens)| About::Tokens(pick, start, tokens)),
        ]
    }

    fn asked() -> impl Strategy<Value = Asked> {
        prop_oneof![
            3 => any::<(u8, u8)>().prop_map(|(priority, ms)| Asked::Retain(priority, ms)),
            4 => any::<u8>().prop_map(Asked::Pin),
            2 => Just(Asked::Demote),
            2 => Just(Asked::Release),
        ]
    }

    impl Arbitrary for HintOperation {
        type Parameters = ();
        type Strategy = BoxedStrategy<Self>;

        fn arbitrary_with((): ()) -> Self::Strategy {
            prop_oneof![
                8 => any::<(u8, u8, u8)>()
                    .prop_map(|(session, prompt, blocks)| Self::Open { session, prompt, blocks }),
                7 => any::<Pick>().prop_map(Self::Close),
                10 => (about(), asked()).prop_map(|(about, asked)| Self::Hint(about, asked)),
                3 => any::<u8>().prop_map(Self::Pass),
                3 => any::<u8>().prop_map(Self::Evict),
            ]
            .boxed()
        }
    }
}
