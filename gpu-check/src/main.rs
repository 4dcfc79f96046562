//! The program `gpu_check`: runs all checks and measurements.

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use kvpool::cuda::CudaError;
use kvpool_gpu_check::{Options, SECTIONS, report, run};

/// Exit code if there is no device to check.
const EXIT_SKIPPED: u8 = 77;
/// Exit code if the device could not be used.
const EXIT_ERROR: u8 = 2;

/// Checks and measures kvpool on a GPU
///
/// Exit code: 0 if every check passed, 1 if one did not, 2 if the device could not be used, 77 if
/// there is no driver or no device.
#[derive(Debug, Parser)]
#[command(name = "gpu_check", version, max_term_width = 100)]
struct Args {
    /// Ordinal of the device
    #[arg(long, default_value_t = 0)]
    device: u16,
    /// Also write the report as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Small sizes and few rounds: runs the checks, but the figures are meaningless
    #[arg(long)]
    quick: bool,
    /// Run only these sections
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', value_parser = SECTIONS.map(|(name, _)| name))]
    only: Vec<String>,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let options = Options { ordinal: args.device, quick: args.quick, only: args.only };
    let report = match run(&options) {
        Ok(Ok(report)) => report,
        Ok(Err(error)) => {
            eprintln!("cuda:{}: {error}", args.device);
            return EXIT_ERROR.into();
        }
        Err(error @ (CudaError::NoDriver { .. } | CudaError::NoDevice { .. })) => {
            eprintln!("skipped: {error}");
            return EXIT_SKIPPED.into();
        }
        Err(error) => {
            eprintln!("cuda:{}: {error}", args.device);
            return EXIT_ERROR.into();
        }
    };
    println!("{}", report::render(&report));
    if let Some(path) = args.json {
        let text = serde_json::to_string_pretty(&report).expect("numbers and text serialise to JSON");
        if let Err(error) = fs::write(&path, text + "\n") {
            eprintln!("{}: {error}", path.display());
            return EXIT_ERROR.into();
        }
    }
    ExitCode::from(u8::from(!report.passed))
}
