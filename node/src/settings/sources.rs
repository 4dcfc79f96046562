//! Reads the sources. The precedence is flag, variable, file, default.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};

use kvpool::Pool;
use toml::de::{DeTable, DeValue};

use super::checked::{HASHES_OF_FIRST_TOKEN, Loaded};
use super::entries::{Entries, Entry};
use super::error::SettingsError;
use super::files::read_file;
use super::keys::{CONFIG, KEYS, Key, OF_ADMIN, OF_PROGRAM, VARIABLE_PREFIX};
use super::origin::Origin;
use super::reader::Reader;
use super::socket::default_socket;
use super::value::PeerAddress;

const FILE_BYTES_MAX: u64 = 1 << 20;

/// Variables with the prefix that are not settings: the library of a tier.
const OTHER_VARIABLES: [&str; 1] = ["KVPOOL_MOONCAKE"];

/// Sources of settings. Loading them again reads the file again.
#[derive(Clone, Default)]
pub struct Sources {
    flags: BTreeMap<&'static str, String>,
    variables: Vec<(OsString, OsString)>,
    given: Option<(PathBuf, Option<String>)>,
}

/// Without the values, which may have passwords.
impl fmt::Debug for Sources {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Sources").finish_non_exhaustive()
    }
}

impl Sources {
    /// Creates sources without values: all settings have their defaults.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a flag. The last value of a key counts.
    pub fn flag(mut self, key: &'static Key, value: impl Into<String>) -> Self {
        self.flags.insert(key.name, value.into());
        self
    }

    /// Names the settings file, instead of the flag `config`.
    pub fn file(mut self, path: impl Into<PathBuf>) -> Self {
        self.given = Some((path.into(), None));
        self
    }

    /// Gives the text of a settings file, with a name for errors.
    pub fn text(mut self, name: impl Into<PathBuf>, text: impl Into<String>) -> Self {
        self.given = Some((name.into(), Some(text.into())));
        self
    }

    /// Adds the environment, for example `std::env::vars_os()`. Variables without the prefix
    /// `KVPOOL_` are ignored.
    pub fn environment(mut self, variables: impl IntoIterator<Item = (OsString, OsString)>) -> Self {
        let ours = |(name, _): &(OsString, OsString)| name.to_string_lossy().starts_with(VARIABLE_PREFIX);
        self.variables.extend(variables.into_iter().filter(ours));
        self
    }

    /// Reads all sources, and checks the settings.
    ///
    /// # Errors
    /// [`SettingsError`], which names the key, the place and the accepted values.
    pub fn load(&self) -> Result<Loaded, SettingsError> {
        let mut warnings = Vec::new();
        let entries = self.entries(&mut warnings)?;
        Self::check(entries, warnings)
    }

    /// Reads all sources for the pool of an engine, and checks the settings. `blocks` is the size
    /// that the pool had at the start.
    ///
    /// # Errors
    /// As for [`load`](Self::load); [`SettingsError::OfProgram`] for a setting of the pool, of
    /// traffic or of messages, which are the engine's; [`SettingsError::Value`] for a secret of the
    /// hashes that is not the pool's, if it is given as `hash_key_file` or for a tier.
    pub fn load_for(&self, pool: &Pool, blocks: usize) -> Result<Loaded, SettingsError> {
        let mut warnings = Vec::new();
        let entries = self.entries_for(Some(pool), blocks, &mut warnings)?;
        let mut loaded = Self::check(entries.clone(), warnings)?;
        loaded.settings.pool.layout = pool.layout().clone();
        if let Some(problem) = loaded.settings.other_hashes(pool) {
            match ["hash-key-file", "tier"].into_iter().find(|key| Reader(&entries).entry(key).is_some()) {
                Some(key) => return Err(Reader(&entries).refuse(key, problem)),
                None => loaded.warnings.push(format!("nodes exchange sequences only: {problem}")),
            }
        }
        Ok(loaded)
    }

    /// Reads all sources for a client of a store, whose pool holds values on their way. By default
    /// it has this name, and neither an address for peers nor an admin interface.
    ///
    /// # Errors
    /// As for [`load_for`](Self::load_for), except for the hashes: values have names.
    pub fn load_for_client(&self, pool: &Pool, name: &str) -> Result<Loaded, SettingsError> {
        let mut warnings = Vec::new();
        let mut entries = self.entries_for(Some(pool), pool.total_blocks(), &mut warnings)?;
        for (key, text) in [("name", name), ("listen", "off"), ("admin", "off")] {
            if entries.get(key).is_none_or(|entry| entry.origin == Origin::Default) {
                entries.insert(key, Entry { text: text.to_owned(), origin: Origin::Default });
            }
        }
        Self::check(entries, warnings)
    }

