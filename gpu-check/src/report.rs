//! Reports: checks that passed or failed, and measured figures.

use std::fmt::{Display, Write as _};
use std::time::Duration;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{Cell, CellAlignment, Table};
use serde::{Deserialize, Serialize};

use crate::clocks::Clocks;
use crate::start::Start;

/// Prefix of the line with a section's results so far, which remain if its process is killed.
pub const SO_FAR: &str = "gpu_check-so-far ";

/// Results of one section, as its process reports them.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct SectionReport {
    /// The device and the program; `None` if the section's process did not get that far.
    pub device: Option<DeviceFacts>,
    /// The section.
    pub section: Section,
}

/// Results of one run.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Summary {
    /// True if no check failed.
    pub passed: bool,
    /// Number of sections.
    pub sections: usize,
    /// Names of the sections that failed.
    pub failed: Vec<String>,
    /// Total time in seconds.
    pub seconds: f64,
}

/// Properties of the device, as reported by its driver and the system, and of this program.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct DeviceFacts {
    /// Commit that the program was built from.
    pub commit: String,
    /// Product name.
    pub name: String,
    /// Ordinal.
    pub ordinal: usize,
    /// Compute capability.
    pub capability: String,
    /// CUDA version of the driver.
    pub driver: String,
    /// Version of the kernel's driver; empty if the system does not tell.
    pub kernel_driver: String,
    /// Number of multiprocessors.
    pub multiprocessors: u32,
    /// Memory in bytes.
    pub memory_bytes: u64,
    /// Maximum clock of the multiprocessors in MHz.
    pub clock_mhz: u32,
    /// Maximum clock of the memory in MHz.
    pub memory_clock_mhz: u32,
    /// Width of the memory's bus in bits.
    pub memory_bus_bits: u32,
    /// Speed and width of the link to the host; empty if the system does not tell.
    pub link: String,
    /// True if only one process may use the device: none keeps it started between sections.
    pub exclusive: bool,
    /// The form in which the pool has loaded its kernels: PTX, or machine code.
    pub kernels: String,
    /// Time to open the device for a pool, with its kernels, in milliseconds.
    pub open_ms: f64,
    /// Time to load the kernels, which is a part of that, in milliseconds.
    pub load_ms: f64,
}

/// One section of checks and measurements.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize)]
pub struct Section {
    /// Name of the section.
    pub name: String,
    /// Checks in the section.
    pub checks: Vec<Check>,
    /// Figures in the section.
    pub figures: Vec<Figure>,
    /// What its process has measured first, on which its time limit depends.
    pub start: Option<Start>,
    /// Time in seconds.
    pub seconds: f64,
    /// The time limit in seconds that it had in the end; see [`Start`].
    pub limit_s: f64,
    /// The error that ended the section early.
    pub error: Option<String>,
    /// The device's clocks during the section; `None` if they are not known.
    pub clocks: Option<Clocks>,
    /// True if each result is printed at once, for the parent process.
    #[serde(skip)]
    pub tells: bool,
}

/// A check.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Check {
    /// Name of the check.
    pub what: String,
    /// True if it passed.
    pub passed: bool,
    /// Observed values.
    pub detail: String,
}

/// A measured figure.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Figure {
    /// Name of the figure.
    pub what: String,
    /// Measured value.
    pub value: f64,
    /// Unit of the value.
    pub unit: String,
    /// Ratio to the baseline, if there is one.
    pub ratio: Option<f64>,
    /// Name of the baseline, which was measured in the same run.
    pub of: Option<String>,
}

impl Section {
    /// Creates an empty section.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self { name: name.into(), ..Self::default() }
    }

    /// Prints what is known so far, if the parent process wants it.
    pub fn tell(&self) {
        if self.tells {
            println!("{SO_FAR}{}", line(self));
        }
    }

    /// Adds a check.
    pub fn check(&mut self, what: impl Into<String>, passed: bool, detail: impl Into<String>) {
        self.checks.push(Check { what: what.into(), passed, detail: detail.into() });
        self.tell();
    }

    /// Adds a check that a number is zero: of bytes that differ, for example, as `unit` says.
    pub fn none(&mut self, what: impl Into<String>, wrong: usize, unit: impl Display) {
        self.check(what, wrong == 0, format!("{wrong} {unit}"));
    }

    /// Adds a figure without a baseline.
    pub fn figure(&mut self, what: impl Into<String>, value: f64, unit: &str) {
        self.add(Figure { what: what.into(), value, unit: unit.into(), ratio: None, of: None });
    }

    /// Adds a figure with its ratio to a baseline.
    pub fn ratio(&mut self, what: impl Into<String>, value: f64, unit: &str, ratio: f64, of: &str) {
        let (unit, of) = (unit.into(), Some(of.into()));
        self.add(Figure { what: what.into(), value, unit, ratio: Some(ratio), of });
    }

    fn add(&mut self, figure: Figure) {
        self.figures.push(figure);
        self.tell();
    }

    /// Adds the median and the 99th percentile of the times, with their ratios to the median of a
    /// baseline if there is one. Returns the median.
    pub fn latency(
        &mut self,
        what: &str,
        mut times: Vec<Duration>,
        baseline: Option<(Duration, &str)>,
    ) -> Duration {
        times.sort_unstable();
        let [median, _] = [("p50", 0.5), ("p99", 0.99)].map(|(name, share)| {
            let at = ((times.len() as f64 * share) as usize).min(times.len().saturating_sub(1));
            let Some(&time) = times.get(at) else { return Duration::ZERO };
            let (what, us) = (format!("{what}, {name}"), time.as_secs_f64() * 1e6);
            match baseline {
                None => self.figure(what, us, "us"),
                Some((baseline, of)) => {
                    self.ratio(what, us, "us", time.as_secs_f64() / baseline.as_secs_f64().max(1e-9), of);
                }
            }
            time
        });
        median
    }

    /// Relates the figures to those of another run of the section.
    pub fn relate(&mut self, other: &Self, of: &str) {
        for figure in &mut self.figures {
            let same = other.figures.iter().find(|has| has.what == figure.what);
            figure.ratio = same.map(|same| figure.value / same.value);
            figure.of = same.map(|_| of.into());
        }
    }

    /// Returns true if the section completed and all checks passed.
    #[must_use]
    pub fn passed(&self) -> bool {
        self.error.is_none() && self.checks.iter().all(|check| check.passed)
    }
}

