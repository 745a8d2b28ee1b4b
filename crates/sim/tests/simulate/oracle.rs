//! The simulator against a recursion over the grid of Stages and microbatches: one Replica a Stage, every
//! Stage sends to the next.

use std::collections::HashMap;

use proptest::collection::vec;
use proptest::prelude::*;
use rannc_plan::{Call, ScheduleKind};
use rannc_sim::What;

use crate::cases::{StageCosts, TableCosts, assert_close, chain, ways};

/// A forward or a backward of a Stage and a microbatch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Cell {
    backward: bool,
    stage: usize,
    mb: usize,
}

struct Oracle<'a> {
    costs: &'a TableCosts,
    stages: usize,
    microbatches: usize,
    call: Call,
    schedule: ScheduleKind,
    ends: HashMap<Cell, f64>,
    arrivals: HashMap<Cell, f64>,
}

impl Oracle<'_> {
    fn step_us(&mut self) -> f64 {
        let mb = self.microbatches - 1;
        (0..self.stages).map(|stage| self.stage_us(stage, mb)).fold(0.0, f64::max)
    }

    /// When a Stage has done all, given the last microbatch.
    fn stage_us(&mut self, stage: usize, mb: usize) -> f64 {
        let backward = self.call.trains();
        let last = Cell { backward, stage, mb };
        let receiver = if backward { stage.wrapping_sub(1) } else { stage + 1 };
        let sent_us = self.arrival_at(Cell { stage: receiver, ..last });
        let own_us = self.left(last);
        let costs = &self.costs.stages[stage];
        own_us.max(sent_us) + if backward { costs.update_us } else { 0.0 }
    }

    /// As [`arrival`](Self::arrival), for a Stage that need not exist.
    fn arrival_at(&mut self, cell: Cell) -> f64 {
        if cell.stage < self.stages { self.arrival(cell) } else { 0.0 }
    }

    /// The computation before this one on its Stage.
    fn before(&self, cell: Cell) -> Option<Cell> {
        let Cell { backward, stage, mb } = cell;
        let warm_up = match (self.call, self.schedule) {
            (Call::Whole, ScheduleKind::OneForwardOneBackward) => self.microbatches.min(self.stages - 1 - stage),
            (Call::Whole, ScheduleKind::FillDrain) | (Call::Halves | Call::Forward, _) => self.microbatches,
        };
        let (backward, mb) = match (backward, mb) {
            (false, 0) => return None,
            (false, mb) if mb <= warm_up => (false, mb - 1),
            (false, mb) => (true, mb - warm_up - 1),
            (true, mb) if mb + warm_up < self.microbatches => (false, mb + warm_up),
            (true, 0) => (false, self.microbatches - 1),
            (true, mb) => (true, mb - 1),
        };
        Some(Cell { backward, stage, mb })
    }

    fn end(&mut self, cell: Cell) -> f64 {
        if let Some(&end) = self.ends.get(&cell) {
            return end;
        }
        let free = self.before(cell).map_or(0.0, |before| self.left(before));
        let costs = &self.costs.stages[cell.stage];
        let us = if cell.backward { costs.backward_us } else { costs.forward_us };
        let end = free.max(self.arrival(cell)) + us;
        self.ends.insert(cell, end);
        end
    }

    /// When the Stage has sent what it has computed and goes on.
    fn left(&mut self, cell: Cell) -> f64 {
        let end = self.end(cell);
        let receiver = if cell.backward { cell.stage.wrapping_sub(1) } else { cell.stage + 1 };
        let last_forward = !cell.backward && cell.mb == self.microbatches - 1;
        if self.call == Call::Halves && last_forward {
            end.max(self.arrival_at(Cell { stage: receiver, ..cell }))
        } else if (cell.backward || self.call == Call::Forward) && cell.mb >= 2 {
            end.max(self.arrival_at(Cell { stage: receiver, mb: cell.mb - 2, ..cell }))
        } else {
            end
        }
    }

    /// When what a computation needs has arrived.
    fn arrival(&mut self, cell: Cell) -> f64 {
        let from = if cell.backward { cell.stage + 1 } else { cell.stage.wrapping_sub(1) };
        if from >= self.stages {
            return 0.0;
        }
        if let Some(&arrival) = self.arrivals.get(&cell) {
            return arrival;
        }
        let maker = Cell { stage: from, ..cell };
        // The last forwards' Values need not have arrived for themselves to leave.
        let sent = if cell.backward || self.call == Call::Forward { self.left(maker) } else { self.end(maker) };
        let posted = self.posted(cell);
        let free = if cell.mb > 0 { self.arrival(Cell { mb: cell.mb - 1, ..cell }) } else { 0.0 };
        let arrival = sent.max(posted).max(free) + self.costs.latency_us[cell.stage] + self.costs.byte_us[from];
        self.arrivals.insert(cell, arrival);
        arrival
    }

    /// When a Stage begins to receive for a computation: one computation ahead.
    fn posted(&mut self, cell: Cell) -> f64 {
        let Some(before) = self.before(cell) else { return 0.0 };
        if self.call == Call::Halves && cell.backward && cell.mb == 0 {
            return self.left(before);
        }
        match self.before(before) {
            None => 0.0,
            Some(earlier) => self.left(earlier),
        }
    }
}

/// Costs of up to seven Stages of one rank each.
fn tables() -> impl Strategy<Value = TableCosts> {
    let stage = (0.0..4.0, 0.0..8.0, 0.0..9.0, 0.0..9.0).prop_map(|(forward_us, backward_us, reduce_us, update_us)| {
        StageCosts { forward_us, backward_us, reduce_us, update_us, ..StageCosts::default() }
    });
    // Messages of no time, of little, and longer than any computation.
    (1..=7_usize, prop_oneof![Just(0.0), Just(0.3), Just(3.0), Just(20.0)]).prop_flat_map(
        move |(stages, longest_us)| {
            let times = || vec((0.0..=1.0).prop_map(move |share: f64| share * longest_us), stages);
            (vec(stage.clone(), stages), times(), times()).prop_map(|(stages, latency_us, byte_us)| TableCosts {
                stages,
                tied_us: 0.0,
                latency_us,
                byte_us,
            })
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn equals_the_longest_path(costs in tables(), microbatches in 1..=12_u32, (call, schedule) in ways()) {
        let stages = costs.stages.len();
        let program = chain(&vec![1; stages], microbatches, u64::from(microbatches), (call, schedule));
        let timeline = costs.run(&program);
        let mut oracle = Oracle {
            costs: &costs,
            stages,
            microbatches: microbatches as usize,
            call,
            schedule,
            ends: HashMap::new(),
            arrivals: HashMap::new(),
        };
        assert_close(timeline.step_us, oracle.step_us());
        for rank in &timeline.ranks {
            for event in &rank.events {
                let (backward, mb) = match event.what {
                    What::Forward { mb, .. } => (false, mb),
                    What::Backward { mb, .. } => (true, mb),
                    _ => continue,
                };
                let cell = Cell { backward, stage: rank.seats[0].stage as usize, mb: mb as usize };
                assert_close(event.end_us, oracle.end(cell));
            }
        }
    }
}
