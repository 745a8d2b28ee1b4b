//! What the simulator finds.

use rannc_plan::{BatchKind, Payload, Seat};
use serde::{Deserialize, Serialize};

/// One simulated step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Timeline {
    /// From the first Action to the end of the last rank.
    pub step_us: f64,
    /// By rank.
    pub ranks: Vec<RankTimeline>,
}

impl Timeline {
    /// Share of device time that is neither forward nor backward, 0 to 1.
    pub fn bubble(&self) -> f64 {
        let total_us = self.step_us * self.ranks.len() as f64;
        let busy_us: f64 = self.ranks.iter().map(|rank| rank.busy_us).sum();
        if total_us > 0.0 { 1.0 - busy_us / total_us } else { 0.0 }
    }
}

/// One rank during the step. Its five times sum to the step's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RankTimeline {
    /// The rank.
    pub rank: u32,
    /// What it has of which Stages, by increasing Stage.
    pub seats: Vec<Seat>,
    /// What it does, by start. Computations do not overlap each other; messages overlap everything.
    pub events: Vec<Event>,
    /// Forward and backward.
    pub busy_us: f64,
    /// Exposed communication: idle while a message that it waits for is under way.
    pub waiting_us: f64,
    /// Gradient reduction, and gathering of parameters.
    pub reduce_us: f64,
    /// The optimizer's update.
    pub update_us: f64,
    /// All other idle time, up to the end of the step.
    pub bubble_us: f64,
    /// Most memory at any time.
    pub peak_bytes: u64,
    /// Memory in use from a time on, by increasing time: (time in us, bytes).
    pub memory: Vec<(f64, u64)>,
}

/// Something that takes time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Event {
    /// When it starts.
    pub start_us: f64,
    /// When it ends.
    pub end_us: f64,
    /// What it is.
    #[serde(flatten)]
    pub what: What,
}

/// What an [`Event`] is. Computations name their Stages where the rank has several.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "what", rename_all = "snake_case")]
pub enum What {
    /// Forward of a microbatch.
    Forward {
        /// The microbatch.
        mb: u32,
        /// Its Stage.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stage: Option<u32>,
    },
    /// Backward of a microbatch.
    Backward {
        /// The microbatch.
        mb: u32,
        /// Its Stage.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stage: Option<u32>,
    },
    /// The inputs' part of the backward of a microbatch.
    BackwardInput {
        /// The microbatch.
        mb: u32,
        /// Its Stage.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stage: Option<u32>,
    },
    /// The weights' part of the backward of a microbatch.
    BackwardWeight {
        /// The microbatch.
        mb: u32,
        /// Its Stage.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stage: Option<u32>,
    },
    /// A message leaves.
    Send {
        /// The microbatch.
        mb: u32,
        /// Where it goes.
        peer: u32,
        /// From which Stage to which, where either rank has several.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stages: Option<(u32, u32)>,
        /// What it carries.
        payload: Payload,
    },
    /// A message arrives.
    Recv {
        /// The microbatch.
        mb: u32,
        /// Where it comes from.
        peer: u32,
        /// From which Stage to which, where either rank has several.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stages: Option<(u32, u32)>,
        /// What it carries.
        payload: Payload,
    },
    /// Rows move between ranks' own batches and the Stages.
    Exchange {
        /// The microbatch.
        mb: u32,
        /// What moves.
        kind: BatchKind,
    },
    /// Gradients are summed over the Replicas.
    Reduce,
    /// Parameters are gathered from the Replicas.
    Gather,
    /// The optimizer updates.
    Update,
}

rannc_plan::with_computations!(What);

impl What {
    /// The Stage of the rank that it is about, where that has a name.
    pub fn stage(self) -> Option<u32> {
        match self {
            Self::Send { stages, .. } => stages.map(|(from, _)| from),
            Self::Recv { stages, .. } => stages.map(|(_, to)| to),
            _ => self.computed().and_then(|seated| seated.stage),
        }
    }
}
