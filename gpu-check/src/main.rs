//! The program `gpu_check`: runs all checks and measurements, each section in a child process.

use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use clap::Parser;
use kvpool_cuda::CudaError;
use kvpool_cuda::launch::{Choices, Work};
use kvpool_gpu_check::report::{self, Section, Summary};
use kvpool_gpu_check::supervise::{self, Job};
use kvpool_gpu_check::variants::{VARIANTS, Variant};
use kvpool_gpu_check::{Options, Part, SECTIONS, held, run, start};

/// Exit code if there is no device to check.
const EXIT_SKIPPED: u8 = 77;
/// Exit code if the device could not be used.
const EXIT_ERROR: u8 = 2;

/// Checks and measures kvpool on a GPU
///
/// Each section runs in a process of its own, with a time limit. All take at most five minutes,
/// unless the machine is slow, by what a section measures first, or the limits are changed.
///
/// Exit code: 0 if every check passed, 1 if one did not, 2 if the device could not be used, 77 if
/// there is no driver or no device.
#[derive(Debug, Parser)]
#[command(name = "gpu_check", version, max_term_width = 100, args_override_self = true)]
struct Args {
    /// Ordinal of the device
    #[arg(long, default_value_t = 0)]
    device: u16,
    /// Also write the report as JSON: a line per section, as soon as it is done, then one for the
    /// run
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Small sizes and few rounds: runs the checks, but the figures are meaningless
    #[arg(long)]
    quick: bool,
    /// Multiply all time limits, also that of the start of the driver, by this number
    #[arg(long, value_name = "F", default_value_t = 1.0, value_parser = factor)]
    limit_factor: f64,
    /// Run only these sections
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', value_parser = SECTIONS.map(|part| part.name))]
    only: Vec<String>,
    /// Compare these variants with the default, or all: runs the sections that show the difference
    #[arg(long, value_name = "NAME,...", num_args = 0.., value_delimiter = ',')]
    #[arg(value_parser = VARIANTS.each_ref().map(|one| one.name))]
    variants: Option<Vec<String>>,
    /// List sections and variants with their time limits, and the launches of pools
    #[arg(long)]
    list: bool,
    /// Only look for the device, in this process
    #[arg(long, hide = true)]
    probe: bool,
    /// Keep the device open until the standard input ends
    #[arg(long, hide = true)]
    hold: bool,
    /// Run one section in this process, and print its report as a line
    #[arg(long, hide = true, value_parser = SECTIONS.map(|part| part.name))]
    section: Option<String>,
    /// The variant of that section
    #[arg(long, hide = true, value_parser = VARIANTS.each_ref().map(|one| one.name))]
    variant: Option<String>,
}

impl Args {
    fn options(&self) -> Options {
        let variant = VARIANTS.iter().find(|one| self.variant.as_deref() == Some(one.name));
        Options { ordinal: self.device, quick: self.quick, variant, tells: self.section.is_some() }
    }

    /// Returns the sections to run, in order; those of variants after the same ones without.
    fn runs(&self) -> Vec<(&'static Part, Option<&'static Variant>)> {
        let is_among = |names: &[String], name: &str| names.is_empty() || names.iter().any(|has| has == name);
        let parts: Vec<_> = SECTIONS.iter().filter(|part| is_among(&self.only, part.name)).collect();
        let Some(names) = &self.variants else { return parts.into_iter().map(|part| (part, None)).collect() };
        let of = |variant: &'static Variant| {
            let parts = parts.iter().filter(|part| variant.sections.contains(&part.name));
            parts.map(move |&part| (part, Some(variant)))
        };
        let runs: Vec<_> = VARIANTS.iter().filter(|one| is_among(names, one.name)).flat_map(of).collect();
        let is_needed = |part: &&&Part| runs.iter().any(|run: &(&Part, _)| run.0.name == part.name);
        let usual = parts.iter().filter(is_needed).map(|&part| (part, None));
        usual.chain(runs.iter().copied()).collect()
    }
}

/// Parses the factor of time limits.
fn factor(text: &str) -> Result<f64, String> {
    let factor: f64 = text.parse().map_err(|error| format!("{error}"))?;
    if (0.1..=100.0).contains(&factor) { Ok(factor) } else { Err("not between 0.1 and 100".into()) }
}

