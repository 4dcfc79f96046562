//! The settings as flags, one per key of the list, so that flags, variables and the file cannot
//! differ.

use clap::{Arg, ArgMatches, Args, Command, Error, FromArgMatches};
use kvpool_node::settings::{CONFIG, KEYS, Key, Sources};

/// The settings that were given as flags.
#[derive(Clone, Debug, Default)]
pub struct SettingsArgs(Vec<(&'static Key, String)>);

impl SettingsArgs {
    /// Returns the sources of settings: these flags, and the environment of the process.
    pub fn sources(&self) -> Sources {
        let sources = Sources::new().environment(std::env::vars_os());
        self.0.iter().fold(sources, |sources, (key, value)| sources.flag(key, value))
    }

    fn read(matches: &ArgMatches) -> Self {
        let given = keys().filter_map(|key| Some((key, matches.get_one::<String>(key.name)?.clone())));
        Self(given.collect())
    }
}

fn keys() -> impl Iterator<Item = &'static Key> {
    [&CONFIG].into_iter().chain(KEYS)
}

fn flag(key: &'static Key) -> Arg {
    let default = key.default.map(|default| format!(" [default: {default}]")).unwrap_or_default();
    Arg::new(key.name)
        .long(key.name)
        .value_name(key.value)
        .help(format!("{}: {}{default}", key.help, key.accepted))
        .allow_hyphen_values(true)
}

impl Args for SettingsArgs {
    fn augment_args(command: Command) -> Command {
        command.args(keys().map(flag))
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for SettingsArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, Error> {
        Ok(Self::read(matches))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), Error> {
        self.0.extend(Self::read(matches).0);
        Ok(())
    }
}