    /// Reads all sources for a pool of frames, which has an admin interface and nothing else.
    ///
    /// `number` tells apart several pools that read the same settings, such as those of the ranks
    /// of an engine: above 0, it is added to the port of the admin interface, unless that is 0, and
    /// appended to the path of its socket and to the name.
    ///
    /// # Errors
    /// As for [`load`](Self::load); [`SettingsError::OfProgram`] as for
    /// [`load_for`](Self::load_for); [`SettingsError::OfSequences`] for a setting that needs bytes,
    /// sequences or peers.
    pub fn load_for_frames(&self, number: u16) -> Result<Loaded, SettingsError> {
        let mut warnings = Vec::new();
        let entries = self.entries_for(None, 1, &mut warnings)?;
        let mut loaded = Self::check(entries.clone(), warnings)?;
        // The first token gives one, which nothing uses.
        loaded.settings.hash_key = None;
        loaded.warnings.retain(|warning| warning != HASHES_OF_FIRST_TOKEN);
        if number > 0 {
            loaded.settings.tell_apart(number).map_err(|(key, why)| Reader(&entries).refuse(key, why))?;
        }
        Ok(loaded)
    }

    fn entries_for(
        &self,
        pool: Option<&Pool>,
        blocks: usize,
        warnings: &mut Vec<String>,
    ) -> Result<Entries, SettingsError> {
        let mut entries = self.entries(warnings)?;
        for (name, Entry { text, origin }) in &entries {
            // The path of a settings file is none of the list.
            let Some(key) = Key::find(name) else { continue };
            let (is_given, origin) = (*origin != Origin::Default, origin.clone());
            if is_given && OF_PROGRAM.contains(name) {
                return Err(SettingsError::OfProgram { key, origin });
            }
            if is_given && pool.is_none() && text != "off" && !OF_ADMIN.contains(name) {
                return Err(SettingsError::OfSequences { key, origin });
            }
        }
        if pool.is_none() {
            entries.insert("listen", Entry { text: "off".to_owned(), origin: Origin::Default });
        }
        // Those that others are checked against.
        let eviction = if pool.is_none_or(|pool| pool.prefix_cache().is_some()) { "lru" } else { "off" };
        for (key, text) in [("size", blocks.to_string()), ("eviction", eviction.to_owned())] {
            entries.insert(key, Entry { text, origin: Origin::Default });
        }
        Ok(entries)
    }

    /// Returns the key of the hashes of cached blocks. Other settings are not checked.
    ///
    /// # Errors
    /// As for [`load`](Self::load), about its files and unknown keys.
    pub fn load_hash_key(&self) -> Result<Option<[u8; 32]>, SettingsError> {
        Loaded::hash_key(&self.entries(&mut Vec::new())?)
    }

    fn check(mut entries: Entries, warnings: Vec<String>) -> Result<Loaded, SettingsError> {
        if !entries.contains_key("listen") {
            let is_set = |key| Reader(&entries).entry(key).is_some();
            // Any user of this host could link to a port, and nothing would distinguish them.
            let mut text = format!("unix:{}", default_socket(&Loaded::peers(&entries)?.0).display());
            if is_set("token-file") || is_set("tls-cert") {
                text = "127.0.0.1:7411".to_owned();
            }
            entries.insert("listen", Entry { text, origin: Origin::Default });
        }
        Loaded::check(&entries, warnings)
    }

    /// Returns the name of the node and its peers. Other settings are not checked.
    ///
    /// # Errors
    /// As for [`load`](Self::load), about these two keys and unknown ones.
    pub fn load_peers(&self) -> Result<(String, Vec<PeerAddress>), SettingsError> {
        Loaded::peers(&self.entries(&mut Vec::new())?)
    }

    fn entries(&self, warnings: &mut Vec<String>) -> Result<Entries, SettingsError> {
        let variables = self.variables(warnings)?;
        let flags: Entries = (self.flags.iter())
            .map(|(&name, text)| (name, Entry { text: text.clone(), origin: Origin::Flag(name) }))
            .collect();
        let mut entries = Entries::new();
        let config = flags.get(CONFIG.name).or_else(|| variables.get(CONFIG.name));
        if let Some((path, text)) = &self.given {
            entries = match text {
                Some(text) => parse(path, text)?,
                None => parse(path, &read(path, &Origin::Argument)?)?,
            };
        } else if let Some(Entry { text, origin }) = config {
            let path = PathBuf::from(text);
            entries = parse(&path, &read(&path, origin)?)?;
        }
        entries.extend(variables);
        entries.extend(flags);
        for key in KEYS {
            if let Some(default) = key.default {
                let default = || Entry { text: default.to_owned(), origin: Origin::Default };
                entries.entry(key.name).or_insert_with(default);
            }
        }
        Ok(entries)
    }

