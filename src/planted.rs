//! Planted bugs chosen at run time, in a build with `--cfg kvpool_planted`.
//!
//! `cfg!(kvpool_mutant = "name")` marks a planted bug. A normal build evaluates it to `false` at
//! compile time. This build shadows the macro with a comparison of the name with `KVPOOL_MUTANT`,
//! so that one build serves all planted bugs (`loom-tests/mutants.sh`, `cuda-tests/mutants.sh`). A
//! planted bug must therefore be an expression, neither a `#[cfg(...)]` attribute nor part of a
//! constant.

use std::sync::LazyLock;

/// Returns whether `KVPOOL_MUTANT` names this bug.
pub(crate) fn is(name: &str) -> bool {
    static PLANTED: LazyLock<Option<String>> = LazyLock::new(|| std::env::var("KVPOOL_MUTANT").ok());
    PLANTED.as_deref() == Some(name)
}

/// The standard macro, except for planted bugs.
macro_rules! cfg {
    (kvpool_mutant = $name:literal) => {
        $crate::planted::is($name)
    };
    ($($flags:tt)*) => {
        ::core::cfg!($($flags)*)
    };
}
