//! Figures as text: numbers, shares, times, and JSON identifiers.

use indicatif::HumanCount;
use serde_json::Value;

/// Returns a JSON identifier as words.
pub(crate) fn word(value: &Value) -> String {
    value.as_str().unwrap_or_default().replace('_', " ")
}

pub(crate) fn count(number: usize) -> String {
    HumanCount(number as u64).to_string()
}

/// Returns a number in at most five characters, such as `2.2k`.
#[cfg(feature = "top")]
pub(crate) fn short(number: usize) -> String {
    let (mut value, mut units) = (number as f64, ["k", "M", "G", "T", "P", "E"].into_iter());
    let mut unit = "";
    // What would be rounded to 1000 has the next unit.
    while value >= 999.5 {
        (value, unit) = (value / 1e3, units.next().unwrap_or(unit));
    }
    if unit.is_empty() || value >= 9.95 { format!("{value:.0}{unit}") } else { format!("{value:.1}{unit}") }
}

pub(crate) fn percent(value: f64) -> String {
    format!("{value:.1} %")
}

pub(crate) fn latency(ns: f64) -> String {
    match ns {
        ns if ns < 1e3 => format!("{ns:.0} ns"),
        ns if ns < 1e6 => format!("{:.1} us", ns / 1e3),
        ns if ns < 1e9 => format!("{:.1} ms", ns / 1e6),
        ns => format!("{:.1} s", ns / 1e9),
    }
}

/// Returns a time in its two largest units.
#[cfg(feature = "top")]
pub(crate) fn duration(seconds: u64) -> String {
    match seconds {
        s if s < 60 => format!("{s} s"),
        s if s < 3600 => format!("{} min {} s", s / 60, s % 60),
        s if s < 86_400 => format!("{} h {} min", s / 3600, s / 60 % 60),
        s => format!("{} d {} h", s / 86_400, s / 3600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_a_unit_that_suits_them() {
        for (ns, text) in [
            (6.2, "6 ns"),
            (870.0, "870 ns"),
            (61_439.0, "61.4 us"),
            (2_500_000.0, "2.5 ms"),
            (1.25e10, "12.5 s"),
        ] {
            assert_eq!(latency(ns), text);
        }
    }

    #[cfg(feature = "top")]
    #[test]
    fn short_numbers_have_at_most_five_characters() {
        for (number, text) in [
            (0, "0"),
            (999, "999"),
            (2_153, "2.2k"),
            (9_960, "10k"),
            (999_499, "999k"),
            (999_500, "1.0M"),
            (123_456_789, "123M"),
        ] {
            assert_eq!(short(number), text);
        }
        assert_eq!(short(usize::MAX), "18E");
    }

    #[cfg(feature = "top")]
    #[test]
    fn durations_have_two_units() {
        for (seconds, text) in
            [(0, "0 s"), (59, "59 s"), (61, "1 min 1 s"), (7_380, "2 h 3 min"), (180_000, "2 d 2 h")]
        {
            assert_eq!(duration(seconds), text);
        }
    }
}
