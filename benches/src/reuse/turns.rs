//! Several subjects, measured in turns: what else the machine does meets all of them alike.

use crate::report::median;

/// What each subject gave in each round, the first being the one that the others are compared with.
pub struct Turns<const SUBJECTS: usize> {
    names: [&'static str; SUBJECTS],
}

impl<const SUBJECTS: usize> Turns<SUBJECTS> {
    /// Subjects by their names.
    pub const fn new(names: [&'static str; SUBJECTS]) -> Self {
        Self { names }
    }

    /// The head of a table.
    pub fn head(&self, title: &str) {
        print!("\n{title:<52}");
        for (subject, name) in self.names.iter().enumerate() {
            let width = if subject == 0 { 10 } else { 24 };
            print!(" {name:>width$}");
        }
        println!();
    }

    /// Rounds of all; of each figure a line with its medians, and of all subjects but the first the median of the ratios to
    /// it, round by round.
    pub fn measure<const FIGURES: usize>(
        &self,
        rounds: usize,
        lines: [&str; FIGURES],
        mut subjects: [&mut dyn FnMut() -> [f64; FIGURES]; SUBJECTS],
    ) {
        // One that does not count: what is allocated once, and cold caches.
        for subject in &mut subjects {
            subject();
        }
        let figures: Vec<[[f64; FIGURES]; SUBJECTS]> =
            (0..rounds).map(|_| subjects.each_mut().map(|subject| subject())).collect();
        for (figure, line) in lines.iter().enumerate() {
            print!("{line:<52}");
            for subject in 0..SUBJECTS {
                let middle = median(figures.iter().map(|round| round[subject][figure]));
                print!(" {middle:>10.2}");
                if subject > 0 {
                    let ratio = median(figures.iter().map(|round| round[subject][figure] / round[0][figure]));
                    print!(" ({ratio:>5.2} times)");
                }
            }
            println!();
        }
    }
}
