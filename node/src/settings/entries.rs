//! What the sources say, before it is parsed.

use std::collections::BTreeMap;

use super::origin::Origin;

/// Value of a key, as text, and its place.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub text: String,
    pub origin: Origin,
}

/// The values of keys, by name.
pub(super) type Entries = BTreeMap<&'static str, Entry>;
