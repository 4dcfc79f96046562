//! Settings are read again on a separate thread: a file system that hangs delays neither signals
//! nor transfers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::{io, thread};

use kvpool_node::services::Reread;
use kvpool_node::settings::Sources;
use tokio::sync::mpsc;

pub(super) struct Reloader<T> {
    orders: SyncSender<()>,
    results: mpsc::UnboundedReceiver<Result<T, String>>,
    is_reading: Arc<AtomicBool>,
}

impl Reloader<Reread> {
    pub fn start(sources: &Sources) -> io::Result<Self> {
        let sources = sources.clone();
        Self::start_as(move || read(&sources))
    }
}

impl<T: Send + 'static> Reloader<T> {
    /// Starts the thread. It ends with the process, or when idle after this is dropped.
    fn start_as(read: impl Fn() -> Result<T, String> + Send + 'static) -> io::Result<Self> {
        // One pending order covers all later ones.
        let (orders, ordered) = sync_channel(1);
        let (sender, results) = mpsc::unbounded_channel();
        let is_reading = Arc::new(AtomicBool::new(false));
        let flag = is_reading.clone();
        thread::Builder::new().name("kvpool-reload".to_owned()).spawn(move || {
            while ordered.recv().is_ok() {
                // Relaxed: for a message only.
                flag.store(true, Relaxed);
                let result = read();
                flag.store(false, Relaxed);
                if sender.send(result).is_err() {
                    return;
                }
            }
        })?;
        Ok(Self { orders, results, is_reading })
    }

    pub fn order(&self) {
        if self.is_reading.load(Relaxed) {
            tracing::info!(
                "settings are still being read for the SIGHUP before; they will be read once more after that"
            );
        }
        match self.orders.try_send(()) {
            Ok(()) | Err(TrySendError::Full(())) => {}
            Err(TrySendError::Disconnected(())) => {
                tracing::error!("not reloaded: the thread that reads settings has ended");
            }
        }
    }

    pub async fn read(&mut self) -> Result<T, String> {
        match self.results.recv().await {
            Some(read) => read,
            None => std::future::pending().await,
        }
    }
}

fn read(sources: &Sources) -> Result<Reread, String> {
    let loaded = sources.load().map_err(|error| error.to_string())?;
    Reread::new(loaded).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn a_file_that_hangs_keeps_only_the_thread() {
        let (go_on, hanging) = sync_channel::<u32>(1);
        let hanging = Mutex::new(hanging);
        let mut reloader = Reloader::start_as(move || {
            let number = hanging.lock().unwrap().recv();
            number.map_err(|error| error.to_string())
        })
        .unwrap();
        reloader.order();
        while !reloader.is_reading.load(Relaxed) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        // Many signals arrive while the first reading hangs: none of these calls waits.
        for _ in 0..100 {
            reloader.order();
        }
        assert!(timeout(Duration::from_millis(50), reloader.read()).await.is_err(), "it hangs");
        go_on.send(1).unwrap();
        assert_eq!(timeout(Duration::from_secs(20), reloader.read()).await.unwrap(), Ok(1));
        // The others are one.
        go_on.send(2).unwrap();
        assert_eq!(timeout(Duration::from_secs(20), reloader.read()).await.unwrap(), Ok(2));
        assert!(timeout(Duration::from_millis(50), reloader.read()).await.is_err(), "no third reading");
        // Failures are reported as well.
        reloader.order();
        drop(go_on);
        assert!(timeout(Duration::from_secs(20), reloader.read()).await.unwrap().is_err());
    }
}
