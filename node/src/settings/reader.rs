use super::entries::{Entries, Entry};
use super::error::SettingsError;
use super::keys::Key;
use super::origin::Origin;

pub(super) struct Reader<'a>(pub(super) &'a Entries);

impl Reader<'_> {
    /// Returns the key and the entry; `None` for `off`.
    pub(super) fn entry(&self, name: &str) -> Option<(&'static Key, &Entry)> {
        let key = Key::find(name).expect("a key of the list");
        self.0.get(key.name).filter(|entry| entry.text != "off").map(|entry| (key, entry))
    }

    /// Returns free text, such as a topic, for which `off` has no special meaning.
    pub(super) fn text(&self, name: &str) -> Option<&str> {
        let key = Key::find(name).expect("a key of the list");
        self.0.get(key.name).map(|entry| &*entry.text)
    }

    /// Returns the error about a value, without the password of an address.
    pub(super) fn refuse(&self, name: &str, reason: impl Into<String>) -> SettingsError {
        let key = Key::find(name).expect("a key of the list");
        let entry = self.0.get(key.name).cloned();
        let Entry { text, origin } = entry.unwrap_or(Entry { text: String::new(), origin: Origin::Default });
        SettingsError::Value { key, origin, value: without_password(&text), reason: reason.into() }
    }

    pub(super) fn value<T, E: ToString>(
        &self,
        name: &str,
        parse: impl FnOnce(&str) -> Result<T, E>,
    ) -> Result<Option<T>, SettingsError> {
        let Some((_, entry)) = self.entry(name) else { return Ok(None) };
        parse(&entry.text).map(Some).map_err(|error| self.refuse(name, error.to_string()))
    }

    /// Parses a value of a key that has a default and cannot be off.
    pub(super) fn required<T, E: ToString>(
        &self,
        name: &str,
        parse: impl FnOnce(&str) -> Result<T, E>,
    ) -> Result<T, SettingsError> {
        self.value(name, parse)?.ok_or_else(|| self.refuse(name, "it cannot be off"))
    }

    pub(super) fn needs(&self, name: &str, needs: &str, reason: &'static str) -> SettingsError {
        let (key, entry) = self.entry(name).expect("a key with a value");
        let needs = Key::find(needs).expect("a key of the list");
        SettingsError::Needs { key, origin: entry.origin.clone(), needs, reason }
    }
}

/// Returns an address without its user and password, or any other text unchanged.
pub(crate) fn without_password(text: &str) -> String {
    let Some((scheme, rest)) = text.split_once("://") else {
        return text.rsplit_once('@').map_or(text, |(_, host)| host).to_owned();
    };
    // For a Unix socket, they are in the query.
    let rest = rest.rsplit_once('@').map_or(rest, |(_, host)| host);
    format!("{scheme}://{}", rest.split('?').next().unwrap_or_default())
}
