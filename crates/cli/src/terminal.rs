//! How much room there is to print.

use std::io::stdout;

use terminal_size::{Width, terminal_size_of};

/// Columns where nothing tells how many there are, such as in a file or a log.
const UNKNOWN: usize = 120;
/// Fewer would show nothing.
const LEAST: usize = 40;

/// Columns to print in.
#[derive(Clone, Copy, Debug)]
pub struct Terminal {
    columns: Option<usize>,
}

impl Terminal {
    /// One with so many columns; without a number, what is printed goes to a file.
    pub fn new(columns: Option<usize>) -> Self {
        Self { columns: columns.map(|columns| columns.max(LEAST)) }
    }

    /// What the environment's COLUMNS says, else the size of the terminal that stdout is, if it is one.
    pub fn of_stdout() -> Self {
        let wanted = std::env::var("COLUMNS").ok().and_then(|text| text.parse().ok()).filter(|&columns| columns > 0);
        let actual = || terminal_size_of(stdout()).map(|(Width(columns), _)| usize::from(columns));
        Self::new(wanted.or_else(actual))
    }

    /// Columns that tables and paragraphs may take.
    pub fn width(self) -> usize {
        self.columns.unwrap_or(UNKNOWN)
    }

    /// Columns after which messages are broken into lines; in a file each is one line.
    pub(crate) fn breaks_at(self) -> Option<usize> {
        self.columns
    }
}