fn main() -> ExitCode {
    let args = Args::parse();
    if args.list {
        list(args.limit_factor);
        return ExitCode::SUCCESS;
    }
    if args.probe || args.hold || args.section.is_some() {
        supervise::end_with_parent();
    }
    let ended = match &args.section {
        _ if args.probe => probe(&args),
        _ if args.hold => hold(&args),
        Some(name) => child(&args, name),
        None => parent(&args),
    };
    ended.unwrap_or_else(|error| {
        eprintln!("{error}");
        EXIT_ERROR.into()
    })
}

/// Lists the sections, and how each launches kernels: with bulk copies, and without; and variants,
/// with their other launches.
fn list(limit_factor: f64) {
    let seconds = |limit: Duration| limit.mul_f64(limit_factor).as_secs_f64();
    let say_rule = |choices: &Choices, work: Work| {
        let [with, without] = [true, false].map(|bulk| choices.rule(work, bulk));
        say(&format!("    {work:?}: {with}"));
        if with != without {
            say(&format!("        without bulk copies: {without}"));
        }
    };
    for part in &SECTIONS {
        say(&format!("{:14} {:3.0} s", part.name, seconds(part.limit)));
        part.works.iter().for_each(|&work| say_rule(&Choices::DEFAULT, work));
    }
    for Variant { name, choices, env, sections } in &VARIANTS {
        let parts = || SECTIONS.iter().filter(|part| sections.contains(&part.name));
        let limit = seconds(parts().map(|part| part.limit).sum());
        let set = env.map_or(String::new(), |(key, value)| format!(" with {key}={value}"));
        say(&format!("{name:14} {limit:3.0} s: {}{set}", sections.join(", ")));
        let mut said = Vec::new();
        for &work in parts().flat_map(|part| part.works) {
            let differs = choices.rule(work, true) != Choices::DEFAULT.rule(work, true);
            if differs && !said.contains(&work) {
                said.push(work);
                say_rule(choices, work);
            }
        }
    }
}

/// Runs one section in this process.
fn child(args: &Args, name: &str) -> Result<ExitCode, String> {
    let part = SECTIONS.iter().find(|part| part.name == name).expect("the parser knows the sections");
    let report = run(part, &args.options()).map_err(|error| format!("cuda:{}: {error}", args.device))?;
    supervise::print(&report);
    Ok(u8::from(!report.section.passed()).into())
}

/// Prints text. If the output is closed, the run goes on: its lines of JSON may be wanted.
fn say(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// Looks for the device, and says why it cannot be used.
fn probe(args: &Args) -> Result<ExitCode, String> {
    let usable = kvpool_cuda::devices().and_then(|devices| match devices.get(usize::from(args.device)) {
        None => Err(CudaError::NoDevice { ordinal: args.device.into(), count: devices.len() }),
        Some(device) => device.unusable.clone().map_or(Ok(()), Err),
    });
    match usable {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error @ (CudaError::NoDriver { .. } | CudaError::NoDevice { .. })) => {
            eprintln!("skipped: {error}");
            Ok(EXIT_SKIPPED.into())
        }
        Err(error) => Err(format!("cuda:{}: {error}", args.device)),
    }
}

/// Keeps the device open, if other processes may use it then.
fn hold(args: &Args) -> Result<ExitCode, String> {
    let held = held(args.device);
    if let Ok(None) = held {
        eprintln!("cuda:{}: exclusive to one process: each section starts the device", args.device);
        return Ok(ExitCode::SUCCESS);
    }
    // The parent writes nothing.
    let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
    drop(held);
    Ok(ExitCode::SUCCESS)
}

