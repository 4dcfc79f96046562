use std::future::poll_fn;
use std::io;
use std::task::Poll;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Caught signals.
pub(crate) struct Signals(Vec<(SignalKind, Signal)>);

impl Signals {
    /// Catches signals of these kinds from now on. Fails with the system's error.
    pub fn new(kinds: impl IntoIterator<Item = SignalKind>) -> io::Result<Self> {
        kinds.into_iter().map(|kind| Ok((kind, signal(kind)?))).collect::<io::Result<_>>().map(Self)
    }

    pub async fn next(&mut self) -> SignalKind {
        poll_fn(|context| {
            let mut ready = self.0.iter_mut().filter_map(|(kind, signal)| {
                // The streams are endless.
                signal.poll_recv(context).is_ready().then_some(*kind)
            });
            ready.next().map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }
}

pub(crate) fn exit_code(kind: SignalKind) -> u8 {
    128 + kind.as_raw_value() as u8
}
