//! Text and tables within the width of the terminal. Words and numbers are never broken.

use comfy_table::{ColumnConstraint, Row, Table, TableComponent, Width};

/// Width below which a table that does not fit becomes lines of names and values.
pub const TABLE_MIN: usize = 60;

/// Longest cell that stays on one line, such as a figure with its unit, and longest word that does.
const CELL_MAX: usize = 12;
const WORD_MAX: usize = 26;

/// Returns the terminal's columns: the variable `COLUMNS`, or the width of the standard output;
/// `None` if that is not a terminal.
pub fn width() -> Option<usize> {
    let set = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    set.or_else(|| Table::new().width().map(usize::from)).filter(|&columns| columns > 0)
}

/// Returns the columns of a text without escape sequences.
pub fn columns(text: &str) -> usize {
    text.lines().map(|line| line.chars().count()).max().unwrap_or(0)
}

/// Breaks long lines between words, and indents the continuation.
pub fn text(text: &str, width: Option<usize>) -> String {
    let mut out = String::new();
    for line in text.lines() {
        let mut column = 0;
        for word in line.split_inclusive(' ') {
            if column > 0 && width.is_some_and(|width| column + columns(word.trim_end()) > width) {
                out.truncate(out.trim_end_matches(' ').len());
                out += "\n  ";
                column = 2;
            }
            out += word;
            column += columns(word);
        }
        out.push('\n');
    }
    out.pop();
    out
}

/// Renders a table. If it does not fit, columns without any figure are omitted first, then words of
/// the widest column wrap. If that is not enough, each row becomes lines.
pub fn table(mut table: Table, width: Option<usize>) -> String {
    let Some(width) = width else { return table.trim_fmt() };
    let cells = |row: &Row| row.cell_iter().map(|cell| cell.content()).collect::<Vec<_>>();
    let header = table.header().map(cells).unwrap_or_default();
    let rows: Vec<_> = table.row_iter().map(cells).collect();
    let mut widths: Vec<usize> = table.column_max_content_widths().into_iter().map(usize::from).collect();
    let mut shown: Vec<usize> = (0..widths.len()).collect();
    // With padding, and with a line at each edge.
    let edges = if table.style(TableComponent::VerticalLines).is_some() { 1 } else { 0 };
    let needs = |widths: &[usize], shown: &[usize]| {
        edges + shown.iter().map(|&column| widths[column] + 2 + edges).sum::<usize>()
    };
    for column in (1..widths.len()).rev() {
        let is_empty = rows.iter().all(|row| ["", "-", "0"].contains(&row[column].trim()));
        if is_empty && needs(&widths, &shown) > width {
            shown.retain(|&other| other != column);
        }
    }
    let least = |cell: &String| match columns(cell) {
        short @ ..=CELL_MAX => short,
        _ => cell.split_whitespace().map(columns).max().unwrap_or(0).min(WORD_MAX),
    };
    let floor =
        |column: usize| rows.iter().chain([&header]).filter_map(|row| row.get(column)).map(least).max();
    while needs(&widths, &shown) > width {
        let can_shrink = shown.iter().filter(|&&column| Some(widths[column]) > floor(column));
        match can_shrink.max_by_key(|&&column| widths[column]) {
            Some(&column) if width >= TABLE_MIN => widths[column] -= 1,
            _ => return text(&lines(&header, &rows), Some(width)),
        }
    }
    let fixed = |index: usize| ColumnConstraint::Absolute(Width::Fixed(widths[index] as u16 + 2));
    for (index, column) in table.column_iter_mut().enumerate() {
        let is_shown = shown.contains(&index);
        column.set_constraint(if is_shown { fixed(index) } else { ColumnConstraint::Hidden });
    }
    table.trim_fmt()
}

/// Returns lines `name: value`: with a header, one per cell; otherwise one per row, whose last two
/// cells are a figure and a note, as `name: figure (note)`.
fn lines(header: &[String], rows: &[Vec<String>]) -> String {
    let row = |row: &Vec<String>| match &row[..] {
        [names @ .., figure, note] if header.is_empty() => {
            let note = if note.is_empty() { String::new() } else { format!(" ({note})") };
            format!("{}: {figure}{note}\n", names.join(" ").trim())
        }
        row => {
            let named = header.iter().zip(row).filter(|(_, value)| !value.is_empty());
            named.map(|(name, value)| format!("{name}: {value}\n")).collect::<String>() + "\n"
        }
    };
    rows.iter().map(row).collect::<String>().trim_end().to_owned()
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
    }
}
