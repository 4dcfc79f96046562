//! What the process of a section measures first, and the time limit that follows from it.
//!
//! The limits of sections are several times what an H200 takes. A slower host, bus or device is
//! known by a fixed job before the section begins, and gets more time in proportion. The start of
//! the device is not part of that time, and has a limit of its own ([`LIMIT`]).

use std::time::{Duration, Instant};

use kvpool_testkit::rng::Rng;
use serde::{Deserialize, Serialize};

use crate::gpu::{Gpu, Outcome, ProbeParams, launch};

/// Time within which a process must have started the driver and opened the device.
pub const LIMIT: Duration = Duration::from_secs(20);

/// Bytes of the job.
const JOB_BYTES: usize = 8 << 20;

/// Launches of the job, each of which is waited for.
const JOB_LAUNCHES: usize = 32;

/// Time of the job in milliseconds above which a machine gets more time: about twice what an H200
/// takes by its rates.
pub const JOB_MS: f64 = 25.0;

/// The largest factor for a slow machine.
pub const PACE_MAX: f64 = 10.0;

/// What the process of a section measures first.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
pub struct Start {
    /// Time to open the device, in seconds.
    pub opened_s: f64,
    /// Time of a fixed job in milliseconds.
    pub job_ms: f64,
}

/// A time limit, and its reason.
#[derive(Clone, PartialEq, Debug)]
pub struct TimeLimit {
    /// The limit.
    pub time: Duration,
    /// Why it is this long.
    pub why: String,
}

impl Start {
    /// Runs the job: bytes written by the host, copied to the device, there, and back, and
    /// compared; and short launches.
    ///
    /// # Errors
    /// An error of the device, or wrong bytes.
    pub fn measure(gpu: &Gpu) -> Outcome<Self> {
        let begin = Instant::now();
        let (stream, _) = gpu.stream()?;
        let bytes = Rng(1).bytes(JOB_BYTES);
        let (from, to) = (gpu.upload(&bytes)?, gpu.buffer(JOB_BYTES)?);
        let (copy, burn) = (gpu.probe("kvp_probe_copy")?, gpu.probe("kvp_probe_burn")?);
        let params = ProbeParams::copy(from.address(), to.address(), JOB_BYTES);
        // SAFETY: both buffers have this length, and are kept until the stream has been waited for.
        unsafe { launch(&stream, &copy, gpu.multiprocessors, &params)? };
        if to.download(&stream)? != bytes {
            return Err("a linear copy is wrong".into());
        }
        for _ in 0..JOB_LAUNCHES {
            // SAFETY: writes at most the first word of the buffer.
            unsafe { launch(&stream, &burn, 1, &ProbeParams::burn(to.address(), 1))? };
            stream.synchronize()?;
        }
        Ok(Self { opened_s: gpu.opened_ms / 1e3, job_ms: begin.elapsed().as_secs_f64() * 1e3 })
    }

    /// Returns the limit for a section that has this one on a fast machine.
    #[must_use]
    pub fn limit(&self, base: Duration, factor: f64) -> TimeLimit {
        let pace = (self.job_ms / JOB_MS).clamp(1.0, PACE_MAX);
        let (time, base) = (base.mul_f64(pace * factor), base.as_secs_f64());
        let (job, opened) = (self.job_ms, self.opened_s);
        let why = format!(
            "its limit is {base:.0} s, times {pace:.1} because this machine took {job:.0} ms for a job that may take \
             {JOB_MS:.0}, times {factor} by --limit-factor; the device was opened before, in {opened:.1} s"
        );
        TimeLimit { time, why }
    }

    /// Returns the limit before a process has measured anything.
    #[must_use]
    pub fn before(factor: f64) -> TimeLimit {
        let seconds = LIMIT.as_secs();
        let why = format!("it has {seconds} s, times {factor} by --limit-factor, to open the device");
        TimeLimit { time: LIMIT.mul_f64(factor), why }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_machines_get_more_time_in_proportion() {
        let limit = |job_ms, factor| {
            Start { opened_s: 0.4, job_ms }.limit(Duration::from_secs(15), factor).time.as_secs_f64()
        };
        assert_eq!([limit(1.0, 1.0), limit(JOB_MS, 1.0), limit(2.0 * JOB_MS, 1.0)], [15.0, 15.0, 30.0]);
        assert_eq!([limit(1e6, 1.0), limit(3.0 * JOB_MS, 2.0)], [15.0 * PACE_MAX, 90.0]);
        let why = Start { opened_s: 0.4, job_ms: 60.0 }.limit(Duration::from_secs(15), 2.0).why;
        assert!(why.contains("15 s, times 2.4") && why.contains("times 2 by"), "{why}");
        assert_eq!(Start::before(0.5).time, LIMIT / 2);
    }
}
