//! The look of all tables: a header above a line, no borders, never wider than asked for.

use comfy_table::{
    CellAlignment, ColumnConstraint, ContentArrangement, ContentLineStyle, LineStyle, Table as Drawn, TableStyle, Width,
};

/// A header with a line below; columns are told apart by space.
const STYLE: TableStyle = TableStyle::new()
    .header_lines(ContentLineStyle::none())
    .header_separator(LineStyle::none().fill('─'))
    .content_lines(ContentLineStyle::none());
/// Space between columns.
const GAP: usize = 2;
/// A column of text is never made narrower than its longest word or this.
const LEAST_TEXT: usize = 16;

/// A column: its header, whether it holds amounts, and whether it tells what a row is about.
#[derive(Clone, Copy, Debug)]
pub struct Column<'a> {
    header: &'a str,
    is_amount: bool,
    is_key: bool,
    begins: bool,
}

impl Column<'_> {
    /// The same column, repeated in every part of a table that does not fit; the first column always is.
    pub const fn key(self) -> Self {
        Self { is_key: true, ..self }
    }

    /// The same column, which begins a new part of a table that does not fit.
    pub const fn begins(self) -> Self {
        Self { begins: true, ..self }
    }
}

/// A column of text, which may be wrapped.
pub const fn text(header: &str) -> Column<'_> {
    Column { header, is_amount: false, is_key: false, begins: false }
}

/// A column of amounts, aligned to the right and never wrapped.
pub const fn amount(header: &str) -> Column<'_> {
    Column { header, is_amount: true, is_key: false, begins: false }
}

/// The text of a table at most `width` columns wide, its last line ended.
///
/// Where there is too little room, first headers are wrapped, then columns of text. Then the table is continued below
/// itself, each part with the columns that tell what a row is about. Columns without any entry are left out; missing cells are empty.
pub fn table(columns: &[Column<'_>], rows: &[Vec<String>], width: usize) -> String {
    let measured = columns.iter().enumerate().map(|(place, column)| Measured::new(place, *column, rows));
    let used: Vec<Measured<'_>> = measured.filter(|column| column.content > 0).collect();
    parts(&used, width).iter().map(|part| draw(part, rows, width)).collect::<Vec<_>>().join("\n")
}

/// A column, and how many terminal columns it takes.
#[derive(Clone, Copy)]
struct Measured<'a> {
    place: usize,
    column: Column<'a>,
    /// Its longest line below the header.
    content: usize,
    /// Its longest word below the header.
    word: usize,
}

impl<'a> Measured<'a> {
    fn new(place: usize, column: Column<'a>, rows: &[Vec<String>]) -> Self {
        let cells = rows.iter().filter_map(|row| row.get(place)).flat_map(|cell| cell.lines());
        let (content, word) =
            cells.fold((0, 0), |(content, word), line| (content.max(wide(line)), word.max(longest(line))));
        Self { place, column, content, word }
    }

    /// With its header on one line.
    fn natural(&self) -> usize {
        self.content.max(wide(self.column.header))
    }

    /// With its header wrapped.
    fn folded(&self) -> usize {
        self.content.max(longest(self.column.header))
    }

    /// With everything wrapped that may be.
    fn least(&self) -> usize {
        if self.column.is_amount {
            return self.folded();
        }
        self.word.max(LEAST_TEXT.min(self.content)).max(longest(self.column.header))
    }
}

fn wide(line: &str) -> usize {
    textwrap::core::display_width(line)
}

fn longest(line: &str) -> usize {
    line.split(' ').map(wide).max().unwrap_or(0)
}

fn sum(widths: impl Iterator<Item = usize>) -> usize {
    widths.map(|width| width + GAP).sum::<usize>().saturating_sub(GAP)
}

/// The columns in parts that fit below each other and are about as wide, each with the keys.
fn parts<'a>(columns: &[Measured<'a>], width: usize) -> Vec<Vec<Measured<'a>>> {
    if sum(columns.iter().map(Measured::least)) <= width {
        return vec![columns.to_vec()];
    }
    let fewest = packed(columns, width).len();
    let narrowest = (0..width).find(|&narrower| packed(columns, narrower).len() == fewest);
    packed(columns, narrowest.unwrap_or(width))
}

