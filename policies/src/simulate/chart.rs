//! Hit rates as a chart for a terminal: capacities to the right, rates upwards, one letter per
//! policy.

use super::Rate;

/// Lines of the chart.
const LINES: usize = 12;
/// Columns from one capacity to the next.
const STEP: usize = 10;

/// Renders the rates of a trace as a chart.
pub fn chart(rates: &[Vec<Rate>]) -> String {
    let capacities = rates.first().map_or(0, Vec::len);
    let top = rates.iter().flatten().map(|rate| rate.hit_rate).fold(1e-9, f64::max);
    let width = capacities.saturating_sub(1) * STEP + 2;
    let mut cells = vec![vec![' '; width]; LINES];
    let line_of = |rate: f64| LINES - 1 - (rate / top * (LINES - 1) as f64).round() as usize;
    let letters = letters(rates);
    for (policy, letter) in rates.iter().zip(&letters) {
        for (pair, column) in policy.windows(2).zip((0..).step_by(STEP)) {
            for along in 1..STEP {
                let share = along as f64 / STEP as f64;
                let rate = pair[0].hit_rate + (pair[1].hit_rate - pair[0].hit_rate) * share;
                let cell = &mut cells[line_of(rate)][column + along];
                if *cell == ' ' {
                    *cell = '·';
                }
            }
        }
        for (rate, column) in policy.iter().zip((0..).step_by(STEP)) {
            let line = line_of(rate.hit_rate);
            // Two policies at one place are drawn side by side.
            let at = if "· ".contains(cells[line][column]) { column } else { column + 1 };
            cells[line][at] = *letter;
        }
    }
    let mut text = String::new();
    for (line, row) in cells.iter().enumerate() {
        let rate = top * (LINES - 1 - line) as f64 / (LINES - 1) as f64;
        let row: String = row.iter().collect();
        text += &format!("{rate:6.3} |{}\n", row.trim_end());
    }
    text += "        ";
    for rate in rates.first().into_iter().flatten() {
        text += &format!("{:<STEP$}", percent(rate.share));
    }
    let legend: Vec<String> = (rates.iter().zip(&letters))
        .filter_map(|(policy, letter)| Some(format!("{letter} {}", policy.first()?.contender)))
        .collect();
    format!("{}\n        {}", text.trim_end(), legend.join("  "))
}

/// Returns a letter for each policy: the first of its name that is not taken.
fn letters(rates: &[Vec<Rate>]) -> Vec<char> {
    let mut letters = Vec::new();
    for policy in rates {
        let name = policy.first().map_or("", |rate| rate.contender.name());
        let letter = name.to_uppercase().chars().find(|letter| !letters.contains(letter)).unwrap_or('?');
        letters.push(letter);
    }
    letters
}

/// Formats a share in percent, without trailing zeros.
pub(super) fn percent(share: f64) -> String {
    let digits = format!("{:.3}", share * 100.0);
    format!("{} %", digits.trim_end_matches('0').trim_end_matches('.'))
}
