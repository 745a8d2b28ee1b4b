//! Why ranks of a simulated step do not compute.

use std::fmt;

use rannc_plan::Payload;
use rannc_sim::{Event, RankTimeline, What};

/// A shorter time without a computation is the rounding of a sum.
const LEAST_US: f64 = 1e-6;

/// A time in which a rank does not compute.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Gap {
    pub(crate) start_us: f64,
    pub(crate) end_us: f64,
    pub(crate) cause: Cause,
}

/// What the rank waits for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Cause {
    /// A message that is under way.
    Message(What),
    /// A message of which the other rank has not come to its end yet.
    Peer(What),
    /// The other Replicas of its Stage, to reduce with them.
    Replicas,
    /// Other ranks, at the end of the step.
    End,
}

impl Cause {
    /// True when a message is under way.
    pub(crate) const fn is_waiting(self) -> bool {
        matches!(self, Self::Message(_))
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Message(what) => write!(f, "wait for {}", name(*what)),
            Self::Peer(what @ (What::Send { peer, .. } | What::Recv { peer, .. })) => {
                write!(f, "bubble: rank {peer} is not ready for {}", name(*what))
            }
            Self::Peer(what) => write!(f, "bubble: {} is not ready", name(*what)),
            Self::Replicas => f.write_str("bubble: other replicas of the stage have to come to the reduction"),
            Self::End => f.write_str("bubble: other ranks end the step"),
        }
    }
}

/// What an event is, in words.
pub(crate) fn name(what: What) -> String {
    let content = |payload| match payload {
        Payload::Value => "values",
        Payload::Grad => "gradients",
    };
    let of = |mb: u32, stage: Option<u32>| match stage {
        Some(stage) => format!("{mb} of stage {stage}"),
        None => mb.to_string(),
    };
    let ends =
        |stages: Option<(u32, u32)>| stages.map_or_else(String::new, |(from, to)| format!(", stage {from} to {to}"));
    match what {
        What::Forward { mb, stage } => format!("forward {}", of(mb, stage)),
        What::Backward { mb, stage } => format!("backward {}", of(mb, stage)),
        What::BackwardInput { mb, stage } => format!("backward {}, inputs", of(mb, stage)),
        What::BackwardWeight { mb, stage } => format!("backward {}, weights", of(mb, stage)),
        What::Send { mb, peer, stages, payload } => format!("{} {mb} to rank {peer}{}", content(payload), ends(stages)),
        What::Recv { mb, peer, stages, payload } => {
            format!("{} {mb} from rank {peer}{}", content(payload), ends(stages))
        }
        What::Exchange { mb, kind } => format!("{kind} {mb}"),
        What::Reduce => "reduce".to_owned(),
        What::Gather => "gather".to_owned(),
        What::Update => "optimizer".to_owned(),
    }
}

pub(crate) fn is_message(event: &Event) -> bool {
    matches!(event.what, What::Send { .. } | What::Recv { .. } | What::Exchange { .. })
}

/// The times in which a rank does not compute, by start.
pub(crate) fn gaps(rank: &RankTimeline, step_us: f64) -> Vec<Gap> {
    let mut gaps = Vec::new();
    let mut free_us = 0.0;
    for next in rank.events.iter().filter(|event| !is_message(event)) {
        add(&mut gaps, rank, free_us, next);
        free_us = next.end_us.max(free_us);
    }
    gaps.push(Gap { start_us: free_us, end_us: step_us, cause: Cause::End });
    gaps.retain(|gap| gap.end_us - gap.start_us > LEAST_US);
    gaps
}

/// The gap before a computation: up to the start of the message that ends it, the other rank is not ready.
fn add(gaps: &mut Vec<Gap>, rank: &RankTimeline, start_us: f64, next: &Event) {
    let end_us = next.start_us;
    let ends_it = |event: &&Event| is_message(event) && (event.end_us - end_us).abs() <= LEAST_US;
    let last = rank.events.iter().filter(ends_it).max_by(|left, right| left.start_us.total_cmp(&right.start_us));
    let Some(message) = last else {
        let cause = if matches!(next.what, What::Reduce | What::Gather) { Cause::Replicas } else { Cause::End };
        gaps.push(Gap { start_us, end_us, cause });
        return;
    };
    let under_way_us = message.start_us.clamp(start_us, end_us);
    gaps.push(Gap { start_us, end_us: under_way_us, cause: Cause::Peer(message.what) });
    gaps.push(Gap { start_us: under_way_us, end_us, cause: Cause::Message(message.what) });
}