/// Runs the sections in child processes. Does not use the driver itself: it may hang, and a failure
/// that ends a process's context must not end this one.
fn parent(args: &Args) -> Result<ExitCode, String> {
    let program = std::env::current_exe().map_err(|error| format!("this program's own path: {error}"))?;
    let command = |options: &[&str]| {
        let mut command = Command::new(&program);
        command.args(options).args(["--device", &args.device.to_string()]);
        command
    };
    let asked = supervise::ask(command(&["--probe"]), start::LIMIT.mul_f64(args.limit_factor))
        .and_then(|status| status.code().ok_or_else(|| "its process was killed".into()));
    match asked.map_err(|error| format!("cuda:{}: starting the driver: {error}", args.device))? {
        0 => {}
        // It has said why.
        code => return Ok(u8::try_from(code).unwrap_or(EXIT_ERROR).into()),
    }
    let _held = supervise::Held::start(command(&["--hold"]));
    let failed =
        |error| format!("{}: {error}", args.json.as_deref().unwrap_or(std::path::Path::new("")).display());
    let mut file = args.json.as_ref().map(File::create).transpose().map_err(failed)?;
    let job = |(part, variant): (&'static Part, Option<&'static Variant>)| {
        let mut command = command(&["--section", part.name]);
        command.args(args.quick.then_some("--quick"));
        command.args(variant.into_iter().flat_map(|variant| ["--variant", variant.name]));
        command.envs(part.env(variant));
        Job { name: part.title(variant), limit: part.limit, factor: args.limit_factor, command }
    };
    let mut usual: Vec<Section> = Vec::new();
    let mut written = Ok(());
    let mut write = |line: String| {
        if let (Some(file), Ok(())) = (&mut file, &written) {
            // Each line is complete in the file before the next section begins.
            written = writeln!(file, "{line}");
            // A pipe cannot be synchronized.
            let _ = file.sync_data();
        }
    };
    let (begin, mut device) = (Instant::now(), None);
    let reports = supervise::run(args.runs().into_iter().map(job), |report| {
        if device.is_none() {
            device.clone_from(&report.device);
            device.iter().for_each(|facts| say(&report::render_device(facts)));
        }
        let section = &mut report.section;
        let part = section.name.split_once(", ").map(|(part, _)| part.to_owned());
        match usual.iter().find(|usual| Some(&usual.name) == part.as_ref()) {
            Some(usual) => section.relate(usual, "the default"),
            None => usual.push(section.clone()),
        }
        write(report::line(report));
        say(&report::render_section(&report.section));
    });
    let summary = Summary::of(&reports, begin.elapsed());
    write(report::line(&summary));
    say(&report::render_summary(&summary));
    written.map_err(failed)?;
    Ok(u8::from(!summary.passed).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_factor_of_limits_is_a_number_that_makes_sense() {
        let parsed = |text: &str| Args::try_parse_from(["gpu_check", "--limit-factor", text]);
        assert!((parsed("2.5").expect("a factor").limit_factor - 2.5).abs() < 1e-9);
        assert!(Args::try_parse_from(["gpu_check"]).is_ok_and(|args| args.limit_factor == 1.0));
        for text in ["0", "0.01", "101", "1e300", "nan", "inf", "", "2x"] {
            assert!(parsed(text).is_err(), "{text}");
        }
        assert!(Args::try_parse_from(["gpu_check", "--limit-factor=-1"]).is_err());
        let last =
            Args::try_parse_from(["gpu_check", "--limit-factor=9", "--quick", "--limit-factor=2", "--quick"]);
        assert!((last.expect("the last one counts").limit_factor - 2.0).abs() < 1e-9);
    }

    /// On a machine with one device, `crossing` ends at once.
    #[test]
    fn all_sections_and_the_start_of_the_driver_take_at_most_five_minutes() {
        let limits = SECTIONS.iter().filter(|part| part.name != "crossing").map(|part| part.limit);
        assert!(limits.sum::<Duration>() + start::LIMIT <= Duration::from_secs(300));
    }

    #[test]
    fn variants_run_behind_the_sections_that_they_compare() {
        let runs = |options: &[&str]| -> Vec<String> {
            let args = Args::try_parse_from(["gpu_check"].iter().chain(options)).expect("options");
            args.runs().iter().map(|(part, variant)| part.title(*variant)).collect()
        };
        assert_eq!(runs(&[]), SECTIONS.map(|part| part.name));
        assert_eq!(runs(&["--only", "load,host"]), ["load", "host"]);
        let compared = ["compaction", "graph", "compaction, long-waves", "graph, long-waves"];
        assert_eq!(runs(&["--variants", "long-waves"]), compared);
        let some = ["host", "host, one-stream", "host, host-ctas-8"];
        assert_eq!(runs(&["--only", "load,host", "--variants", "one-stream,host-ctas-8"]), some);
        assert_eq!(runs(&["--only", "load", "--variants"]), [""; 0]);
        let all = runs(&["--variants"]);
        assert_eq!(all.len(), 7 + VARIANTS.iter().map(|one| one.sections.len()).sum::<usize>());
        assert!(Args::try_parse_from(["gpu_check", "--variants", "none-such"]).is_err());
    }
}
