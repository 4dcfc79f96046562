use super::*;
use proptest::prelude::*;

fn complaint(text: &str) -> String {
    text.parse::<Schedule>().expect_err("must be refused").to_string()
}

#[test]
fn shares_are_percentages() {
    for (text, of_1000, shown) in [("60%", 600, "60 %"), ("0.05%", 1, "0.05 %"), (" 99.9 % ", 999, "99.9 %")]
    {
        let share: Share = text.parse().unwrap();
        assert_eq!((share.of(1000), share.to_string().as_str()), (of_1000, shown), "{text}");
    }
    assert_eq!("1%".parse::<Share>().unwrap().of(3), 1, "one request at least");
    assert_eq!("99.99%".parse::<Share>().unwrap().of(3), 3);
}

#[test]
fn other_texts_are_no_shares() {
    for (text, reason) in [
        ("60", "\"60\" has no percent sign"),
        ("0.6", "no percent sign"),
        ("", "no percent sign"),
        ("%", "no number of percent"),
        ("x%", "\"x%\" is no number"),
        ("0%", "\"0%\" is not more than 0%"),
        ("100%", "less than 100%"),
        ("-3%", "not more than 0%"),
        ("NaN%", "not more than 0%"),
        ("inf%", "less than 100%"),
    ] {
        let message = text.parse::<Share>().expect_err(text).to_string();
        assert!(message.contains(reason), "{text} gives {message}");
    }
}

#[test]
fn schedules_are_steps_in_order() {
    let schedule: Schedule = "30%:40000, 60%:80000".parse().unwrap();
    let steps: Vec<_> = schedule.steps().iter().map(|step| (step.at.of(100), step.blocks)).collect();
    assert_eq!(steps, [(30, 40_000), (60, 80_000)]);
    assert_eq!(schedule.blocks_max(), Some(80_000));
    assert_eq!(Schedule::default().blocks_max(), None);
}

#[test]
fn errors_name_the_item() {
    for (text, expected) in [
        ("", "item 1, \"\": no colon; an item is written as 60%:80000"),
        ("30%:5,", "item 2, \"\": no colon; an item is written as 60%:80000"),
        ("30%:5,60", "item 2, \"60\": no colon; an item is written as 60%:80000"),
        ("30:5", "item 1, \"30:5\": \"30\" has no percent sign; a share is written as 60%"),
        ("30%:5,160%:7", "item 2, \"160%:7\": \"160%\" is not more than 0% and less than 100%"),
        ("30%:many", "item 1, \"30%:many\": the blocks are no whole number from 1 to 134217727"),
        ("30%:0", "item 1, \"30%:0\": the blocks are no whole number from 1 to 134217727"),
        ("30%:-4", "item 1, \"30%:-4\": the blocks are no whole number from 1 to 134217727"),
        ("30%:134217728", "item 1, \"30%:134217728\": the blocks are no whole number from 1 to 134217727"),
        ("60%:5,30%:7", "item 2, \"30%:7\": not after the item before it, at 60 %"),
        ("60%:5,60%:7", "item 2, \"60%:7\": not after the item before it, at 60 %"),
    ] {
        assert_eq!(complaint(text), expected, "{text}");
    }
    let steps: Vec<String> = (1..=1001).map(|step| format!("{}%:5", f64::from(step) / 20.0)).collect();
    assert_eq!(complaint(&steps.join(",")), "more than 1000 items");
}

proptest! {
    /// Whatever the text, parsing ends, and what is accepted is in bounds and rises.
    #[test]
    fn any_text_is_survived(text in "[0-9%:,. x-]{0,30}") {
        if let Ok(schedule) = text.parse::<Schedule>() {
            prop_assert!(schedule.steps().is_sorted_by(|a, b| a.at < b.at));
            for step in schedule.steps() {
                prop_assert!(step.blocks > 0 && step.at.of(1000) >= 1 && step.at.of(1000) <= 1000);
            }
        }
    }
}
