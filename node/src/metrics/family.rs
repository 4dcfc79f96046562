pub(super) const PREFIX: &str = "kvpool";

/// Kind of a metric.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FamilyKind {
    /// A value that goes up and down.
    Gauge,
    /// A value that only grows; its name ends in `_total`.
    Counter,
    /// Times, by intervals.
    Histogram,
    /// The value 1, with facts as labels; its name ends in `_info`.
    Info,
}

/// A metric, which has a value for each combination of its labels.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Family {
    /// Name without prefix and without a counter's suffix.
    pub(super) name: &'static str,
    /// Kind.
    pub kind: FamilyKind,
    /// Names of its labels, besides `pool`.
    pub labels: &'static [&'static str],
    /// Meaning.
    pub help: &'static str,
}

impl Family {
    /// Returns the full name, such as `kvpool_evictions_total`, without a histogram's suffixes.
    pub fn full_name(&self) -> String {
        let suffix = match self.kind {
            FamilyKind::Counter => "_total",
            FamilyKind::Info => "_info",
            FamilyKind::Gauge | FamilyKind::Histogram => "",
        };
        format!("{PREFIX}_{}{suffix}", self.name)
    }

    /// Returns the unit at the end of its name, if Prometheus has it.
    pub(super) fn unit(&self) -> Option<&'static str> {
        ["seconds", "bytes"]
            .into_iter()
            .find(|unit| self.name.strip_suffix(unit).is_some_and(|rest| rest.ends_with('_')))
    }
}
