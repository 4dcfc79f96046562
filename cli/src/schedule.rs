//! Positions in a replay, by the share of its requests that are completed or rejected: `60%`, and
//! `30%:40000,60%:80000` for a schedule of pool sizes.

use std::fmt;
use std::str::FromStr;

/// The largest number of blocks of a pool: every addressable frame but the null block's.
pub const BLOCKS_MAX: u64 = kvpool::FRAMES_MAX as u64 - 1;

const STEPS_MAX: usize = 1000;

/// A share of the requests of a replay, above 0 % and below 100 %.
#[derive(Clone, Copy, PartialEq, PartialOrd, Debug)]
pub struct Share(f64);

/// The sizes of a pool during a replay, each with the ascending share of the requests at which it
/// is due. Errors number the steps from 1.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct Schedule(pub Vec<(Share, usize)>);

impl Share {
    /// Returns this share of `requests`, rounded up: at least one.
    pub fn of(self, requests: usize) -> u64 {
        (self.0 * requests as f64 / 100.0).ceil() as u64
    }
}

impl FromStr for Share {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let percent = text.trim().strip_suffix('%').and_then(|number| number.trim().parse::<f64>().ok());
        percent
            .filter(|&percent| percent > 0.0 && percent < 100.0)
            .map(Self)
            .ok_or_else(|| format!("{text:?} is not more than 0% and less than 100%, written as 60%"))
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent = format!("{:.2}", self.0);
        write!(f, "{} %", percent.trim_end_matches('0').trim_end_matches('.'))
    }
}

impl FromStr for Schedule {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut steps: Vec<(Share, usize)> = Vec::new();
        for (item, number) in text.split(',').map(str::trim).zip(1..) {
            if number > STEPS_MAX {
                return Err(format!("more than {STEPS_MAX} items"));
            }
            let step = item.split_once(':').and_then(|(share, blocks)| {
                let blocks = blocks.trim().parse().ok().filter(|blocks| (1..=BLOCKS_MAX).contains(blocks))?;
                Some((share.parse().ok()?, blocks as usize))
            });
            let step = step.ok_or_else(|| {
                format!(
                    "item {number}, {item:?}: not written as 60%:80000, a share and 1 to {BLOCKS_MAX} blocks"
                )
            })?;
            if let Some(&(before, _)) = steps.last().filter(|before| before.0 >= step.0) {
                return Err(format!("item {number}, {item:?}: not after the item before it, at {before}"));
            }
            steps.push(step);
        }
        Ok(Self(steps))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn shares_are_percentages() {
        for (text, of_1000, shown) in
            [("60%", 600, "60 %"), ("0.05%", 1, "0.05 %"), (" 99.9 % ", 999, "99.9 %")]
        {
            let share: Share = text.parse().unwrap();
            assert_eq!((share.of(1000), share.to_string().as_str()), (of_1000, shown), "{text}");
        }
        assert_eq!("1%".parse::<Share>().unwrap().of(3), 1, "one request at least");
        assert_eq!("99.99%".parse::<Share>().unwrap().of(3), 3);
        for bad in ["60", "0.6", "", "%", "x%", "0%", "100%", "-3%", "NaN%", "inf%"] {
            let error = bad.parse::<Share>().expect_err(bad);
            assert!(error.ends_with("is not more than 0% and less than 100%, written as 60%"), "{error}");
        }
    }

    #[test]
    fn a_schedule_rises_and_its_errors_name_the_item() {
        let schedule: Schedule = "30%:40000, 60%:80000".parse().unwrap();
        let steps: Vec<_> = schedule.0.iter().map(|(at, blocks)| (at.of(100), *blocks)).collect();
        assert_eq!(steps, [(30, 40_000), (60, 80_000)]);
        let step = "not written as 60%:80000, a share and 1 to 134217727 blocks";
        for (before, item, reason) in [
            ("", "", step),
            ("30%:5,", "", step),
            ("30%:5,", "60", step),
            ("", "30:5", step),
            ("30%:5,", "160%:7", step),
            ("", "30%:many", step),
            ("", "30%:0", step),
            ("", "30%:-4", step),
            ("", "30%:134217728", step),
            ("60%:5,", "30%:7", "not after the item before it, at 60 %"),
            ("60%:5,", "60%:7", "not after the item before it, at 60 %"),
        ] {
            let error = format!("{before}{item}").parse::<Schedule>().expect_err(item);
            let number = 1 + before.matches(',').count();
            assert_eq!(error, format!("item {number}, {item:?}: {reason}"));
        }
        let steps: Vec<String> = (1..=1001).map(|step| format!("{}%:5", f64::from(step) / 20.0)).collect();
        assert_eq!(steps.join(",").parse::<Schedule>(), Err("more than 1000 items".into()));
    }

    proptest! {
        /// Any text is parsed or refused; an accepted schedule is within its bounds and ascends.
        #[test]
        fn any_text_is_parsed_or_refused(text in "[0-9%:,. x-]{0,30}") {
            if let Ok(Schedule(steps)) = text.parse() {
                prop_assert!(steps.is_sorted_by(|a, b| a.0 < b.0));
                for (at, blocks) in steps {
                    prop_assert!(blocks > 0 && (1..=1000).contains(&at.of(1000)));
                }
            }
        }
    }
}
