//! A simulated step for the trace viewers of Chrome and Perfetto (Chrome's Trace Event Format, as a
//! JSON array).

use std::collections::HashMap;

use rannc_plan::Payload;
use rannc_sim::{Event, RankTimeline, Timeline, What};
use serde_json::{Value, json};

/// The step as JSON for `chrome://tracing` and ui.perfetto.dev: a process for each Stage, a thread for what
/// each rank computes, further threads for its messages, an arrow for each message, and a counter of each
/// rank's memory. What takes no time is left out.
pub fn chrome_trace(timeline: &Timeline) -> String {
    let mut trace = Trace { entries: Vec::new(), threads: 0, messages: HashMap::new() };
    for rank in &timeline.ranks {
        trace.rank(rank);
    }
    format!("[\n{}\n]\n", trace.entries.join(",\n"))
}

/// A message by sender, receiver, content and microbatch.
type MessageKey = (u32, u32, Payload, u32);

/// A trace in the making. Viewers treat the numbers 0 of processes and threads specially, so that both
/// are counted from 1.
struct Trace {
    entries: Vec<String>,
    threads: usize,
    messages: HashMap<MessageKey, usize>,
}

impl Trace {
    fn push(&mut self, entry: &Value) {
        self.entries.push(entry.to_string());
    }

    fn rank(&mut self, own: &RankTimeline) {
        let process = own.stage + 1;
        if own.replica == 0 {
            let name = format!("stage {}", own.stage);
            self.push(&json!({ "ph": "M", "name": "process_name", "pid": process, "args": { "name": name } }));
        }
        let (messages, computations): (Vec<&Event>, Vec<&Event>) =
            own.events.iter().filter(|event| event.end_us > event.start_us).partition(|event| is_message(event));
        self.thread(own, &format!("rank {}", own.rank), &computations);
        for (lane, events) in (1..).zip(lanes(&messages)) {
            self.thread(own, &format!("rank {} messages {lane}", own.rank), &events);
        }
        let counter = format!("memory of rank {}", own.rank);
        for (us, bytes) in &own.memory {
            self.push(&json!({ "ph": "C", "name": counter, "pid": process, "ts": us, "args": { "bytes": bytes } }));
        }
    }

    fn thread(&mut self, own: &RankTimeline, name: &str, events: &[&Event]) {
        self.threads += 1;
        let (process, thread) = (own.stage + 1, self.threads);
        self.push(
            &json!({ "ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": { "name": name } }),
        );
        for &&Event { start_us, end_us, what } in events {
            let (name, us) = (event_name(what), end_us - start_us);
            self.push(&json!({
                "ph": "X", "name": name, "pid": process, "tid": thread, "ts": start_us, "dur": us,
            }));
            let (key, phase) = match what {
                What::Send { mb, peer, payload } => ((own.rank, peer, payload, mb), "s"),
                What::Recv { mb, peer, payload } => ((peer, own.rank, payload, mb), "f"),
                _ => continue,
            };
            let next = self.messages.len();
            let id = *self.messages.entry(key).or_insert(next);
            self.push(&json!({
                "ph": phase, "name": "message", "cat": "message", "id": id, "bp": "e",
                "pid": process, "tid": thread, "ts": start_us,
            }));
        }
    }
}

fn is_message(event: &Event) -> bool {
    matches!(event.what, What::Send { .. } | What::Recv { .. })
}

fn event_name(what: What) -> String {
    let content = |payload| match payload {
        Payload::Value => "values",
        Payload::Grad => "gradients",
    };
    match what {
        What::Forward { mb } => format!("F{mb}"),
        What::Backward { mb } => format!("B{mb}"),
        What::Send { mb, peer, payload } => format!("{} {mb} to rank {peer}", content(payload)),
        What::Recv { mb, peer, payload } => format!("{} {mb} from rank {peer}", content(payload)),
        What::Reduce => "reduce".to_owned(),
        What::Update => "update".to_owned(),
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
