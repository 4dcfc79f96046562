//! What was found: checks that passed or failed, and figures.

use std::fmt::Write as _;
use std::time::Duration;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, Table};
use serde::Serialize;

/// Everything that one run found.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The device.
    pub device: DeviceFacts,
    /// Whether no check failed.
    pub passed: bool,
    /// From beginning to end.
    pub seconds: f64,
    /// In the order in which they ran.
    pub sections: Vec<Section>,
}

/// The device, as its driver describes it.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceFacts {
    /// Its name.
    pub name: String,
    /// Its number.
    pub ordinal: usize,
    /// Compute capability.
    pub capability: String,
    /// Version of CUDA that the driver speaks.
    pub driver: String,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// Bytes of memory.
    pub memory_bytes: u64,
}

/// One thing that was looked into.
#[derive(Clone, Debug, Serialize)]
pub struct Section {
    /// Its name.
    pub name: &'static str,
    /// What must hold.
    pub checks: Vec<Check>,
    /// What was measured.
    pub figures: Vec<Figure>,
    /// How long it took.
    pub seconds: f64,
    /// Why it was ended early: what it could not do.
    pub error: Option<String>,
}

/// Something that must hold.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// What.
    pub what: String,
    /// Whether it does.
    pub passed: bool,
    /// What was seen.
    pub detail: String,
}

/// Something that was measured.
#[derive(Clone, Debug, Serialize)]
pub struct Figure {
    /// What.
    pub what: String,
    /// How much.
    pub value: f64,
    /// Of what.
    pub unit: &'static str,
    /// Its ratio to what it is measured by, if there is such a thing.
    pub ratio: Option<f64>,
    /// What it is measured by.
    pub of: Option<&'static str>,
}

impl Section {
    /// Nothing found yet.
    #[must_use]
    pub fn new(name: &'static str) -> Self {
        Self { name, checks: Vec::new(), figures: Vec::new(), seconds: 0.0, error: None }
    }

    /// Notes a check.
    pub fn check(&mut self, what: impl Into<String>, passed: bool, detail: impl Into<String>) {
        self.checks.push(Check { what: what.into(), passed, detail: detail.into() });
    }

    /// Notes a figure that stands for itself.
    pub fn figure(&mut self, what: impl Into<String>, value: f64, unit: &'static str) {
        self.figures.push(Figure { what: what.into(), value, unit, ratio: None, of: None });
    }

    /// Notes a figure and its ratio to another.
    pub fn ratio(
        &mut self,
        what: impl Into<String>,
        value: f64,
        unit: &'static str,
        ratio: f64,
        of: &'static str,
    ) {
        self.figures.push(Figure { what: what.into(), value, unit, ratio: Some(ratio), of: Some(of) });
    }

    /// Notes the median and the 99th percentile of some times.
    pub fn latency(&mut self, what: &str, mut times: Vec<Duration>) {
        times.sort_unstable();
        for (name, share) in [("p50", 0.5), ("p99", 0.99)] {
            let at = ((times.len() as f64 * share) as usize).min(times.len().saturating_sub(1));
            if let Some(time) = times.get(at) {
                self.figure(format!("{what}, {name}"), time.as_secs_f64() * 1e6, "us");
            }
        }
    }

    /// Whether all that must hold does.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.error.is_none() && self.checks.iter().all(|check| check.passed)
    }
}

/// The report as tables.
#[must_use]
pub fn render(report: &Report) -> String {
    let DeviceFacts { name, ordinal, capability, driver, multiprocessors, memory_bytes } = &report.device;
    let gib = *memory_bytes as f64 / f64::from(1 << 30);
    let mut text = format!(
        "cuda:{ordinal}: {name}, compute capability {capability}, {multiprocessors} multiprocessors, {gib:.1} GiB, driver for CUDA {driver}\n"
    );
    for section in &report.sections {
        // Writing to a string does not fail.
        let _ = writeln!(text, "\n{} ({:.1} s)", section.name, section.seconds);
        if !section.checks.is_empty() {
            let mut table = table(["", "check", "seen"]);
            for check in &section.checks {
                let mark = if check.passed { "pass" } else { "FAIL" };
                table.add_row([mark, &check.what, &check.detail]);
            }
            let _ = writeln!(text, "{table}");
        }
        if !section.figures.is_empty() {
            let mut table = table(["figure", "value", "unit", "ratio", "to"]);
            for figure in &section.figures {
                let right = |text: String| Cell::new(text).set_alignment(CellAlignment::Right);
                table.add_row([
                    Cell::new(&figure.what),
                    right(number(figure.value)),
                    Cell::new(figure.unit),
                    right(figure.ratio.map_or(String::new(), |ratio| format!("{ratio:.3}"))),
                    Cell::new(figure.of.unwrap_or("")),
                ]);
            }
            let _ = writeln!(text, "{table}");
        }
        if let Some(error) = &section.error {
            let _ = writeln!(text, "FAIL  ended early: {error}");
        }
    }
    let failed = report.sections.iter().filter(|section| !section.passed()).count();
    let end = if report.passed {
        "all checks passed".to_owned()
    } else {
        format!("{failed} of {} sections failed", report.sections.len())
    };
    let _ = write!(text, "\n{end}, {:.0} s", report.seconds);
    text
}

fn table<const N: usize>(head: [&str; N]) -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED).set_header(head);
    table
}

/// Three or four digits that say something.
fn number(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        100.0.. => format!("{value:.0}"),
        1.0.. => format!("{value:.2}"),
        _ => format!("{value:.4}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(section: Section) -> Report {
        let device = DeviceFacts {
            name: "a device".into(),
            ordinal: 0,
            capability: "9.0".into(),
            driver: "12.8".into(),
            multiprocessors: 4,
            memory_bytes: 1 << 32,
        };
        Report { device, passed: section.passed(), seconds: 1.0, sections: vec![section] }
    }

    #[test]
    fn a_failure_is_seen() {
        let mut section = Section::new("kernels");
        section.check("good", true, "");
        assert!(render(&report(section.clone())).contains("all checks passed"));
        section.check("bad", false, "3 bytes differ");
        let text = render(&report(section.clone()));
        assert!(
            text.contains("FAIL")
                && text.contains("3 bytes differ")
                && text.contains("1 of 1 sections failed")
        );
        let mut early = Section::new("early");
        early.error = Some("out of memory".into());
        assert!(!early.passed());
    }

    #[test]
    fn percentiles_are_of_sorted_times() {
        let mut section = Section::new("latency");
        section.latency("wake", (0..100).rev().map(Duration::from_micros).collect());
        let values: Vec<f64> = section.figures.iter().map(|figure| figure.value.round()).collect();
        assert_eq!(values, [50.0, 99.0]);
    }
}
