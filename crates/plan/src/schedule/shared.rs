//! Schedules with a name where ranks have several Stages: the order in which computations run if each takes one tick and
//! starts as soon as it may.
//!
//! Of what may start on a rank, 1F1B prefers backwards, and among forwards or backwards the earliest microbatch, of that the
//! last Stage. All orders are parts of one, in which everything stands behind what it waits for, so that ranks never wait
//! for each other.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use super::compute::{Compute, WINDOW};
use super::crew::Crew;
use super::named::ScheduleKind;
use super::order::Order;

/// By crew, its order.
pub(super) fn orders(
    kind: ScheduleKind,
    stage_ranks: &[Vec<u32>],
    feeds: &[(usize, usize)],
    depths: &[u32],
    microbatches: u32,
) -> Vec<Order> {
    let crews = Crew::of_stages(stage_ranks);
    let mut line = Line { kind, feeds, depths, microbatches, crews: &crews, done: vec![Done::default(); depths.len()] };
    let mut orders = vec![Order::default(); crews.len()];
    while line.done.iter().any(|done| done.backwards < microbatches) {
        for (stage, compute) in line.tick(stage_ranks) {
            for (crew, order) in crews.iter().zip(&mut orders).filter(|(crew, _)| crew.stages.contains(&stage)) {
                order.0.push(crew.seated(stage, compute));
            }
        }
    }
    orders
}

/// How many microbatches of a Stage have been computed.
#[derive(Clone, Copy, Debug, Default)]
struct Done {
    forwards: u32,
    backwards: u32,
}

/// Stages on their way.
struct Line<'a> {
    kind: ScheduleKind,
    feeds: &'a [(usize, usize)],
    depths: &'a [u32],
    microbatches: u32,
    crews: &'a [Crew],
    done: Vec<Done>,
}

impl Line<'_> {
    /// What is computed in the next tick.
    fn tick(&mut self, stage_ranks: &[Vec<u32>]) -> Vec<(u32, Compute)> {
        let mut ready: Vec<(u32, Compute)> = (0..).zip(stage_ranks).flat_map(|(stage, _)| self.ready(stage)).collect();
        ready.sort_by_key(|&(stage, compute)| {
            (matches!(compute, Compute::Forward(_)), compute.microbatch(), Reverse(stage))
        });
        let mut busy: BTreeSet<u32> = BTreeSet::new();
        ready.retain(|&(stage, _)| {
            let ranks = &stage_ranks[stage as usize];
            let free = ranks.iter().all(|rank| !busy.contains(rank));
            busy.extend(ranks.iter().filter(|_| free));
            free
        });
        for &(stage, compute) in &ready {
            let done = &mut self.done[stage as usize];
            match compute {
                Compute::Forward(_) => done.forwards += 1,
                _ => done.backwards += 1,
            }
        }
        ready
    }

    /// What a Stage could compute.
    fn ready(&self, stage: u32) -> impl Iterator<Item = (u32, Compute)> {
        let Done { forwards, backwards } = self.done[stage as usize];
        let forward = self.may_forward(stage).then_some((stage, Compute::Forward(forwards)));
        let backward = self.may_backward(stage).then_some((stage, Compute::Backward(backwards)));
        forward.into_iter().chain(backward)
    }

    /// Its Values are there, whoever uses what it makes is not far behind, and 1F1B lets it hold one more.
    fn may_forward(&self, stage: u32) -> bool {
        let Done { forwards, backwards } = self.done[stage as usize];
        let holds_less = self.kind == ScheduleKind::FillDrain || forwards - backwards < self.depths[stage as usize];
        forwards < self.microbatches
            && holds_less
            && self.makers(stage).all(|maker| maker.forwards > forwards)
            && self.users(stage).all(|user| user.forwards + WINDOW as u32 > forwards)
    }

    /// The same of gradients; under fill-drain, its ranks have no forward left.
    fn may_backward(&self, stage: u32) -> bool {
        let Done { forwards, backwards } = self.done[stage as usize];
        let beside = self.crews.iter().filter(|crew| crew.stages.contains(&stage)).flat_map(|crew| &crew.stages);
        let filled = || beside.into_iter().all(|&other| self.done[other as usize].forwards == self.microbatches);
        backwards < forwards
            && (self.kind != ScheduleKind::FillDrain || filled())
            && self.users(stage).all(|user| user.backwards > backwards)
            && self.makers(stage).all(|maker| maker.backwards + WINDOW as u32 > backwards)
    }

    fn makers(&self, stage: u32) -> impl Iterator<Item = Done> {
        self.feeds.iter().filter(move |(_, to)| *to == stage as usize).map(|&(from, _)| self.done[from])
    }

    fn users(&self, stage: u32) -> impl Iterator<Item = Done> {
        self.feeds.iter().filter(move |(from, _)| *from == stage as usize).map(|&(_, to)| self.done[to])
    }
}
