//! A simulated step drawn as text: ranks by time.

use rannc_cost::format_us;
use rannc_sim::{Event, RankTimeline, Timeline, What};

use crate::format::{paragraph, runs};
use crate::idle::{gaps, is_message};
use crate::simulation::Simulation;

const FORWARD: char = '▒';
const BACKWARD: char = '█';
/// Of a backward in two parts the second.
const WEIGHTS: char = '▓';
const REDUCE: char = '≈';
const UPDATE: char = '=';
const WAITING: char = '.';
const BUBBLE: char = ' ';
/// Never draw less than this, however long the names of the ranks are.
const LEAST_CELLS: usize = 20;

/// The step as a drawing `width` columns wide; ranks that resemble each other share a line, as in the table.
pub fn draw(timeline: &Timeline, simulation: &Simulation, width: usize) -> String {
    let groups = simulation.groups();
    let labels: Vec<String> =
        groups.iter().map(|(first, ranks)| format!("stage {} rank {} ", first.stages(), runs(ranks))).collect();
    let indent = labels.iter().map(String::len).max().unwrap_or(0);
    let cells = width.saturating_sub(indent + 2).max(LEAST_CELLS);
    let end = format_us(timeline.step_us);
    let mut drawing = format!("{:indent$} 0{end:>space$}\n", "", space = cells.saturating_sub(1));
    for ((_, ranks), label) in groups.iter().zip(&labels) {
        let Some(rank) = ranks.first().and_then(|&rank| timeline.ranks.get(rank as usize)) else { continue };
        let line: String = line(rank, timeline.step_us, cells).into_iter().collect();
        drawing += &format!("{label:indent$}|{line}|\n");
    }
    let mut events = timeline.ranks.iter().flat_map(|rank| &rank.events);
    let is_split = events.any(|event| matches!(event.what, What::BackwardWeight { .. }));
    let computations = if is_split {
        format!("{FORWARD} forward, {BACKWARD} backward and {WEIGHTS} the weights' part of one")
    } else {
        format!("{FORWARD} forward and {BACKWARD} backward")
    };
    let legend = format!(
        "{computations}, each begun by its microbatch; {REDUCE} gradient reduction, {UPDATE} \
         optimizer, {WAITING} waiting for a message, blank: bubble"
    );
    drawing + &paragraph(&legend, width)
}

/// What a computation begins with: its microbatch, and its Stage where the rank has several.
fn begun(mb: u32, stage: Option<u32>) -> String {
    stage.map_or_else(|| mb.to_string(), |stage| format!("{mb}@{stage}"))
}

/// What a rank does in each of the cells, by the middle of each.
fn line(rank: &RankTimeline, step_us: f64, cells: usize) -> Vec<char> {
    let mut line = vec![BUBBLE; cells];
    let cell = |us: f64| ((us / step_us * cells as f64 - 0.5).ceil().max(0.0) as usize).min(cells);
    for gap in gaps(rank, step_us).into_iter().filter(|gap| gap.cause.is_waiting()) {
        line[cell(gap.start_us)..cell(gap.end_us)].fill(WAITING);
    }
    for &Event { start_us, end_us, what } in rank.events.iter().filter(|event| !is_message(event)) {
        let slice = &mut line[cell(start_us)..cell(end_us)];
        let (fill, number) = match what {
            What::Forward { mb, stage } => (FORWARD, begun(mb, stage)),
            What::Backward { mb, stage } | What::BackwardInput { mb, stage } => (BACKWARD, begun(mb, stage)),
            What::BackwardWeight { mb, stage } => (WEIGHTS, begun(mb, stage)),
            What::Reduce | What::Gather => (REDUCE, String::new()),
            What::Update => (UPDATE, String::new()),
            What::Send { .. } | What::Recv { .. } | What::Exchange { .. } => continue,
        };
        slice.fill(fill);
        if number.len() < slice.len() {
            slice.iter_mut().zip(number.chars()).for_each(|(cell, digit)| *cell = digit);
        }
    }
    line
}