impl Summary {
    /// Returns the summary of the sections.
    #[must_use]
    pub fn of(reports: &[SectionReport], time: Duration) -> Self {
        let failed: Vec<String> = reports
            .iter()
            .filter(|report| !report.section.passed())
            .map(|report| report.section.name.clone())
            .collect();
        Self { passed: failed.is_empty(), sections: reports.len(), failed, seconds: time.as_secs_f64() }
    }
}

/// Formats a report as one line of JSON.
#[must_use]
pub fn line(report: &impl Serialize) -> String {
    serde_json::to_string(report).expect("numbers and text serialise to JSON")
}

/// Formats the device and the program.
#[must_use]
pub fn render_device(facts: &DeviceFacts) -> String {
    let gib = facts.memory_bytes as f64 / f64::from(1 << 30);
    let or_unknown = |text: &str| if text.is_empty() { "unknown".to_owned() } else { text.to_owned() };
    format!(
        "cuda:{}: {}, compute capability {}, {} multiprocessors at up to {} MHz, {gib:.1} GiB on {} bits at up to {} MHz\n\
         driver for CUDA {}, kernel driver {}, link {}{}; opened in {:.0} ms with kernels as {}, loaded in {:.1} ms; commit {}",
        facts.ordinal,
        facts.name,
        facts.capability,
        facts.multiprocessors,
        facts.clock_mhz,
        facts.memory_bus_bits,
        facts.memory_clock_mhz,
        facts.driver,
        or_unknown(&facts.kernel_driver),
        or_unknown(&facts.link),
        if facts.exclusive { ", exclusive to one process, and started by each section" } else { "" },
        facts.open_ms,
        facts.kernels,
        facts.load_ms,
        facts.commit,
    )
}

/// Formats a section as tables.
#[must_use]
pub fn render_section(section: &Section) -> String {
    // Writing to a string does not fail.
    let clocks = section.clocks.as_ref().map_or_else(
        || "clocks unknown".to_owned(),
        |clocks| {
            let Clocks { samples, sm_mhz, memory_mhz, celsius, reasons } = clocks;
            let range = |[low, high]: [u32; 2]| {
                if low == high { format!("{low} MHz") } else { format!("{low} to {high} MHz") }
            };
            let (sm, memory) = (range(*sm_mhz), range(*memory_mhz));
            let celsius = celsius.map_or(String::new(), |celsius| format!(", up to {celsius} C"));
            let reasons = reasons.map_or(String::new(), |reasons| format!(", clock reasons {reasons:#x}"));
            format!("{sm}, memory {memory}{celsius}{reasons}, in {samples} samples")
        },
    );
    let Section { name, seconds, limit_s, .. } = section;
    let mut text = format!("\n{name} ({seconds:.1} s of {limit_s:.0}; {clocks})\n");
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
                Cell::new(&figure.unit),
                right(figure.ratio.map_or(String::new(), |ratio| format!("{ratio:.3}"))),
                Cell::new(figure.of.as_deref().unwrap_or("")),
            ]);
        }
        let _ = writeln!(text, "{table}");
    }
    if let Some(error) = &section.error {
        let _ = writeln!(text, "FAIL  ended early: {error}");
    }
    text
}

/// Formats the end of a run.
#[must_use]
pub fn render_summary(summary: &Summary) -> String {
    let Summary { passed, sections, failed, seconds } = summary;
    if *passed {
        return format!("all checks passed, {seconds:.0} s");
    }
    format!("{} of {sections} sections failed: {}, {seconds:.0} s", failed.len(), failed.join(", "))
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

    fn reports(section: Section) -> [SectionReport; 1] {
        [SectionReport { device: None, section }]
    }

    #[test]
    fn a_failure_is_seen() {
        let mut section = Section::new("kernels");
        section.check("good", true, "");
        let end = |section: &Section| render_summary(&Summary::of(&reports(section.clone()), Duration::ZERO));
        assert!(end(&section).contains("all checks passed"));
        section.check("bad", false, "3 bytes differ");
        let text = render_section(&section);
        assert!(text.contains("FAIL") && text.contains("3 bytes differ"));
        assert!(end(&section).contains("1 of 1 sections failed: kernels"));
        let mut early = Section::new("early");
        early.error = Some("out of memory".into());
        assert!(!early.passed());
    }

    #[test]
    fn a_report_is_one_line_and_is_read_back() {
        let mut section = Section::new("host");
        section.check("two\nlines", true, "\"quoted\"");
        section.ratio("copies", 1.25, "GB/s", 0.5, "a baseline");
        let [report] = reports(section);
        let line = line(&report);
        assert!(!line.contains('\n'));
        assert_eq!(serde_json::from_str::<SectionReport>(&line).expect("valid"), report);
    }

    #[test]
    fn percentiles_are_of_sorted_times() {
        let mut section = Section::new("latency");
        section.latency("wake", (0..100).rev().map(Duration::from_micros).collect(), None);
        let values: Vec<f64> = section.figures.iter().map(|figure| figure.value.round()).collect();
        assert_eq!(values, [50.0, 99.0]);
    }
}
