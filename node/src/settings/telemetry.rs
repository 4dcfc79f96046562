use std::str::FromStr;

use tracing::level_filters::LevelFilter;

/// Format of log messages on standard error.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub enum LogFormat {
    /// Lines of text.
    #[default]
    Text,
    /// JSON objects, one per line.
    Json,
}

impl FromStr for LogFormat {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            _ => Err("no such form"),
        }
    }
}

/// Levels of log messages, such as `warn,kvpool_node::tier=debug`.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub struct LogLevels {
    /// The level of all other modules.
    pub others: Option<LevelFilter>,
    /// Modules with their levels.
    pub modules: Vec<(String, LevelFilter)>,
}

impl LogLevels {
    /// Returns levels that print nothing.
    pub fn off() -> Self {
        Self { others: Some(LevelFilter::OFF), modules: Vec::new() }
    }
}

impl FromStr for LogLevels {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut levels = Self::default();
        for part in text.split(',') {
            let (module, level) = match part.split_once('=') {
                Some((module, level)) => (Some(module.trim()), level.trim()),
                None => (None, part.trim()),
            };
            let level = self::level(level)?;
            match module {
                None if levels.others.is_some() => return Err("two levels without a module".to_owned()),
                None => levels.others = Some(level),
                Some(module) if !is_module(module) => return Err(format!("{module:?} is no module")),
                Some(module) => levels.modules.push((module.to_owned(), level)),
            }
        }
        Ok(levels)
    }
}

fn level(text: &str) -> Result<LevelFilter, String> {
    // The library also takes numbers.
    match text.parse() {
        Ok(level) if text.chars().all(|char| char.is_ascii_alphabetic()) && !text.is_empty() => Ok(level),
        _ => Err(format!("{text:?} is no level")),
    }
}

fn is_module(text: &str) -> bool {
    let is_part =
        |part: &str| !part.is_empty() && part.chars().all(|char| char.is_ascii_alphanumeric() || char == '_');
    text.split("::").all(is_part)
}

/// Where traces are sent.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
#[non_exhaustive]
pub enum TraceTarget {
    /// To the collector that OpenTelemetry's standard variables name, if any.
    #[default]
    Environment,
    /// Nowhere.
    Off,
    /// To this collector.
    Url(String),
}

pub(super) fn collector(text: &str) -> Result<String, &'static str> {
    let rest = text.strip_prefix("http://").or_else(|| text.strip_prefix("https://"));
    let rest = rest.ok_or("it begins with neither http:// nor https://")?;
    if rest.is_empty() || rest.starts_with(['/', ':']) {
        return Err("the host is missing");
    }
    if !text.chars().all(|char| char.is_ascii_graphic()) || rest.contains(['?', '#']) {
        return Err("it has characters that no such address has");
    }
    Ok(text.trim_end_matches('/').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_are_by_module() {
        let levels: LogLevels = "warn, kvpool_node::tier=debug,kvpool_cli=off".parse().unwrap();
        assert_eq!(levels.others, Some(LevelFilter::WARN));
        let modules = [("kvpool_node::tier", LevelFilter::DEBUG), ("kvpool_cli", LevelFilter::OFF)];
        assert_eq!(levels.modules, modules.map(|(module, level)| (module.to_owned(), level)));
        for (bad, reason) in [
            ("", "\"\" is no level"),
            ("warning", "\"warning\" is no level"),
            ("3", "\"3\" is no level"),
            ("warn,info", "two levels"),
            ("a b=warn", "\"a b\" is no module"),
            ("=warn", "\"\" is no module"),
            ("a::=warn", "\"a::\" is no module"),
        ] {
            let error = bad.parse::<LogLevels>().unwrap_err();
            assert!(error.contains(reason), "{bad:?}: {error}");
        }
    }

    #[test]
    fn collectors_have_a_scheme_and_a_host() {
        assert_eq!(collector("http://10.0.0.1:4318/").unwrap(), "http://10.0.0.1:4318");
        assert_eq!(collector("https://otel.example/v1").unwrap(), "https://otel.example/v1");
        for bad in [
            "otel:4318",
            "grpc://otel:4317",
            "http://",
            "http:///path",
            "http://:1",
            "http://a b",
            "http://a?b",
        ] {
            assert!(collector(bad).is_err(), "{bad}");
        }
    }
}
