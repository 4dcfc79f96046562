//! Signals to the process.
//!
//! A task of the runtime receives them, so that a second termination signal takes effect in any
//! state: it ends the process immediately, with 128 and the signal's number as the exit code.

use std::io;
use std::process;
use std::sync::Arc;

use tokio::signal::unix::SignalKind;
use tokio::sync::{Notify, watch};

use crate::signals::{Signals as Taken, exit_code};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Signal {
    End,
    Reload,
}

/// Signals that have arrived, and those to come.
pub(super) struct Signals {
    ended: watch::Receiver<bool>,
    reload: Arc<Notify>,
}

impl Signals {
    /// Catches signals from now on, on the current runtime. Fails with the system's error.
    pub fn new() -> io::Result<Self> {
        let (end, ended) = watch::channel(false);
        let reload = Arc::new(Notify::new());
        let mut taken = Taken::new([SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup()])?;
        let reloads = reload.clone();
        tokio::spawn(async move {
            loop {
                let kind = taken.next().await;
                if kind == SignalKind::hangup() {
                    reloads.notify_one();
                } else if end.send_replace(true) {
                    tracing::warn!("ended at once by a second signal; transfers were not finished");
                    process::exit(exit_code(kind).into());
                }
            }
        });
        Ok(Self { ended, reload })
    }

    /// Returns the next signal. A termination persists; pending reloads are merged.
    pub async fn next(&mut self) -> Signal {
        tokio::select! {
            biased;
            Ok(_) = self.ended.wait_for(|is_ended| *is_ended) => Signal::End,
            () = self.reload.notified() => Signal::Reload,
        }
    }
}
