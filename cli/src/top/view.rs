//! Layout and styles.
//!
//! From the top: header, occupancy, figures, memory map, owners beside migrations and services, and
//! the keys. With less room, the map is omitted first, then the tables, then further figures.

use std::time::Instant;

use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Modifier, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Clear, Paragraph};

use super::cells;
use super::panels;
use super::state::State;

/// Smallest supported width.
pub(super) const WIDTH_MIN: u16 = 40;
pub(super) const HEIGHT_MIN: u16 = 8;

const BESIDE: u16 = 76;

const OWNERS: u16 = 65;

/// Lines from which tables, and the map too, are drawn.
const TABLES: u16 = 4;
const MAP: u16 = 12;

/// Whether colours and other attributes are used. Without them no information is lost.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Styles {
    Used,
    None,
}

impl Styles {
    fn of(self, style: Style) -> Style {
        if self == Self::Used { style } else { Style::new() }
    }

    fn title(self) -> Style {
        self.of(Style::new().add_modifier(Modifier::BOLD))
    }

    fn class(self, symbol: char) -> Style {
        let colour = match symbol {
            '#' => Color::Blue,
            '@' => Color::Magenta,
            'X' => Color::Red,
            '+' => Color::Yellow,
            '.' => Color::Green,
            ':' => Color::LightRed,
            '-' => Color::LightMagenta,
            '~' => Color::Cyan,
            _ => return Style::new(),
        };
        self.of(Style::new().fg(colour))
    }

    fn classes(self, text: &str) -> Line<'static> {
        let mut spans: Vec<Span<'static>> = Vec::new();
        let mut part = String::new();
        let mut last = None;
        for char in text.chars() {
            if last.is_some_and(|last| last != char) {
                spans.push(Span::styled(std::mem::take(&mut part), self.class(last.unwrap_or(' '))));
            }
            part.push(char);
            last = Some(char);
        }
        spans.push(Span::styled(part, self.class(last.unwrap_or(' '))));
        Line::from(spans)
    }
}

pub(super) fn draw(frame: &mut Frame<'_>, state: &State, styles: Styles, now: Instant) {
    let area = frame.area();
    if area.width < WIDTH_MIN || area.height < HEIGHT_MIN {
        let size = format!("{}x{}", area.width, area.height);
        let lines =
            [format!("too small: {size}"), format!("needs {WIDTH_MIN}x{HEIGHT_MIN}"), "q quits".to_owned()];
        frame.render_widget(Paragraph::new(lines.map(Line::from).to_vec()), area);
        return;
    }
    let width = usize::from(area.width);
    let figures = state.figures();
    let said: Vec<String> =
        panels::trouble(state, now).into_iter().chain(state.message().map(str::to_owned)).collect();
    let mut fields = panels::flow(&panels::fields(figures), width);
    // Header, bar, messages and keys.
    let fixed = 3 + said.len() as u16;
    let free = area.height.saturating_sub(fixed);
    fields.truncate(usize::from(free.max(1)));
    let rest = free.saturating_sub(fields.len() as u16);
    if rest >= MAP + 8 {
        fields.extend(panels::history(figures, width));
    }
    let rest = free.saturating_sub(fields.len() as u16);
    let map = if rest >= MAP { (rest * 2 / 5).max(6) } else { 0 };
    let tables = if rest - map >= TABLES { rest - map } else { 0 };
    let [top, bar, body, map, tables, messages, keys] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(1),
        Constraint::Min(fields.len() as u16),
        Constraint::Length(map),
        Constraint::Length(tables),
        Constraint::Length(said.len() as u16),
        Constraint::Length(1),
    ])
    .areas(area);
    header(frame, top, state, styles, now);
    if let Some(stats) = figures.last() {
        let inner = panels::bar(stats, width - 2);
        let mut line = styles.classes(&inner);
        line.spans.insert(0, "[".into());
        line.spans.push("]".into());
        frame.render_widget(Paragraph::new(line), bar);
    }
    text(frame, body, fields);
    draw_map(frame, map, state, styles);
    draw_tables(frame, tables, state, styles);
    let said = said.iter().map(|line| Line::styled(panels::cut(line, width), styles.title()));
    frame.render_widget(Paragraph::new(said.collect::<Vec<_>>()), messages);
    frame.render_widget(Paragraph::new(panels::cut(panels::KEYS, width)), keys);
    if state.shows_help {
        draw_help(frame, area);
    }
}

