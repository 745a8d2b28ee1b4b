//! A simulated step for the trace viewers of Chrome and Perfetto (Chrome's Trace Event Format, as a
//! JSON array).

use std::collections::HashMap;

use rannc_cost::format_bytes;
use rannc_plan::{Action, Payload, Program, Seat};
use rannc_sim::{Costs, Event, RankTimeline, Timeline, What};
use serde_json::{Map, Value, json};

use crate::idle::{Gap, gaps, is_message, name};

/// What a trace tells of a step.
#[derive(Clone, Copy)]
pub struct TracedStep<'a> {
    /// What was simulated.
    pub program: &'a Program,
    /// The costs that it was simulated with.
    pub costs: &'a dyn Costs,
    /// What came out.
    pub timeline: &'a Timeline,
    /// Summary of the modules of each Stage.
    pub modules: &'a [String],
    /// Memory that a device may use.
    pub limit_bytes: u64,
}

/// The step as JSON for ui.perfetto.dev and `chrome://tracing`: a process for each Stage, or where ranks have several for the
/// first of them, a thread for what each rank
/// computes and for why it does not, further threads for its messages, an arrow for each message, and a counter of
/// each rank's memory. What takes no time is left out.
pub fn chrome_trace(step: TracedStep<'_>) -> String {
    let mut trace =
        Trace { step, bytes: message_bytes(step), entries: Vec::new(), threads: 0, messages: HashMap::new() };
    for rank in &step.timeline.ranks {
        trace.rank(rank);
    }
    format!("[\n{}\n]\n", trace.entries.join(",\n"))
}

/// A message by sender, receiver, their Stages where either has several, content and microbatch.
type MessageKey = (u32, u32, Option<(u32, u32)>, Payload, u32);

fn message_bytes(step: TracedStep<'_>) -> HashMap<MessageKey, u64> {
    let mut bytes = HashMap::new();
    for own in &step.program.ranks {
        for action in own.forward.iter().chain(&own.backward) {
            let Action::Send(message) = action else { continue };
            let pieces = message.pieces.iter().map(|piece| step.costs.value_bytes(piece.value, piece.rows.rows()));
            let key = (own.rank, message.peer, message.stages, message.kind, message.mb);
            *bytes.entry(key).or_default() += pieces.sum::<u64>();
        }
    }
    bytes
}

/// The number of the process in which a rank is shown.
fn process(own: &RankTimeline) -> u32 {
    own.seats[0].stage + 1
}

/// The message that an event of this rank is.
fn key(rank: u32, what: What) -> Option<MessageKey> {
    match what {
        What::Send { mb, peer, stages, payload } => Some((rank, peer, stages, payload, mb)),
        What::Recv { mb, peer, stages, payload } => Some((peer, rank, stages, payload, mb)),
        _ => None,
    }
}

/// A trace in the making. Viewers treat the numbers 0 of processes and threads specially, so that both
/// are counted from 1.
struct Trace<'a> {
    step: TracedStep<'a>,
    bytes: HashMap<MessageKey, u64>,
    entries: Vec<String>,
    threads: usize,
    messages: HashMap<MessageKey, usize>,
}