/// The columns in parts, each as full as possible.
fn packed<'a>(columns: &[Measured<'a>], width: usize) -> Vec<Vec<Measured<'a>>> {
    let is_key = |(place, column): &(usize, &Measured<'a>)| *place == 0 || column.column.is_key;
    let keys: Vec<Measured<'a>> = columns.iter().enumerate().filter(is_key).map(|(_, column)| *column).collect();
    let mut parts = vec![keys.clone()];
    for (_, &column) in columns.iter().enumerate().filter(|column| !is_key(column)) {
        let part = parts.last_mut().expect("there is a first part");
        let is_full = || sum(part.iter().chain([&column]).map(Measured::least)) > width;
        if part.len() > keys.len() && (column.column.begins || is_full()) {
            parts.push([keys.as_slice(), &[column]].concat());
        } else {
            part.push(column);
        }
    }
    parts
}

/// The width of each column of a part.
fn widths(columns: &[Measured<'_>], width: usize) -> Vec<usize> {
    let [natural, folded, least] =
        [Measured::natural, Measured::folded, Measured::least].map(|all| columns.iter().map(all).collect::<Vec<_>>());
    let fits = |widths: &[usize]| sum(widths.iter().copied()) <= width;
    if fits(&natural) {
        natural
    } else if fits(&folded) {
        given(folded, &natural, width)
    } else {
        given(least, &folded, width)
    }
}

/// Gives what is left of the width to columns in turn, until they have what they want.
fn given(mut widths: Vec<usize>, wanted: &[usize], width: usize) -> Vec<usize> {
    let mut left = width.saturating_sub(sum(widths.iter().copied()));
    loop {
        let mut given = false;
        for (own, wanted) in widths.iter_mut().zip(wanted) {
            if left > 0 && *own < *wanted {
                *own += 1;
                left -= 1;
                given = true;
            }
        }
        if !given {
            return widths;
        }
    }
}

fn draw(columns: &[Measured<'_>], rows: &[Vec<String>], width: usize) -> String {
    let widths = widths(columns, width);
    let mut drawn = Drawn::new();
    drawn.load_style(STYLE).set_content_arrangement(ContentArrangement::Disabled);
    drawn.set_header(columns.iter().map(|column| column.column.header));
    for row in rows {
        drawn.add_row(columns.iter().map(|column| row.get(column.place).map_or("", String::as_str)));
    }
    let last = columns.len().saturating_sub(1);
    for (place, (column, measured)) in drawn.column_iter_mut().zip(columns).enumerate() {
        let gap = if place == last { 0 } else { GAP };
        column.set_padding((0, u16::try_from(gap).unwrap_or(0)));
        let whole = u16::try_from(widths[place] + gap).unwrap_or(u16::MAX);
        column.set_constraint(ColumnConstraint::Absolute(Width::Fixed(whole)));
        if measured.column.is_amount {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    drawn.trim_fmt() + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: [Column<'_>; 4] = [text("Stage"), text("Modules"), amount("Peak memory"), amount("Saving")];

    fn rows() -> Vec<Vec<String>> {
        let row = |cells: [&str; 3]| cells.map(str::to_owned).to_vec();
        vec![row(["0", "bert.embeddings, bert.encoder.layer.0-3", "16.00 GiB"]), row(["1", "head", "970.02 MiB"])]
    }

    #[test]
    fn a_table_takes_the_room_that_it_has() {
        let drawn = [80, 50, 40].map(|width| {
            let drawn = table(&COLUMNS, &rows(), width);
            assert!(drawn.lines().all(|line| wide(line) <= width), "{width}:\n{drawn}");
            drawn
        });
        assert_eq!(drawn[0].lines().count(), 4, "{}", drawn[0]);
        assert_eq!(drawn[2].matches("Stage").count(), 2, "{}", drawn[2]);
        insta::assert_snapshot!(drawn.join("\n"));
    }

    #[test]
    fn nothing_is_left_of_a_table_without_entries() {
        assert!(!table(&COLUMNS, &rows(), 80).contains("Saving"));
        assert_eq!(table(&COLUMNS, &[], 80).trim(), "");
    }
}
