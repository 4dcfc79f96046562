use std::collections::BTreeMap;

use super::origin::Origin;

#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub text: String,
    pub origin: Origin,
}

pub(super) type Entries = BTreeMap<&'static str, Entry>;
