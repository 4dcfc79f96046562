//! Text and tables within the width of the terminal. Words and numbers are never broken.

use comfy_table::{ColumnConstraint, Row, Table, Width};

/// Width below which a table that does not fit becomes lines of names and values.
pub const TABLE_MIN: usize = 60;

/// The longest word that has a column of its own width: the largest number with its separators.
const WORD_MAX: usize = 26;

/// Longest figure with its unit, which stay in one line.
const FIGURE_MAX: usize = 14;

/// Returns the columns of the terminal: the variable `COLUMNS`, or the width of the standard output;
/// `None` if that is not a terminal.
pub fn width() -> Option<usize> {
    let set = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    set.or_else(|| Table::new().width().map(usize::from)).filter(|&columns| columns > 0)
}

/// Returns the columns that a text takes, without escape sequences.
pub fn columns(text: &str) -> usize {
    let mut is_escape = false;
    let mut is_shown = |char| {
        is_escape |= char == '\u{1b}';
        let is_shown = !is_escape;
        is_escape &= char != 'm';
        is_shown
    };
    text.lines().map(|line| line.chars().filter(|&char| is_shown(char)).count()).max().unwrap_or(0)
}

/// Breaks lines that are too long between words, and indents what follows.
pub fn text(text: &str, width: Option<usize>) -> String {
    let Some(width) = width.filter(|&width| columns(text) > width) else { return text.to_owned() };
    let mut lines: Vec<String> = Vec::new();
    for long in text.lines() {
        let mut words = long.split(' ');
        lines.extend(words.next().map(str::to_owned));
        for word in words {
            match lines.last_mut() {
                Some(line) if columns(line) + 1 + columns(word) <= width => *line += &format!(" {word}"),
                _ => lines.push(format!("  {word}")),
            }
        }
    }
    lines.join("\n")
}

/// Renders a table. Where it does not fit, columns without any figure are left out first, then words
/// of the widest column go to further lines. If that is not enough, each row becomes lines.
pub fn table(mut table: Table, width: Option<usize>) -> String {
    let Some(width) = width.filter(|&width| columns(&table.trim_fmt()) > width) else {
        return table.trim_fmt();
    };
    let cells = |row: &Row| row.cell_iter().map(|cell| cell.content()).collect::<Vec<_>>();
    let header = table.header().map(cells).unwrap_or_default();
    let rows: Vec<_> = table.row_iter().map(cells).collect();
    let mut widths: Vec<usize> = table.column_max_content_widths().into_iter().map(usize::from).collect();
    let cell = |row: &Vec<String>, column: usize| row.get(column).cloned().unwrap_or_default();
    let is_empty = |column| rows.iter().all(|row| ["", "-", "0"].contains(&cell(row, column).trim()));
    let mut shown: Vec<usize> = (0..widths.len()).collect();
    for column in (1..widths.len()).rev().filter(|&column| is_empty(column)) {
        if columns(&table.trim_fmt()) > width {
            table.column_mut(column).map(|column| column.set_constraint(ColumnConstraint::Hidden));
            shown.retain(|&other| other != column);
        }
    }
    let longest = |text: &str| match text {
        figure if figure.starts_with(|char: char| char.is_ascii_digit()) && figure.len() <= FIGURE_MAX => {
            figure.len()
        }
        words => words.split_whitespace().map(columns).max().unwrap_or(0).min(WORD_MAX),
    };
    let floor =
        |column| rows.iter().chain([&header]).map(|row| longest(&cell(row, column))).max().unwrap_or(0);
    let floors: Vec<usize> = (0..widths.len()).map(floor).collect();
    for _ in width..columns(&table.trim_fmt()) {
        let can_shrink = shown.iter().filter(|&&column| widths[column] > floors[column]);
        match can_shrink.max_by_key(|&&column| widths[column]) {
            Some(&column) if width >= TABLE_MIN => widths[column] -= 1,
            _ => return text(&lines(&header, &rows), Some(width)),
        }
    }
    for column in shown {
        let fixed = Width::Fixed(widths[column] as u16 + 2);
        table.column_mut(column).map(|column| column.set_constraint(ColumnConstraint::Absolute(fixed)));
    }
    table.trim_fmt()
}

/// Returns lines `name: value`: with a header, one for each cell; otherwise one for each row, whose
/// last two cells are a figure and a note, as `name: figure (note)`.
fn lines(header: &[String], rows: &[Vec<String>]) -> String {
    let row = |row: &Vec<String>| match row.len() {
        _ if !header.is_empty() => {
            let named = header.iter().zip(row).filter(|(_, value)| !value.is_empty());
            named.map(|(name, value)| format!("{name}: {value}\n")).collect()
        }
        3.. => {
            let (name, [figure, note]) =
                (row[..row.len() - 2].join(" "), [&row[row.len() - 2], &row[row.len() - 1]]);
            let note = if note.is_empty() { String::new() } else { format!(" ({note})") };
            format!("{}: {figure}{note}", name.trim())
        }
        _ => row.join(" "),
    };
    rows.iter().map(row).collect::<Vec<_>>().join("\n").trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use comfy_table::presets::UTF8_FULL_CONDENSED;

    use super::*;

    fn wide() -> Table {
        let mut table = Table::new();
        table.load_preset(UTF8_FULL_CONDENSED).force_no_tty();
        table.set_header(["kind", "sequence", "blocks", "pinned", "held for", "allocated at"]);
        table.add_row(["sequence", "18446744073709551615", "12,345", "0", "1234.5 s", "-"]);
        table.add_row(["a lease", "-", "7", "0", "3.0 s", "-"]);
        table
    }

    #[test]
    fn a_table_fits_every_width_and_breaks_no_number() {
        let natural = columns(&wide().to_string());
        let least = columns(&table(wide(), Some(TABLE_MIN)));
        for width in (30..=natural + 1).rev() {
            let text = table(wide(), Some(width));
            assert!(columns(&text) <= width, "{width}:\n{text}");
            for part in ["18446744073709551615", "12,345", "1234.5 s"] {
                assert!(text.contains(part), "{width}: no {part} in\n{text}");
            }
            assert_eq!(text.contains('│'), width >= least, "{width}:\n{text}");
        }
        assert!(table(wide(), Some(natural - 1)).contains("pinned"), "one column is enough");
        assert!(!table(wide(), Some(TABLE_MIN)).contains("pinned"));
        assert_eq!(table(wide(), None), wide().to_string());
        assert!(table(wide(), Some(40)).starts_with("kind: sequence\nsequence: 18446744073709551615\n"));
    }

    #[test]
    fn long_lines_are_broken_between_words() {
        assert_eq!(text("one two three\nfour", Some(9)), "one two\n  three\nfour");
        assert_eq!(text("one two", None), "one two");
        assert_eq!(columns("\u{1b}[1mbold\u{1b}[0m\nno"), 4);
    }
}
