//! The loop over events, keys and signals.

use std::io;
use std::time::{Duration, Instant};

use crossterm::event::{Event, EventStream, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use futures_util::StreamExt;
use kvpool_node::admin::{Client, ClientError};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio::signal::unix::SignalKind;
use tokio::sync::mpsc::{Sender, channel};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::screen::Screen;
use super::state::{Effect, Input, Key, State};
use super::view::{self, Styles};
use crate::EXIT_OK;
use crate::error::unsound;
use crate::output::is_plain;
use crate::signals::{Signals, exit_code};

const PAUSE: Duration = Duration::from_secs(1);

const POLL: Duration = Duration::from_secs(2);

const TICK: Duration = Duration::from_millis(500);

const OWNERS: usize = 500;

/// Shows a node until a key or a signal. Fails without a terminal, if the node does not answer at
/// first, or if the terminal goes away.
pub fn run(runtime: &Runtime, client: &Client) -> anyhow::Result<u8> {
    if !Screen::is_there() {
        anyhow::bail!(
            "`kvpool top` needs a terminal; `kvpool events`, `kvpool stats` and `kvpool owners` write to pipes and files"
        );
    }
    runtime.block_on(async {
        let mut state = State::new(client.url());
        // A wrong address or token is an error on the normal screen.
        let stats = read(client, "/stats").await?;
        state.update(Input::Stats(Box::new(stats)), Instant::now());
        // All of them end the program.
        let kinds =
            [SignalKind::terminate(), SignalKind::interrupt(), SignalKind::hangup(), SignalKind::quit()];
        let mut signals = Signals::new(kinds).map_err(lost_terminal)?;
        let mut screen = Screen::open().map_err(lost_terminal)?;
        show(&mut state, &mut screen, client, &mut signals).await
    })
}

fn lost_terminal(error: io::Error) -> anyhow::Error {
    unsound(format_args!("the terminal: {error}"))
}

async fn show(
    state: &mut State,
    screen: &mut Screen,
    client: &Client,
    signals: &mut Signals,
) -> anyhow::Result<u8> {
    let styles = if is_plain() { Styles::None } else { Styles::Used };
    let (sender, mut inputs) = channel(64);
    let mut tasks = JoinSet::new();
    tasks.spawn(follow(client.clone(), sender.clone()));
    tasks.spawn(poll(client.clone(), sender.clone()));
    let mut keys = EventStream::new();
    let mut ticks = interval(TICK);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let input = tokio::select! {
            Some(input) = inputs.recv() => input,
            event = keys.next() => match event {
                Some(event) => key(&event.map_err(lost_terminal)?).map_or(Input::Tick, Input::Key),
                // The terminal has gone away.
                None => return Ok(EXIT_OK),
            },
            kind = signals.next() => return Ok(exit_code(kind)),
            // A panic in a task is one of the program.
            Some(Err(error)) = tasks.join_next() => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(_) => continue,
            },
            _ = ticks.tick() => Input::Tick,
        };
        match state.update(input, Instant::now()) {
            Some(Effect::Quit) => return Ok(EXIT_OK),
            Some(Effect::Compact) => {
                tasks.spawn(compact(client.clone(), sender.clone()));
            }
            None => {}
        }
        screen.draw(|frame| view::draw(frame, state, styles, Instant::now())).map_err(lost_terminal)?;
    }
}

async fn follow(client: Client, inputs: Sender<Input>) {
    let mut follower = client.follow();
    loop {
        let (input, pause) = match follower.next().await {
            Ok(notice) => (Input::Notice(notice), Duration::ZERO),
            Err(error) => (Input::Lost(error.to_string()), PAUSE),
        };
        if inputs.send(input).await.is_err() {
            return;
        }
        sleep(pause).await;
    }
}

async fn poll(client: Client, inputs: Sender<Input>) {
    let path = format!("/owners?limit={OWNERS}");
    loop {
        // The events report an unreachable node.
        if let Ok(stats) = read(&client, "/stats").await
            && inputs.send(Input::Stats(Box::new(stats))).await.is_err()
        {
            return;
        }
        let owners = match read(&client, &path).await {
            Ok(owners) => Some(Ok(owners)),
            Err(ClientError::Problem(problem)) => Some(Err(problem.to_string())),
            Err(_) => None,
        };
        if let Some(owners) = owners
            && inputs.send(Input::Owners(owners)).await.is_err()
        {
            return;
        }
        sleep(POLL).await;
    }
}

async fn compact(client: Client, inputs: Sender<Input>) {
    let answer = client.post("/defrag", &json!({})).await;
    let outcome = answer.and_then(|value| parse(&client, value)).map_err(|error| error.to_string());
    // Nothing waits for it if the program ends.
    let _ = inputs.send(Input::Compacted(outcome)).await;
}

async fn read<T: DeserializeOwned>(client: &Client, path: &str) -> Result<T, ClientError> {
    parse(client, client.get(path).await?)
}

fn parse<T: DeserializeOwned>(client: &Client, value: Value) -> Result<T, ClientError> {
    let url = client.url().clone();
    serde_json::from_value(value).map_err(|error| ClientError::Foreign { url, reason: error.to_string() })
}

fn key(event: &Event) -> Option<Key> {
    let &Event::Key(KeyEvent { code, modifiers, kind: KeyEventKind::Press | KeyEventKind::Repeat, .. }) =
        event
    else {
        return None;
    };
    Some(match code {
        KeyCode::Char('c') if modifiers.contains(KeyModifiers::CONTROL) => Key::Quit,
        KeyCode::Char(_) if modifiers.intersects(KeyModifiers::CONTROL | KeyModifiers::ALT) => return None,
        KeyCode::Char('q' | 'Q') => Key::Quit,
        KeyCode::Char('h' | '?') | KeyCode::F(1) => Key::Help,
        KeyCode::Char('s') => Key::Sort,
        KeyCode::Char('d') => Key::Compact,
        KeyCode::Char('p' | ' ') => Key::Pause,
        KeyCode::Up | KeyCode::Char('k') => Key::Up,
        KeyCode::Down | KeyCode::Char('j') => Key::Down,
        KeyCode::PageUp => Key::PageUp,
        KeyCode::PageDown => Key::PageDown,
        KeyCode::Esc => Key::Escape,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_have_effects_and_others_none() {
        let press = |code, modifiers| key(&Event::Key(KeyEvent::new(code, modifiers)));
        let plain = |code| press(code, KeyModifiers::NONE);
        assert_eq!(plain(KeyCode::Char('q')), Some(Key::Quit));
        assert_eq!(press(KeyCode::Char('c'), KeyModifiers::CONTROL), Some(Key::Quit));
        assert_eq!(plain(KeyCode::Char('?')), Some(Key::Help));
        assert_eq!(plain(KeyCode::Char(' ')), Some(Key::Pause));
        assert_eq!(plain(KeyCode::PageDown), Some(Key::PageDown));
        assert_eq!(plain(KeyCode::Char('c')), None, "only with Ctrl");
        // It would compact the pool.
        assert_eq!(press(KeyCode::Char('d'), KeyModifiers::CONTROL), None);
        assert_eq!(key(&Event::Resize(80, 24)), None);
        let release = KeyEvent { kind: KeyEventKind::Release, ..KeyEvent::from(KeyCode::Char('q')) };
        assert_eq!(key(&Event::Key(release)), None);
    }
}
