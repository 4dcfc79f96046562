//! A strict reader of the OpenMetrics 1.0 text format, independent of the writer.

use std::collections::{BTreeMap, BTreeSet};

/// A value with the name and the labels under which it was found.
#[derive(Clone, PartialEq, Debug)]
pub struct Sample {
    pub name: String,
    pub labels: BTreeMap<String, String>,
    pub value: f64,
}

/// Reads a text. Anything that the format does not permit is an error.
pub fn read(text: &str) -> Result<Vec<Sample>, String> {
    let body = text.strip_suffix("# EOF\n").ok_or("it does not end in # EOF")?;
    let (mut samples, mut families): (Vec<Sample>, BTreeMap<String, BTreeMap<String, String>>) =
        Default::default();
    let mut current = String::new();
    let mut seen = BTreeSet::new();
    for line in body.lines() {
        let at = |reason: &str| format!("{reason}: {line}");
        if let Some(rest) = line.strip_prefix("# ") {
            let mut parts = rest.splitn(3, ' ');
            let (Some(word), Some(name), Some(value)) = (parts.next(), parts.next(), parts.next()) else {
                return Err(at("a comment without three parts"));
            };
            if !["HELP", "TYPE", "UNIT"].contains(&word) || !is_name(name) {
                return Err(at("no metadata"));
            }
            if name != current {
                if families.contains_key(name) {
                    return Err(at("a family in two places"));
                }
                current = name.to_owned();
            }
            if samples.last().is_some_and(|sample| belongs(&sample.name, name)) {
                return Err(at("metadata behind a sample"));
            }
            if families
                .entry(current.clone())
                .or_default()
                .insert(word.to_owned(), value.to_owned())
                .is_some()
            {
                return Err(at("metadata twice"));
            }
            continue;
        }
        let (name, rest) = line.split_at(line.find(['{', ' ']).ok_or_else(|| at("no value"))?);
        let (labels, value) = match rest.strip_prefix('{') {
            Some(rest) => labels(rest).map_err(|reason| at(&reason))?,
            None => (BTreeMap::new(), rest),
        };
        let value = value.strip_prefix(' ').ok_or_else(|| at("no space before the value"))?;
        let value: f64 = value.parse().map_err(|_| at("no number"))?;
        let kind = families.get(&current).and_then(|family| family.get("TYPE")).map_or("", String::as_str);
        let suffixes: &[&str] = match kind {
            "gauge" => &[""],
            "counter" => &["_total"],
            "histogram" => &["_bucket", "_sum", "_count"],
            "info" => &["_info"],
            _ => return Err(at("a sample without a known type")),
        };
        if !is_name(name) || !suffixes.iter().any(|suffix| name == format!("{current}{suffix}")) {
            return Err(at("a sample outside of its family"));
        }
        let unit = families[&current].get("UNIT");
        if unit.is_some_and(|unit| !current.ends_with(&format!("_{unit}"))) {
            return Err(at("a name without its unit"));
        }
        if (kind == "counter" || kind == "histogram") && value < 0.0 || kind == "info" && value != 1.0 {
            return Err(at("a value that this type does not have"));
        }
        if !seen.insert((name.to_owned(), labels.clone())) {
            return Err(at("a sample twice"));
        }
        samples.push(Sample { name: name.to_owned(), labels, value });
    }
    let histograms =
        families.iter().filter(|(_, family)| family.get("TYPE").is_some_and(|kind| kind == "histogram"));
    histograms.map(|(name, _)| check_histogram(name, &samples)).collect::<Result<Vec<()>, _>>()?;
    Ok(samples)
}

/// Returns the one value of a name with these labels; others are not compared.
pub fn value(samples: &[Sample], name: &str, labels: &[(&str, &str)]) -> f64 {
    let has = |sample: &&Sample| {
        sample.name == name
            && labels.iter().all(|(key, value)| sample.labels.get(*key).is_some_and(|own| own == value))
    };
    let found: Vec<_> = samples.iter().filter(has).collect();
    assert_eq!(found.len(), 1, "{name} {labels:?}: {found:?}");
    found[0].value
}

/// Ascending bounds, cumulated counts, and the last of them, `+Inf`, equal to the number of times.
fn check_histogram(name: &str, samples: &[Sample]) -> Result<(), String> {
    let mut series: BTreeMap<BTreeMap<String, String>, Vec<(f64, f64)>> = BTreeMap::new();
    for sample in samples.iter().filter(|sample| sample.name == format!("{name}_bucket")) {
        let mut labels = sample.labels.clone();
        let bound = labels.remove("le").ok_or_else(|| format!("{name}: a bucket without le"))?;
        let bound = bound.parse().map_err(|_| format!("{name}: le={bound}"))?;
        series.entry(labels).or_default().push((bound, sample.value));
    }
    for (labels, buckets) in series {
        let is_ascending = buckets.windows(2).all(|pair| pair[0].0 < pair[1].0 && pair[0].1 <= pair[1].1);
        let of = |suffix: &str| {
            let name = format!("{name}{suffix}");
            samples
                .iter()
                .find(|sample| sample.name == name && sample.labels == labels)
                .map(|sample| sample.value)
        };
        let (Some(count), Some(_)) = (of("_count"), of("_sum")) else {
            return Err(format!("{name}: no count or no sum"));
        };
        if !is_ascending || buckets.last() != Some(&(f64::INFINITY, count)) {
            return Err(format!("{name}: {buckets:?} with the count {count}"));
        }
    }
    Ok(())
}

fn belongs(sample: &str, family: &str) -> bool {
    let suffix = sample.strip_prefix(family);
    suffix.is_some_and(|suffix| ["", "_total", "_bucket", "_sum", "_count", "_info"].contains(&suffix))
}

fn is_name(name: &str) -> bool {
    name.starts_with(|char: char| char.is_ascii_alphabetic() || char == '_')
        && name.chars().all(|char| char.is_ascii_alphanumeric() || char == '_')
}

/// Reads labels behind their brace; returns them and what follows.
fn labels(text: &str) -> Result<(BTreeMap<String, String>, &str), String> {
    let (mut labels, mut rest) = (BTreeMap::new(), text);
    loop {
        let (name, value) = rest.split_once("=\"").ok_or("no label")?;
        if !is_name(name) {
            return Err(format!("{name} is no label"));
        }
        let (mut read, mut end, mut is_escaped) = (String::new(), None, false);
        for (at, char) in value.char_indices() {
            match char {
                'n' if is_escaped => read.push('\n'),
                '\\' | '"' if is_escaped => read.push(char),
                _ if is_escaped => return Err(format!("\\{char} is no escape")),
                '\\' => {
                    is_escaped = true;
                    continue;
                }
                '"' => {
                    end = Some(at);
                    break;
                }
                char => read.push(char),
            }
            is_escaped = false;
        }
        if labels.insert(name.to_owned(), read).is_some() {
            return Err(format!("the label {name} is there twice"));
        }
        rest = &value[end.ok_or("a label without an end")? + 1..];
        if let Some(rest) = rest.strip_prefix('}') {
            return Ok((labels, rest));
        }
        rest = rest.strip_prefix(',').ok_or("no comma between labels")?;
    }
}
