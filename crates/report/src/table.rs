//! The look of all tables.

use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, Table};

/// Text of a table whose columns from `numbers_from` on are aligned to the right.
pub(crate) fn table(header: &[&str], rows: Vec<Vec<String>>, numbers_from: usize) -> String {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_header(header).add_rows(rows);
    for column in table.column_iter_mut().skip(numbers_from) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    let mut text = table.to_string();
    text.push('\n');
    text
}

/// Increasing numbers with their runs shortened: `0-3, 6`.
pub(crate) fn runs(numbers: &[u32]) -> String {
    let runs = numbers.chunk_by(|left, right| left.checked_add(1) == Some(*right));
    let texts = runs.filter_map(|run| match run {
        [] => None,
        [only] => Some(only.to_string()),
        [first, .., last] => Some(format!("{first}-{last}")),
    });
    texts.collect::<Vec<_>>().join(", ")
}

/// Equal neighbours counted: `3 x 8, 7`.
pub(crate) fn repeats(amounts: &[u64]) -> String {
    let texts = amounts.chunk_by(u64::eq).filter_map(|run| match run {
        [] => None,
        [only] => Some(only.to_string()),
        [first, ..] => Some(format!("{} x {first}", run.len())),
    });
    texts.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_short() {
        assert_eq!(runs(&[0, 1, 2, 5, 7, 8]), "0-2, 5, 7-8");
        assert_eq!(runs(&[]), "");
        assert_eq!(repeats(&[8, 8, 8, 7]), "3 x 8, 7");
    }
}
