use std::time::{Duration, Instant};

use kvpool_node::admin::{DefragOutcome, Notice, OwnersReport, StatsReport};

use super::figures::Figures;
use super::sort::OwnerOrder;
use crate::figures::{count, percent};
use crate::output::printable;

/// Time without an event after which the node counts as silent: several periods.
const SILENCE: Duration = Duration::from_secs(5);

const MESSAGE: Duration = Duration::from_secs(10);

pub(super) enum Input {
    Notice(Notice),
    Lost(String),
    Stats(Box<StatsReport>),
    Owners(Result<OwnersReport, String>),
    Compacted(Result<DefragOutcome, String>),
    Key(Key),
    Tick,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Key {
    Quit,
    Help,
    Sort,
    Compact,
    Pause,
    Up,
    Down,
    PageUp,
    PageDown,
    Escape,
}

/// Outputs of the program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Effect {
    Compact,
    Quit,
}

/// State of the connection to the node.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Link {
    Connecting,
    Live,
    /// Connected, but without an event for this time.
    Silent(Duration),
    /// Disconnected, for this time.
    Lost {
        since: Duration,
        reason: String,
    },
}

pub(super) struct State {
    pub url: String,
    live: Figures,
    /// The figures at the start of a pause, while it lasts.
    paused: Option<(Figures, Instant)>,
    heard: Option<Instant>,
    lost: Option<(Instant, String)>,
    message: Option<(String, Instant)>,
    pub is_compacting: bool,
    pub shows_help: bool,
    pub order: OwnerOrder,
    /// Number of owners above the first one shown.
    pub scrolled: usize,
}

impl State {
    pub fn new(url: impl ToString) -> Self {
        Self {
            url: url.to_string(),
            live: Figures::default(),
            paused: None,
            heard: None,
            lost: None,
            message: None,
            is_compacting: false,
            shows_help: false,
            order: OwnerOrder::default(),
            scrolled: 0,
        }
    }

    /// Updates the state by an input, and returns the resulting effect.
    pub fn update(&mut self, input: Input, now: Instant) -> Option<Effect> {
        match input {
            Input::Notice(notice) => {
                (self.heard, self.lost) = (Some(now), None);
                self.live.take(notice);
            }
            Input::Lost(reason) => {
                // The figures are of the last event, and so is the beginning of the loss.
                let since = self.lost.take().map_or(self.heard.unwrap_or(now), |(since, _)| since);
                self.lost = Some((since, printable(&reason)));
            }
            Input::Stats(stats) => self.live.report(&stats),
            Input::Owners(owners) => {
                self.live.owners = Some(owners.map_err(|reason| printable(&reason)));
            }
            Input::Compacted(outcome) => {
                self.is_compacting = false;
                self.say(outcome.map_or_else(|reason| format!("not compacted: {reason}"), compacted), now);
            }
            Input::Key(key) => return self.key(key, now),
            Input::Tick => {}
        }
        if self.message.as_ref().is_some_and(|(_, said)| now.duration_since(*said) > MESSAGE) {
            self.message = None;
        }
        None
    }

    fn key(&mut self, key: Key, now: Instant) -> Option<Effect> {
        match key {
            Key::Quit => return Some(Effect::Quit),
            Key::Escape if self.shows_help => self.shows_help = false,
            Key::Escape => return Some(Effect::Quit),
            Key::Help => self.shows_help = !self.shows_help,
            Key::Sort => (self.order, self.scrolled) = (self.order.next(), 0),
            Key::Pause => {
                self.paused = match self.paused {
                    Some(_) => None,
                    None => Some((self.live.clone(), now)),
                }
            }
            Key::Compact if self.is_compacting => self.say("it is being compacted already", now),
            Key::Compact if !matches!(self.link(now), Link::Live) => {
                self.say("not compacted: the node is not reachable", now);
            }
            Key::Compact => {
                self.is_compacting = true;
                return Some(Effect::Compact);
            }
            Key::Up => self.scroll(-1),
            Key::Down => self.scroll(1),
            Key::PageUp => self.scroll(-10),
            Key::PageDown => self.scroll(10),
        }
        None
    }

    fn scroll(&mut self, by: isize) {
        let owners = match &self.figures().owners {
            Some(Ok(report)) => report.owners.len(),
            _ => 0,
        };
        self.scrolled = self.scrolled.saturating_add_signed(by).min(owners.saturating_sub(1));
    }

    fn say(&mut self, message: impl Into<String>, now: Instant) {
        self.message = Some((printable(&message.into()), now));
    }

    pub fn figures(&self) -> &Figures {
        self.paused.as_ref().map_or(&self.live, |(figures, _)| figures)
    }

    /// Returns how long the figures have been paused, if they are.
    pub fn paused_for(&self, now: Instant) -> Option<Duration> {
        self.paused.as_ref().map(|(_, since)| now.duration_since(*since))
    }

    pub fn link(&self, now: Instant) -> Link {
        match (&self.lost, self.heard) {
            (Some((since, reason)), _) => {
                Link::Lost { since: now.duration_since(*since), reason: reason.clone() }
            }
            (None, None) => Link::Connecting,
            (None, Some(heard)) => match now.duration_since(heard) {
                silent if silent > SILENCE => Link::Silent(silent),
                _ => Link::Live,
            },
        }
    }

    /// Returns the message to show, if any: the newest that the user caused.
    pub fn message(&self) -> Option<&str> {
        match &self.message {
            _ if self.is_compacting => Some("compacting"),
            Some((message, _)) => Some(message),
            None => None,
        }
    }
}

fn compacted(outcome: DefragOutcome) -> String {
    format!(
        "{}moved {} blocks in {:.1} ms; fragmentation {} -> {}",
        if outcome.is_worse { "worse: " } else { "" },
        count(outcome.moved_blocks),
        outcome.time_ms,
        percent(100.0 * outcome.report.available_fragmentation_before),
        percent(100.0 * outcome.report.available_fragmentation_after),
    )
}
