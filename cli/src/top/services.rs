use kvpool_node::admin::StatsReport;
use serde_json::Value;

use crate::figures::{count, duration, percent};
use crate::output::printable;

/// A service beside the pool that the node uses.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Service {
    pub kind: &'static str,
    pub name: String,
    pub state: String,
}

pub(super) fn services(stats: &StatsReport) -> Vec<Service> {
    let group = |name: &str| stats.extra.get(name).and_then(Value::as_object).into_iter().flatten();
    let service =
        |kind, name: &str, state: String| Service { kind, name: printable(name), state: printable(&state) };
    let peers = group("peers").map(|(name, state)| service("peer", name, peer(state)));
    let told = |text: String, state: &Value| text + &last_error(state);
    let tiers = group("tiers").map(|(name, state)| service("tier", name, told(tier(state), state)));
    let members =
        group("membership").map(|(name, state)| service("members", name, told(membership(state), state)));
    let events = group("kv_events").map(|(name, state)| {
        let text = format!("{} subscribers", count(state["subscribers"].as_u64().unwrap_or(0) as usize));
        service("events", name, told(text, state))
    });
    let traces = group("traces").map(|(name, state)| service("traces", name, told("on".to_owned(), state)));
    peers.chain(tiers).chain(members).chain(events).chain(traces).collect()
}

fn last_error(state: &Value) -> String {
    let Some(reason) = state["last_error"].as_str() else { return String::new() };
    let age = duration(state["last_error_s"].as_u64().unwrap_or(0));
    format!(", last error {age} ago: {reason}")
}

fn peer(state: &Value) -> String {
    state.as_str().map_or_else(|| state.to_string(), str::to_owned)
}

/// Returns the state of a tier: of its circuit breaker, and its hit rate.
fn tier(counters: &Value) -> String {
    let of = |name: &str| counters[name].as_u64().unwrap_or(0) as usize;
    let state = match counters["breaker"].as_str() {
        Some("closed") => "up",
        Some("open") => "DOWN",
        Some("trying") => "trying again",
        _ => "state unknown",
    };
    let asked = of("hits") + of("misses");
    let rate = match asked {
        0 => "nothing asked".to_owned(),
        _ => format!("hits {}", percent(100.0 * of("hits") as f64 / asked as f64)),
    };
    let failed = match of("failed") + of("overdue") {
        0 => String::new(),
        failed => format!(", {} failed", count(failed)),
    };
    format!("{state}, {rate}, {} stored{failed}", count(of("stored")))
}

fn membership(state: &Value) -> String {
    let members = state["members"].as_array().map_or(0, Vec::len);
    let reach = if state["current"] == true { "" } else { ", directory OUT OF REACH" };
    let joined = match (state["joined"].as_bool(), state["reason"].as_str()) {
        (None, _) => String::new(),
        (Some(true), _) => ", joined".to_owned(),
        (Some(false), reason) => format!(", NOT joined: {}", reason.unwrap_or("no reason given")),
    };
    format!("{} known{joined}{reach}", count(members))
}
