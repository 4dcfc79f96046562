use std::collections::BTreeMap;
use std::fmt;

use kvpool::LatencyHistogram;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet, text};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};

use super::families::FAMILIES;
use super::family::{Family, FamilyKind, PREFIX};
use super::histogram::{Seconds, seconds};

/// Content type of the text.
pub const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The values of metrics at one moment.
#[derive(Clone, Debug, Default)]
pub struct Scrape {
    /// By name of the family.
    values: BTreeMap<&'static str, Vec<(Vec<String>, Sample)>>,
}

#[derive(Clone, PartialEq, Debug)]
enum Sample {
    Number(f64),
    /// Exact above 2^53.
    Count(u64),
    Times(Seconds),
}

impl Scrape {
    /// Returns a scrape without values.
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the number of a gauge.
    ///
    /// # Panics
    /// As for [`count`](Self::count).
    pub fn number(&mut self, family: &Family, labels: &[&str], value: f64) {
        self.add(family, labels, Sample::Number(value));
    }

    /// Sets the integer value of a gauge, a counter or an info.
    ///
    /// # Panics
    /// If the number of labels is not the family's.
    pub fn count(&mut self, family: &Family, labels: &[&str], value: u64) {
        self.add(family, labels, Sample::Count(value));
    }

    /// Sets the times of a histogram.
    ///
    /// # Panics
    /// As for [`count`](Self::count).
    pub fn times(&mut self, family: &Family, labels: &[&str], times: &LatencyHistogram) {
        self.add(family, labels, Sample::Times(seconds(times)));
    }

    fn add(&mut self, family: &Family, labels: &[&str], sample: Sample) {
        assert_eq!(labels.len(), family.labels.len(), "the labels of {}", family.full_name());
        let labels = labels.iter().map(|&label| label.to_owned()).collect();
        self.values.entry(family.name).or_default().push((labels, sample));
    }

    /// Returns all values with the label `pool`, in the OpenMetrics 1.0 text format.
    pub fn encode(self, pool: &str) -> String {
        let label = ("pool".into(), pool.to_owned().into());
        let mut registry = Registry::with_prefix_and_labels(PREFIX, [label].into_iter());
        registry.register_collector(Box::new(self));
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = text::encode(&mut text, &registry);
        text
    }
}

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for family in FAMILIES {
            let Some(values) = self.values.get(family.name) else { continue };
            let unit = family.unit();
            let name = unit.map_or(family.name, |unit| &family.name[..family.name.len() - unit.len() - 1]);
            let unit = unit.map(|unit| Unit::Other(unit.to_owned()));
            let kind = match family.kind {
                FamilyKind::Gauge => MetricType::Gauge,
                FamilyKind::Counter => MetricType::Counter,
                FamilyKind::Histogram => MetricType::Histogram,
                FamilyKind::Info => MetricType::Info,
            };
            let mut metric = encoder.encode_descriptor(name, family.help, unit.as_ref(), kind)?;
            for (labels, sample) in values {
                let labels: Vec<(&str, &str)> =
                    family.labels.iter().copied().zip(labels.iter().map(String::as_str)).collect();
                if family.kind == FamilyKind::Info {
                    metric.encode_info(&labels)?;
                } else if labels.is_empty() {
                    sample.encode(family.kind, &mut metric)?;
                } else {
                    sample.encode(family.kind, &mut metric.encode_family(&labels)?)?;
                }
            }
        }
        Ok(())
    }
}

impl Sample {
    fn encode(&self, kind: FamilyKind, encoder: &mut MetricEncoder<'_>) -> fmt::Result {
        match (self, kind) {
            (Self::Times(times), _) => {
                encoder.encode_histogram::<NoLabelSet>(times.sum, times.count, &times.intervals, None)
            }
            (Self::Count(value), FamilyKind::Counter) => {
                encoder.encode_counter::<NoLabelSet, u64, f64>(value, None)
            }
            (Self::Number(value), FamilyKind::Counter) => {
                encoder.encode_counter::<NoLabelSet, f64, f64>(value, None)
            }
            (Self::Count(value), _) => encoder.encode_gauge(value),
            (Self::Number(value), _) => encoder.encode_gauge(value),
        }
    }
}