fn header(frame: &mut Frame<'_>, area: Rect, state: &State, styles: Styles, now: Instant) {
    let (left, right) = panels::header(state, now);
    let [at_left, at_right] =
        Layout::horizontal([Constraint::Min(0), Constraint::Length(right.len() as u16 + 1)]).areas(area);
    let left = panels::cut(&left, usize::from(at_left.width));
    frame.render_widget(Paragraph::new(Line::styled(left, styles.title())), at_left);
    frame.render_widget(Paragraph::new(Line::styled(right, styles.title()).right_aligned()), at_right);
}

fn text(frame: &mut Frame<'_>, area: Rect, lines: Vec<String>) {
    let lines = lines.iter().map(|line| Line::from(panels::cut(line, usize::from(area.width))));
    frame.render_widget(Paragraph::new(lines.collect::<Vec<_>>()), area);
}

fn titled(frame: &mut Frame<'_>, area: Rect, title: String, styles: Styles) -> Rect {
    let [top, below] = Layout::vertical([Constraint::Length(1), Constraint::Min(0)]).areas(area);
    let mut title = panels::cut(&format!("-- {title} "), usize::from(area.width));
    title += &"-".repeat(usize::from(area.width).saturating_sub(title.chars().count()));
    frame.render_widget(Paragraph::new(Line::styled(title, styles.title())), top);
    below
}

fn draw_map(frame: &mut Frame<'_>, area: Rect, state: &State, styles: Styles) {
    if area.height < 3 {
        return;
    }
    let Some(map) = &state.figures().map else {
        let below = titled(frame, area, "Memory map".to_owned(), styles);
        text(frame, below, vec!["not received yet".to_owned()]);
        return;
    };
    let width = usize::from(area.width);
    // The legend depends on the counts alone.
    let legend = panels::flow(&panels::legend(&cells::draw(map, width, 1)), width);
    let height = usize::from(area.height).saturating_sub(1 + legend.len()).max(1);
    let drawn = cells::draw(map, width, height);
    let frames = crate::figures::count(map.frames);
    let title = format!("Memory map: {frames} frames, {} a character", drawn.group);
    let below = titled(frame, area, title, styles);
    let rows = drawn.rows.iter().map(|row| styles.classes(row));
    let lines: Vec<_> = rows.chain(legend.into_iter().map(Line::from)).collect();
    frame.render_widget(Paragraph::new(lines), below);
}

fn draw_tables(frame: &mut Frame<'_>, area: Rect, state: &State, styles: Styles) {
    if area.height == 0 {
        return;
    }
    let is_of_frames = state.figures().last().is_some_and(|stats| stats.of_sequences.is_none());
    let (owners, others) = if is_of_frames {
        // It has neither peers nor migrations.
        (area, Rect::ZERO)
    } else if area.width >= BESIDE {
        let share = OWNERS.min(area.width * 5 / 8);
        let [left, _, right] =
            Layout::horizontal([Constraint::Length(share), Constraint::Length(1), Constraint::Min(0)])
                .areas(area);
        (left, right)
    } else if area.height >= 3 * TABLES {
        let [top, bottom] = Layout::vertical([Constraint::Fill(1), Constraint::Fill(1)]).areas(area);
        (top, bottom)
    } else {
        (area, Rect::ZERO)
    };
    let (title, lines) =
        panels::owners(state, usize::from(owners.height.saturating_sub(1)), owners.width.into());
    let below = titled(frame, owners, title, styles);
    text(frame, below, lines);
    if others.height == 0 {
        return;
    }
    let (services, migrations) = (panels::services(state.figures()), panels::migrations(state.figures()));
    // As many lines as there are services, as long as the migrations have half.
    let wanted = (services.len() as u16 + 1).min(others.height / 2).max(2);
    let [top, bottom] = Layout::vertical([Constraint::Length(wanted), Constraint::Min(0)]).areas(others);
    let below = titled(frame, top, "Peers and tiers".to_owned(), styles);
    text(frame, below, services);
    let below = titled(frame, bottom, "Migrations".to_owned(), styles);
    text(frame, below, migrations);
}

fn draw_help(frame: &mut Frame<'_>, area: Rect) {
    let lines = panels::help();
    let width = lines.iter().map(|line| line.chars().count()).max().unwrap_or(0) as u16 + 4;
    let (width, height) = (width.min(area.width), (lines.len() as u16 + 2).min(area.height));
    let place = Rect::new((area.width - width) / 2, (area.height - height) / 2, width, height);
    frame.render_widget(Clear, place);
    let block = Block::bordered().title(" Help: h or Esc closes it ");
    let lines: Vec<_> = lines.into_iter().map(|line| Line::from(format!(" {line}"))).collect();
    frame.render_widget(Paragraph::new(lines).block(block), place);
}
