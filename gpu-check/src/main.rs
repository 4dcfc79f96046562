//! The program `gpu_check`: runs all checks and measurements, each section in a child process.

use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use clap::Parser;
use kvpool_cuda::CudaError;
use kvpool_gpu_check::report::{self, Summary};
use kvpool_gpu_check::supervise::{self, Job};
use kvpool_gpu_check::{LIMITS_S, Options, Part, SECTIONS, held, run};

/// Exit code if there is no device to check.
const EXIT_SKIPPED: u8 = 77;
/// Time within which the driver must start. Together with the sections' limits five minutes.
const PROBE_LIMIT: Duration = Duration::from_secs(300 - LIMITS_S);
/// Exit code if the device could not be used.
const EXIT_ERROR: u8 = 2;

/// Checks and measures kvpool on a GPU
///
/// Each section runs in a process of its own, with a time limit. All take at most five minutes,
/// unless the limits are changed.
///
/// Exit code: 0 if every check passed, 1 if one did not, 2 if the device could not be used, 77 if
/// there is no driver or no device.
#[derive(Debug, Parser)]
#[command(name = "gpu_check", version, max_term_width = 100)]
struct Args {
    /// Ordinal of the device
    #[arg(long, default_value_t = 0)]
    device: u16,
    /// Also write the report as JSON: a line per section, as soon as it is done, then one for the run
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
    /// List the sections with their time limits and the launches of pools that they measure
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
}

impl Args {
    fn options(&self) -> Options {
        Options { ordinal: self.device, quick: self.quick, tells: self.section.is_some() }
    }

    fn parts(&self) -> impl Iterator<Item = &'static Part> {
        SECTIONS.iter().filter(|part| self.only.is_empty() || self.only.iter().any(|only| only == part.name))
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
    match &args.section {
        _ if args.probe => probe(&args),
        _ if args.hold => hold(&args),
        Some(name) => child(&args, name),
        None => parent(&args),
    }
}

/// Lists the sections, and how each launches kernels: with bulk copies, and without.
fn list(limit_factor: f64) {
    for part in &SECTIONS {
        say(&format!("{:14} {:3.0} s", part.name, part.limit().mul_f64(limit_factor).as_secs_f64()));
        for work in part.works {
            let [with, without] = [true, false].map(|bulk| work.rule(bulk));
            say(&format!("    {work:?}: {with}"));
            if with != without {
                say(&format!("        without bulk copies: {without}"));
            }
        }
    }
}

/// Runs one section in this process.
fn child(args: &Args, name: &str) -> ExitCode {
    let part = SECTIONS.iter().find(|part| part.name == name).expect("the parser knows the sections");
    match run(part, &args.options()) {
        Ok(report) => {
            supervise::print(&report);
            ExitCode::from(u8::from(!report.section.passed()))
        }
        Err(error) => {
            eprintln!("cuda:{}: {error}", args.device);
            EXIT_ERROR.into()
        }
    }
}

/// Prints text. If the output is closed, the run goes on: its lines of JSON may be wanted.
fn say(text: &str) {
    let _ = writeln!(std::io::stdout(), "{text}");
}

/// Looks for the device, and says why it cannot be used.
fn probe(args: &Args) -> ExitCode {
    if let Err(error) =
        kvpool_cuda::devices().and_then(|devices| match devices.get(usize::from(args.device)) {
            None => Err(CudaError::NoDevice { ordinal: args.device.into(), count: devices.len() }),
            Some(device) => device.unusable.clone().map_or(Ok(()), Err),
        })
    {
        if let CudaError::NoDriver { .. } | CudaError::NoDevice { .. } = error {
            eprintln!("skipped: {error}");
            return EXIT_SKIPPED.into();
        }
        eprintln!("cuda:{}: {error}", args.device);
        return EXIT_ERROR.into();
    }
    ExitCode::SUCCESS
}

/// Keeps the device open, if other processes may use it then.
fn hold(args: &Args) -> ExitCode {
    let held = held(args.device);
    if let Ok(None) = held {
        eprintln!("cuda:{}: exclusive to one process: each section starts the device", args.device);
        return ExitCode::SUCCESS;
    }
    // The parent writes nothing.
    let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
    drop(held);
    ExitCode::SUCCESS
}

/// Runs the sections in child processes. Does not use the driver itself: it may hang, and a failure that
/// ends a process's context must not end this one.
fn parent(args: &Args) -> ExitCode {
    let program = match std::env::current_exe() {
        Ok(program) => program,
        Err(error) => {
            eprintln!("this program's own path: {error}");
            return EXIT_ERROR.into();
        }
    };
    let mut command = Command::new(&program);
    command.args(["--probe", "--device", &args.device.to_string()]);
    match supervise::ask(command, PROBE_LIMIT.mul_f64(args.limit_factor)).map(|status| status.code()) {
        Ok(Some(0)) => {}
        // It has said why.
        Ok(Some(code)) => return ExitCode::from(u8::try_from(code).unwrap_or(EXIT_ERROR)),
        Ok(None) => {
            eprintln!("cuda:{}: the process that looked for the device was killed", args.device);
            return EXIT_ERROR.into();
        }
        Err(error) => {
            eprintln!("cuda:{}: starting the driver: {error}", args.device);
            return EXIT_ERROR.into();
        }
    }
    let mut command = Command::new(&program);
    command.args(["--hold", "--device", &args.device.to_string()]);
    let _held = supervise::Held::start(command);
    let mut file = match args.json.as_ref().map(File::create).transpose() {
        Ok(file) => file,
        Err(error) => {
            eprintln!("{}: {error}", args.json.as_deref().unwrap_or(std::path::Path::new("")).display());
            return EXIT_ERROR.into();
        }
    };
    let job = |part: &'static Part| {
        let mut command = Command::new(&program);
        command.args(["--section", part.name, "--device", &args.device.to_string()]);
        if args.quick {
            command.arg("--quick");
        }
        command.envs(part.env());
        Job { name: part.name, limit: part.limit().mul_f64(args.limit_factor), command }
    };
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
    let reports = supervise::run(args.parts().map(job), |report| {
        if device.is_none() {
            device.clone_from(&report.device);
            device.iter().for_each(|facts| say(&report::render_device(facts)));
        }
        write(report::line(report));
        say(&report::render_section(&report.section));
    });
    let summary = Summary::of(&reports, begin.elapsed());
    write(report::line(&summary));
    say(&report::render_summary(&summary));
    if let Err(error) = written {
        eprintln!("{}: {error}", args.json.as_deref().unwrap_or(std::path::Path::new("")).display());
        return EXIT_ERROR.into();
    }
    ExitCode::from(u8::from(!summary.passed))
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
    }
}
