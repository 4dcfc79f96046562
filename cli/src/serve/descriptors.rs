use kvpool_node::events::KvEventSettings;
use kvpool_node::settings::{EventSettings, Settings};
use kvpool_node::wire::Limits;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors for everything without a setting: the runtime, files, traces, the directory.
const MARGIN: u64 = 128;

/// Raises the limit to what these settings may need, or to the system's maximum with a warning.
pub(super) fn raise(settings: &Settings) {
    let (needed, limit) = (needed(settings), getrlimit(Resource::Nofile));
    let suffices = |limit: Option<u64>| limit.is_none_or(|limit| limit >= needed);
    if suffices(limit.current) {
        return;
    }
    let current = if suffices(limit.maximum) { Some(needed) } else { limit.maximum };
    let raised = setrlimit(Resource::Nofile, Rlimit { current, ..limit });
    let current = if raised.is_ok() { current } else { limit.current };
    if let Some(permitted) = current.filter(|&permitted| permitted < needed) {
        tracing::warn!(
            "{permitted} descriptors are permitted, and these settings may need {needed}: connections beyond \
             them fail (ulimit -Hn, LimitNOFILE)"
        );
    }
}

/// Returns the number of descriptors that settings need if every permitted connection is open.
fn needed(settings: &Settings) -> u64 {
    let limits = Limits::default();
    let links = match (&settings.listen, &settings.membership) {
        (None, None) => settings.peers.len(),
        _ => limits.links,
    };
    let streams = 1 + usize::from(limits.streams_max);
    let peers = if links == 0 { 0 } else { links * streams + limits.handshakes };
    // Those of subscribers and of replays, and unidentified ones.
    let of_socket = |events: &EventSettings| KvEventSettings::new(events.listen).connections;
    let events = settings.kv_events.as_ref().map_or(0, |events| 4 * of_socket(events));
    let tier = settings.tier.as_ref().map_or(0, |tier| tier.threads);
    (peers + settings.admin.as_ref().map_or(0, |_| settings.admin_connections) + events + tier) as u64
        + MARGIN
}

#[cfg(test)]
mod tests {
    use kvpool_node::settings::{Key, Sources};

    use super::*;

    fn of(flags: &[(&str, &str)]) -> u64 {
        let add =
            |sources: Sources, (name, value): &(&str, &str)| sources.flag(Key::find(name).unwrap(), *value);
        needed(&flags.iter().fold(Sources::new(), add).load().unwrap().settings)
    }

    #[test]
    fn what_is_off_needs_none() {
        let off = [("listen", "off"), ("admin", "off")];
        assert_eq!(of(&off), MARGIN);
        assert_eq!(of(&[off[0], ("admin-connections", "100")]), MARGIN + 100);
        assert_eq!(of(&[off[0], off[1], ("kv-events", "tcp://127.0.0.1:1")]), MARGIN + 256);
        assert_eq!(of(&[off[0], off[1], ("peers", "b=localhost:1")]), MARGIN + 17 + 64);
        assert_eq!(of(&[off[1]]), MARGIN + 256 * 17 + 64);
    }
}
