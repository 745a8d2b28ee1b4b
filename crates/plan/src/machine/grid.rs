//! Draws a Program as a grid, ranks by time.

use super::{Halt, ticks};
use crate::program::Program;

/// One line a rank: `F3` is the forward and `B3` the backward of microbatch 3, in Stage 1 of a rank with several `F3@1` and
/// `B3@1`; a dot is an idle tick. Every computation takes one tick and messages take none.
///
/// # Errors
/// When the ranks wait for each other, or the Program's lists do not fit together.
pub fn grid(program: &Program) -> Result<String, Halt> {
    let ranks = ticks(program)?;
    let ticks = ranks.iter().flat_map(|rank| &rank.computed).map(|(tick, _)| tick + 1).max().unwrap_or(0);
    let named = ranks.iter().flat_map(|rank| &rank.computed).map(|(_, seated)| seated.to_string().len()).max();
    let width = named.unwrap_or(0).max(program.microbatches.len().saturating_sub(1).to_string().len() + 1);
    let mut drawing = String::new();
    for (own, computed) in program.ranks.iter().zip(&ranks) {
        let mut cells = vec![".".to_owned(); ticks];
        for (tick, seated) in &computed.computed {
            cells[*tick] = seated.to_string();
        }
        let cells: Vec<String> = cells.iter().map(|cell| format!("{cell:width$}")).collect();
        let line = format!("{}: {}", own.rank, cells.join(" "));
        drawing.push_str(line.trim_end());
        drawing.push('\n');
    }
    Ok(drawing)
}