    /// Returns the values of environment variables. Unknown ones are only warnings.
    fn variables(&self, warnings: &mut Vec<String>) -> Result<Entries, SettingsError> {
        let mut entries = Entries::new();
        for (name, value) in &self.variables {
            let name = name.to_string_lossy().into_owned();
            let named = KEYS.iter().chain([&CONFIG]).find(|key| key.variable() == name);
            let Some(key) = named else {
                if OTHER_VARIABLES.contains(&&*name) {
                    continue;
                }
                let near = Key::nearest(&name[VARIABLE_PREFIX.len()..]);
                let near = near.map(|key| format!("; did you mean {}?", key.variable())).unwrap_or_default();
                warnings.push(format!("the variable {name} names no setting and is ignored{near}"));
                continue;
            };
            let Some(text) = value.to_str() else { return Err(SettingsError::NotUtf8 { name }) };
            entries.insert(key.name, Entry { text: text.to_owned(), origin: Origin::Variable(name) });
        }
        Ok(entries)
    }
}

fn read(path: &Path, origin: &Origin) -> Result<String, SettingsError> {
    let failed = |error| SettingsError::File { path: path.into(), origin: origin.clone(), error };
    let bytes = read_file(path, FILE_BYTES_MAX).map_err(failed)?;
    String::from_utf8(bytes).map_err(|error| {
        let at = error.utf8_error().valid_up_to();
        let line = 1 + error.as_bytes()[..at].iter().filter(|&&byte| byte == b'\n').count();
        SettingsError::FileNotUtf8 { path: path.into(), line }
    })
}

fn parse(path: &Path, text: &str) -> Result<Entries, SettingsError> {
    let line = |offset: usize| 1 + text.bytes().take(offset).filter(|&byte| byte == b'\n').count();
    let table = DeTable::parse(text).map_err(|error| SettingsError::Syntax {
        path: path.to_owned(),
        line: line(error.span().map_or(0, |span| span.start)),
        message: error.message().to_owned(),
    })?;
    let (mut entries, mut unknown) = (Entries::new(), Vec::new());
    for (name, value) in table.into_inner() {
        let offset = name.span().start;
        let origin = Origin::File { path: path.to_owned(), line: line(offset) };
        let name = name.into_inner().into_owned();
        let Some(key) = Key::find(&name) else {
            unknown.push((offset, (name, origin)));
            continue;
        };
        let text = flat(value.get_ref(), key).map_err(|reason| SettingsError::NotText {
            key,
            origin: origin.clone(),
            reason,
        })?;
        if entries.contains_key(key.name) {
            let reason = "it is there twice, with a hyphen and with an underscore".to_owned();
            return Err(SettingsError::Value { key, origin, value: text, reason });
        }
        entries.insert(key.name, Entry { text, origin });
    }
    if unknown.is_empty() {
        return Ok(entries);
    }
    unknown.sort_by_key(|&(offset, _)| offset);
    Err(SettingsError::UnknownKeys { keys: unknown.into_iter().map(|(_, key)| key).collect() })
}

/// Returns a value of the file as the text that a flag would have.
fn flat(value: &DeValue<'_>, key: &Key) -> Result<String, String> {
    let is_list = key.name == "peers";
    match value {
        DeValue::String(text) => Ok(text.clone().into_owned()),
        DeValue::Integer(number) if number.radix() == 10 => Ok(number.as_str().to_owned()),
        DeValue::Float(number) => Ok(number.as_str().to_owned()),
        DeValue::Array(items) if is_list => {
            let items = items.iter().map(|item| match item.get_ref() {
                DeValue::String(text) => Ok(text.as_ref()),
                _ => Err("a list of texts is needed".to_owned()),
            });
            Ok(items.collect::<Result<Vec<_>, _>>()?.join(","))
        }
        DeValue::Table(items) if is_list => {
            let items = items.iter().map(|(name, address)| match address.get_ref() {
                DeValue::String(address) => Ok(format!("{}={address}", name.get_ref())),
                _ => Err(format!("the address of {} is no text", name.get_ref())),
            });
            Ok(items.collect::<Result<Vec<_>, _>>()?.join(","))
        }
        DeValue::Boolean(_) => Err("a boolean".to_owned()),
        DeValue::Datetime(_) => Err("a date".to_owned()),
        DeValue::Integer(_) => Err("not a decimal number".to_owned()),
        DeValue::Array(_) => Err("a list".to_owned()),
        DeValue::Table(_) => Err("a table".to_owned()),
    }
}