impl Trace<'_> {
    fn push(&mut self, entry: &Value) {
        self.entries.push(entry.to_string());
    }

    fn rank(&mut self, own: &RankTimeline) {
        let process = process(own);
        if own.seats.first().is_some_and(|seat| seat.replica == 0) {
            let stages: Vec<String> = own.seats.iter().map(|seat| seat.stage.to_string()).collect();
            let kind = if own.seats.len() > 1 { "stages" } else { "stage" };
            let modules: Vec<String> = own.seats.iter().map(|&seat| self.modules(seat)).collect();
            let name = format!("{kind} {}: {}", stages.join(", "), modules.join("; "));
            self.push(&json!({ "ph": "M", "name": "process_name", "pid": process, "args": { "name": name } }));
        }
        let (messages, computations): (Vec<&Event>, Vec<&Event>) =
            own.events.iter().filter(|event| event.end_us > event.start_us).partition(|event| is_message(event));
        self.thread(own, &format!("rank {}", own.rank), &computations);
        for gap in gaps(own, self.step.timeline.step_us) {
            self.gap(own, gap);
        }
        for (lane, events) in (1..).zip(lanes(&messages)) {
            self.thread(own, &format!("rank {} messages {lane}", own.rank), &events);
        }
        let limit_bytes = self.step.limit_bytes;
        let counter = format!("memory of rank {} (limit {})", own.rank, format_bytes(limit_bytes));
        for (us, bytes) in &own.memory {
            let args = json!({ "bytes": bytes, "free_bytes": limit_bytes.saturating_sub(*bytes) });
            self.push(&json!({
                "ph": "C", "name": counter, "cat": "memory", "pid": process, "ts": us, "args": args
            }));
        }
    }

    fn modules(&self, seat: Seat) -> String {
        self.step.modules.get(seat.stage as usize).cloned().unwrap_or_default()
    }

    fn thread(&mut self, own: &RankTimeline, thread_name: &str, events: &[&Event]) {
        self.threads += 1;
        let (process, thread) = (process(own), self.threads);
        self.push(
            &json!({ "ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": { "name": thread_name } }),
        );
        for &&Event { start_us, end_us, what } in events {
            self.push(&json!({
                "ph": "X", "name": name(what), "cat": category(what), "pid": process, "tid": thread,
                "ts": start_us, "dur": end_us - start_us, "args": self.args(own, what),
            }));
            let Some(key) = key(own.rank, what) else { continue };
            let phase = if matches!(what, What::Send { .. }) { "s" } else { "f" };
            let next = self.messages.len();
            let id = *self.messages.entry(key).or_insert(next);
            self.push(&json!({
                "ph": phase, "name": "message", "cat": "message", "id": id, "bp": "e",
                "pid": process, "tid": thread, "ts": start_us,
            }));
        }
    }

    /// On the rank's last thread, that of its computations.
    fn gap(&mut self, own: &RankTimeline, gap: Gap) {
        let Gap { start_us, end_us, cause } = gap;
        let kind = if cause.is_waiting() { "waiting" } else { "bubble" };
        self.push(&json!({
            "ph": "X", "name": kind, "cat": "idle", "pid": process(own), "tid": self.threads,
            "ts": start_us, "dur": end_us - start_us,
            "args": { "stage": own.seats[0].stage, "rank": own.rank, "cause": cause.to_string() },
        }));
    }

    /// What an event is about.
    fn args(&self, own: &RankTimeline, what: What) -> Value {
        let mut args = Map::new();
        let mut add = |name: &str, value: Value| args.insert(name.to_owned(), value);
        let named = own.seats.iter().find(|seat| Some(seat.stage) == what.stage());
        let seat = *named.unwrap_or(&own.seats[0]);
        add("stage", seat.stage.into());
        add("rank", own.rank.into());
        if let Some(key @ (src, dst, _, _, mb)) = key(own.rank, what) {
            add("microbatch", mb.into());
            add("from_rank", src.into());
            add("to_rank", dst.into());
            add("bytes", self.bytes.get(&key).copied().into());
            return args.into();
        }
        add("replica", seat.replica.into());
        if let What::Exchange { mb, .. } = what {
            add("microbatch", mb.into());
        }
        if let Some(mb) = what.computed().map(|seated| seated.compute.microbatch()) {
            let rows = &self.step.program.stage_rows[seat.stage as usize][mb as usize][seat.replica as usize];
            add("microbatch", mb.into());
            add("rows", rows.rows().into());
        }
        add("modules", self.modules(seat).into());
        args.into()
    }
}

const fn category(what: What) -> &'static str {
    match what {
        What::Forward { .. } => "forward",
        What::Backward { .. } => "backward",
        What::BackwardInput { .. } => "backward_input",
        What::BackwardWeight { .. } => "backward_weight",
        What::Send { .. } | What::Recv { .. } | What::Exchange { .. } => "message",
        What::Reduce => "reduce",
        What::Gather => "gather",
        What::Update => "optimizer",
    }
}

/// Divides events, which come by increasing start, into as few lists without overlap as possible.
fn lanes<'a>(events: &[&'a Event]) -> Vec<Vec<&'a Event>> {
    let mut lanes: Vec<Vec<&Event>> = Vec::new();
    for &event in events {
        let free = |lane: &&mut Vec<&Event>| lane.last().is_none_or(|last| last.end_us <= event.start_us);
        match lanes.iter_mut().find(free) {
            Some(lane) => lane.push(event),
            None => lanes.push(vec![event]),
        }
    }
    lanes
}
