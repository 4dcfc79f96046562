//! Signals to the process.
//!
//! A task of the runtime takes them, so that the second signal to end is heard whatever the process
//! does meanwhile: it ends the process at once, with 128 and the number of the signal as the exit code.

use std::io;
use std::process;
use std::sync::Arc;

use tokio::sync::{Notify, watch};

/// A signal to this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Signal {
    End,
    Reload,
}

/// Signals that have arrived, and those that will.
pub(super) struct Signals {
    ended: watch::Receiver<bool>,
    reload: Arc<Notify>,
}

impl Signals {
    /// Takes signals from now on, on the current runtime.
    ///
    /// # Errors
    ///
    /// The system's error.
    pub fn new() -> io::Result<Self> {
        let (end, ended) = watch::channel(false);
        let reload = Arc::new(Notify::new());
        let mut sources = Sources::new()?;
        let reloads = reload.clone();
        tokio::spawn(async move {
            loop {
                match sources.next().await {
                    Source::Reload => reloads.notify_one(),
                    Source::End(number) if end.send_replace(true) => {
                        tracing::warn!("ended at once by a second signal; transfers were not finished");
                        process::exit(128 + number);
                    }
                    Source::End(_) => {}
                }
            }
        });
        Ok(Self { ended, reload })
    }

    /// Returns the next signal. An end remains; reloads that were not awaited are one.
    pub async fn next(&mut self) -> Signal {
        tokio::select! {
            biased;
            Ok(_) = self.ended.wait_for(|is_ended| *is_ended) => Signal::End,
            () = self.reload.notified() => Signal::Reload,
        }
    }
}

/// A signal, with the number of one to end.
enum Source {
    End(i32),
    Reload,
}

#[cfg(unix)]
struct Sources {
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
    hang_up: tokio::signal::unix::Signal,
}

#[cfg(unix)]
impl Sources {
    fn new() -> io::Result<Self> {
        use tokio::signal::unix::{SignalKind, signal};
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hang_up: signal(SignalKind::hangup())?,
        })
    }

    async fn next(&mut self) -> Source {
        use tokio::signal::unix::SignalKind;
        tokio::select! {
            _ = self.terminate.recv() => Source::End(SignalKind::terminate().as_raw_value()),
            _ = self.interrupt.recv() => Source::End(SignalKind::interrupt().as_raw_value()),
            _ = self.hang_up.recv() => Source::Reload,
        }
    }
}

#[cfg(not(unix))]
struct Sources;

#[cfg(not(unix))]
impl Sources {
    fn new() -> io::Result<Self> {
        Ok(Self)
    }

    async fn next(&mut self) -> Source {
        match tokio::signal::ctrl_c().await {
            Ok(()) => Source::End(2),
            // Without the signal, only the end of the process ends the node.
            Err(_) => std::future::pending().await,
        }
    }
}
