use std::io;

use kvpool_node::admin::Reporters;
use kvpool_node::settings::Settings;
#[cfg(not(feature = "otel"))]
use kvpool_node::settings::TraceTarget;
use tokio::runtime::Handle;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::{Layer, Registry, registry};

use super::log;
#[cfg(feature = "otel")]
use super::traces::Traces;
#[cfg(feature = "otel")]
use crate::error::named;

/// The traces being sent, if any.
pub(super) struct Telemetry {
    #[cfg(feature = "otel")]
    traces: Option<Traces>,
}

impl Telemetry {
    /// Writes messages and sends traces from now on.
    pub fn start(settings: &Settings, runtime: &Handle) -> anyhow::Result<Self> {
        #[allow(unused_mut, reason = "without traces it is one layer")]
        let mut layers: Vec<Box<dyn Layer<Registry> + Send + Sync>> =
            vec![log::layer(settings.log, &settings.log_levels, io::stderr)];
        #[cfg(feature = "otel")]
        let traces = match Traces::start(settings, runtime).map_err(named("traces cannot be sent"))? {
            Some((traces, layer)) => {
                layers.push(layer);
                Some(traces)
            }
            None => None,
        };
        #[cfg(not(feature = "otel"))]
        if let (TraceTarget::Url(_), _) = (&settings.traces, runtime) {
            anyhow::bail!("--otel-endpoint: {}", crate::output::not_built("otel"));
        }
        // Fails if there is a subscriber already, as in a test of this process.
        let _ = tracing::subscriber::set_global_default(registry().with(layers));
        Ok(Self {
            #[cfg(feature = "otel")]
            traces,
        })
    }

    pub fn report(&self, reporters: &Reporters) {
        #[cfg(feature = "otel")]
        self.traces.iter().for_each(|traces| reporters.add(traces.reporter()));
        #[cfg(not(feature = "otel"))]
        let _ = reporters;
    }

    pub fn end(self) {
        #[cfg(feature = "otel")]
        if let Some(traces) = self.traces {
            traces.end();
        }
    }
}
