//! Reports: checks that passed or failed, and measured figures.

use std::fmt::Write as _;
use std::time::Duration;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, Table};
use serde::Serialize;

/// Results of one run.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The device.
    pub device: DeviceFacts,
    /// True if no check failed.
    pub passed: bool,
    /// Total time in seconds.
    pub seconds: f64,
    /// Sections in the order in which they ran.
    pub sections: Vec<Section>,
}

/// Properties of the device, as reported by its driver.
#[derive(Clone, Debug, Serialize)]
pub struct DeviceFacts {
    /// Product name.
    pub name: String,
    /// Ordinal.
    pub ordinal: usize,
    /// Compute capability.
    pub capability: String,
    /// CUDA version of the driver.
    pub driver: String,
    /// Number of multiprocessors.
    pub multiprocessors: u32,
    /// Memory in bytes.
    pub memory_bytes: u64,
}

/// One section of checks and measurements.
#[derive(Clone, Debug, Serialize)]
pub struct Section {
    /// Name of the section.
    pub name: &'static str,
    /// Checks in the section.
    pub checks: Vec<Check>,
    /// Figures in the section.
    pub figures: Vec<Figure>,
    /// Time in seconds.
    pub seconds: f64,
    /// The error that ended the section early.
    pub error: Option<String>,
}

/// A check.
#[derive(Clone, Debug, Serialize)]
pub struct Check {
    /// Name of the check.
    pub what: String,
    /// True if it passed.
    pub passed: bool,
    /// Observed values.
    pub detail: String,
}

/// A measured figure.
#[derive(Clone, Debug, Serialize)]
pub struct Figure {
    /// Name of the figure.
    pub what: String,
    /// Measured value.
    pub value: f64,
    /// Unit of the value.
    pub unit: &'static str,
    /// Ratio to the baseline, if there is one.
    pub ratio: Option<f64>,
    /// Name of the baseline.
    pub of: Option<&'static str>,
}

impl Section {
    /// Creates an empty section.
    #[must_use]
    pub fn new(name: &'static str) -> Self {
        Self { name, checks: Vec::new(), figures: Vec::new(), seconds: 0.0, error: None }
    }

    /// Adds a check.
    pub fn check(&mut self, what: impl Into<String>, passed: bool, detail: impl Into<String>) {
        self.checks.push(Check { what: what.into(), passed, detail: detail.into() });
    }

    /// Adds a figure without a baseline.
    pub fn figure(&mut self, what: impl Into<String>, value: f64, unit: &'static str) {
        self.figures.push(Figure { what: what.into(), value, unit, ratio: None, of: None });
    }

    /// Adds a figure with its ratio to a baseline.
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

    /// Adds the median and the 99th percentile of the times.
    pub fn latency(&mut self, what: &str, mut times: Vec<Duration>) {
        times.sort_unstable();
        for (name, share) in [("p50", 0.5), ("p99", 0.99)] {
            let at = ((times.len() as f64 * share) as usize).min(times.len().saturating_sub(1));
            if let Some(time) = times.get(at) {
                self.figure(format!("{what}, {name}"), time.as_secs_f64() * 1e6, "us");
            }
        }
    }

    /// Returns true if the section completed and all checks passed.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.error.is_none() && self.checks.iter().all(|check| check.passed)
    }
}

/// Formats the report as tables.
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
            let mut table = table(["", "check", "observed"]);
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

/// Formats a number with three or four significant digits.
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
