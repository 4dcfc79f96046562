//! Interrupts (Ctrl-C): the first asks a command to end, the second ends the program.

use std::process;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::EXIT_INTERRUPTED;
use crate::output::complain;

static IS_INTERRUPTED: AtomicBool = AtomicBool::new(false);

pub fn catch() {
    let caught = ctrlc::set_handler(|| {
        if IS_INTERRUPTED.swap(true, Relaxed) {
            process::exit(EXIT_INTERRUPTED.into());
        }
    });
    if let Err(error) = caught {
        complain(format_args!("an interrupt will lose the report: {error}"));
    }
}

pub fn is_interrupted() -> bool {
    IS_INTERRUPTED.load(Relaxed)
}
