//! Measures several subjects in turns, so that disturbances by the machine affect all of them
//! alike.

use crate::report::median;

/// Figures of each subject in each round; the others are compared with the first.
pub struct Turns<const SUBJECTS: usize> {
    names: [&'static str; SUBJECTS],
}

impl<const SUBJECTS: usize> Turns<SUBJECTS> {
    /// Creates a table of subjects by their names.
    pub const fn new(names: [&'static str; SUBJECTS]) -> Self {
        Self { names }
    }

    /// Prints the head of a table.
    pub fn head(&self, title: &str) {
        print!("\n{title:<52}");
        for (subject, name) in self.names.iter().enumerate() {
            let width = if subject == 0 { 21 } else { 35 };
            print!(" {name:>width$}");
        }
        println!();
        print!("{:<52}", "");
        let ratio = format!("(to {})", self.names[0]);
        for subject in 0..self.names.len() {
            print!(" {:>10} {:>10}", "min", "median");
            if subject > 0 {
                print!(" {ratio:>13}");
            }
        }
        println!();
    }

    /// Runs all rounds; prints a line for each figure with its minima and medians over the rounds,
    /// and for all subjects but the first the median of their ratios to it, round by round.
    pub fn measure<const FIGURES: usize>(
        &self,
        rounds: usize,
        lines: [&str; FIGURES],
        mut subjects: [&mut dyn FnMut() -> [f64; FIGURES]; SUBJECTS],
    ) {
        // An uncounted warm-up round: one-time allocations, and cold caches.
        for subject in &mut subjects {
            subject();
        }
        let figures: Vec<[[f64; FIGURES]; SUBJECTS]> =
            (0..rounds).map(|_| subjects.each_mut().map(|subject| subject())).collect();
        for (figure, line) in lines.iter().enumerate() {
            print!("{line:<52}");
            for subject in 0..SUBJECTS {
                let of_rounds = || figures.iter().map(|round| round[subject][figure]);
                let least = of_rounds().fold(f64::INFINITY, f64::min);
                print!(" {least:>10.2} {:>10.2}", median(of_rounds()));
                if subject > 0 {
                    let ratio = median(figures.iter().map(|round| round[subject][figure] / round[0][figure]));
                    let decimals = if ratio < 0.095 { 3 } else { 2 };
                    print!(" ({ratio:>5.decimals$} times)");
                }
            }
            println!();
        }
    }
}
