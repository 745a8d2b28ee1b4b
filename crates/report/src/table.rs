//! The look of all tables.

use std::ops::Range;

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, Table};

/// Text of a table whose columns in `numbers` are aligned to the right. A last column without entries is
/// left out.
pub(crate) fn table(header: &[&str], mut rows: Vec<Vec<String>>, numbers: Range<usize>) -> String {
    let last = header.len().saturating_sub(1);
    let is_used = rows.iter().any(|row| row.get(last).is_some_and(|cell| !cell.is_empty()));
    let columns = if is_used { header.len() } else { last };
    for row in &mut rows {
        row.truncate(columns);
    }
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_header(&header[..columns]).add_rows(rows);
    for column in table.column_iter_mut().take(numbers.end).skip(numbers.start) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let mut text = table.to_string();
    text.push('\n');
    text
}
