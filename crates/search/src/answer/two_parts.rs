//! Plans whose backwards come in two parts: of a division that was found, with the best orders that list scheduling finds
//! for it.

use std::collections::BTreeMap;

use rannc_plan::{Compute, Order, Plan, Schedule, Sharding};

use super::assemble::Assembly;
use super::links::ReplicaLink;
use super::list_schedule::{ListScheduler, Manner, Scheduled, StageLink, StageTimes};
use crate::price::{At, BySize, Priced, ReplicaPass, TimedStage};
use crate::solve::{FoundStage, Solution};
use crate::stop::Deadline;

/// Ways of the list scheduler whose orders are told exactly: the best by its own account.
const TOLD_EXACTLY: usize = 3;

/// Share of the shortest time by which orders may be longer that take less memory.
const NEARLY: f64 = 0.005;

impl Assembly<'_> {
    /// The Plan of a division with backwards in two parts, in the best order; `None` where that has no use, or where
    /// microbatches have no rows: then nobody knows their place in an order. Of the orders that were found in time.
    pub(crate) fn plan_in_two_parts(&self, solution: &Solution, deadline: Deadline<'_>) -> Option<Plan> {
        let step = &self.pricing.step;
        let linker = self.linker(solution);
        let moves = linker.moves();
        let stage_links = slowest(&moves.links, &linker.stage_of_replicas());
        let (times, stages) = self.priced_stages(solution, &stage_links);
        if step.microbatches < solution.case.microbatches || stages.iter().all(|stage| stage.parts_us.is_none()) {
            return None;
        }
        let forwards_first = !self.pricing.problem.settings.loss_inside;
        let scheduler = ListScheduler { step, stages: &stages, links: &stage_links, forwards_first, deadline };
        let told = |orders: Vec<Order>| {
            let bytes = scheduler.peak_bytes(&orders);
            let schedule = Schedule::Explicit(orders);
            Told { us: step.exact_us(&schedule, &times, &moves), bytes, of: schedule }
        };
        let orders = best_orders(&scheduler, &manners(&linker.depths(), step.microbatches));
        let in_time = orders.into_iter().take_while(|_| !deadline.is_over());
        let best = leanest(in_time.map(told).collect());
        best.map(|best| self.plan_by(best.of, solution, 0.0))
    }

    fn priced_stages(&self, solution: &Solution, links: &[StageLink]) -> (Vec<TimedStage>, Vec<StageTimes>) {
        let priced = |(number, stage): (usize, &FoundStage)| {
            let at = self.pricing.at(self.order.place_at(&stage.positions));
            let waiting_bytes = self.pricing.chain.waiting_bytes(&stage.run, at.most_rows());
            let priced = Priced { waiting_bytes, ..self.priced(stage, &at) };
            let timed = self.timed(stage, &priced, true);
            let sends_back = links.iter().any(|link| link.to == number && link.grads_us.is_some());
            let divides = stage.saver.sharding >= Sharding::Gradients && stage.positions.len() > 1;
            let times = of_stage(&priced, timed.largest(), &at, sends_back && !divides);
            (timed, times)
        };
        solution.found.stages.iter().enumerate().map(priced).unzip()
    }
}

fn of_stage(priced: &Priced, passes: BySize<ReplicaPass>, at: &At<'_>, may_split: bool) -> StageTimes {
    let parts_us = passes.map(|pass| pass.parts_us);
    let has_weights = parts_us.iter().any(|[_, weight_us]| *weight_us > 0.0);
    StageTimes {
        forward_us: passes.map(|pass| pass.forward_us),
        backward_us: passes.map(|pass| pass.backward_us),
        parts_us: (may_split && has_weights).then_some(parts_us),
        microbatch_bytes: priced.memory.microbatch_bytes,
        waiting_bytes: priced.waiting_bytes,
        room_bytes: at.usable_bytes - priced.memory.fixed_bytes(),
    }
}

/// Of the links between the Replicas of each two Stages the slowest; with the Stage of each Replica.
fn slowest(links: &[ReplicaLink], stage_of: &[usize]) -> Vec<StageLink> {
    let slower = |one: BySize<f64>, other: BySize<f64>| std::array::from_fn(|size| one[size].max(other[size]));
    let mut found: BTreeMap<(usize, usize), StageLink> = BTreeMap::new();
    for &ReplicaLink { from, to, values_us, grads_us } in links {
        let (from, to) = (stage_of[from], stage_of[to]);
        let all_us = |us: BySize<Option<f64>>| us.map(|us| us.unwrap_or(0.0));
        let has_grads = grads_us.iter().any(Option::is_some);
        let (values_us, grads_us) = (all_us(values_us), has_grads.then(|| all_us(grads_us)));
        let link = found.entry((from, to)).or_insert(StageLink { from, to, values_us, grads_us });
        link.values_us = slower(link.values_us, values_us);
        link.grads_us = link.grads_us.zip(grads_us).map(|(one, other)| slower(one, other));
    }
    found.into_values().collect()
}

/// What orders take.
struct Told<T> {
    us: f64,
    /// Of microbatches, on the Stage that holds most.
    bytes: f64,
    of: T,
}

/// Of those that take nearly the shortest time, the one that takes least memory.
fn leanest<T>(told: Vec<Told<T>>) -> Option<Told<T>> {
    let best_us = told.iter().map(|told| told.us).fold(f64::INFINITY, f64::min);
    let near = told.into_iter().filter(|told| told.us <= best_us * (1.0 + NEARLY));
    near.min_by(|one, other| one.bytes.total_cmp(&other.bytes).then(one.us.total_cmp(&other.us)))
}

/// Different orders that come of the best manners and of the leanest that is nearly as good, of each also with the parts
/// of backwards joined that follow each other.
fn best_orders(scheduler: &ListScheduler<'_>, manners: &[Manner]) -> Vec<Vec<Order>> {
    let mut scheduled: Vec<Scheduled> = manners.iter().filter_map(|manner| scheduler.schedule(manner)).collect();
    scheduled.sort_by(|one, other| one.end_us.total_cmp(&other.end_us));
    scheduled.dedup_by(|next, kept| next.orders == kept.orders);
    let told = scheduled.iter().map(|found| Told {
        us: found.end_us,
        bytes: scheduler.peak_bytes(&found.orders),
        of: &found.orders,
    });
    let lean = leanest(told.collect()).map(|lean| lean.of.clone());
    let best = scheduled.into_iter().take(TOLD_EXACTLY).map(|found| found.orders);
    let mut found: Vec<Vec<Order>> = Vec::new();
    for orders in best.chain(lean) {
        for orders in [orders.iter().map(joined).collect(), orders] {
            if !found.contains(&orders) {
                found.push(orders);
            }
        }
    }
    found
}

/// Ways to put Stages of these depths in order: with as many microbatches in flight as 1F1B has, with up to as many more
/// as there are Stages, with the same on every Stage, with twice that, and with all.
fn manners(depths: &[u32], microbatches: u64) -> Vec<Manner> {
    let stages = depths.len() as u64;
    let limits = |most: &dyn Fn(u64) -> u64| -> Vec<u64> {
        depths.iter().map(|&depth| most(u64::from(depth)).min(microbatches)).collect()
    };
    let deeper = (0..stages).map(|more| limits(&|depth| depth + more));
    let equal = [stages, 2 * stages - 1, microbatches].map(|most| limits(&|_| most));
    let mut different: Vec<Vec<u64>> = Vec::new();
    for in_flight in deeper.chain(equal) {
        if !different.contains(&in_flight) {
            different.push(in_flight);
        }
    }
    let manner =
        |in_flight: Vec<u64>| [false, true].map(|fits_gaps| Manner { in_flight: in_flight.clone(), fits_gaps });
    different.into_iter().flat_map(manner).collect()
}

/// The order with one backward where both its parts follow each other.
fn joined(order: &Order) -> Order {
    let mut found: Vec<Compute> = Vec::with_capacity(order.0.len());
    for compute in order.computes() {
        match (found.last_mut(), compute) {
            (Some(last @ Compute::BackwardInput(_)), Compute::BackwardWeight(mb)) if last.microbatch() == mb => {
                *last = Compute::Backward(mb);
            }
            _ => found.push(compute),
        }
    }
    found.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use proptest::prelude::*;
    use rannc_plan::{ScheduleKind, depths};

    use super::*;
    use crate::price::StepModel;
    use crate::settings::Limits;
    use crate::stop::Clock;

    fn chain(times: &[[f64; 3]], send_us: f64, bytes: [f64; 3]) -> (Vec<StageTimes>, Vec<StageLink>) {
        let [microbatch_bytes, waiting_bytes, room_bytes] = bytes;
        let stage = |(place, &[forward_us, input_us, weight_us]): (usize, &[f64; 3])| StageTimes {
            forward_us: [forward_us; 3],
            backward_us: [input_us + weight_us; 3],
            parts_us: (place > 0).then_some([[input_us, weight_us]; 3]),
            microbatch_bytes,
            waiting_bytes,
            room_bytes,
        };
        let link = |from| StageLink { from, to: from + 1, values_us: [send_us; 3], grads_us: Some([send_us; 3]) };
        (times.iter().enumerate().map(stage).collect(), (0..times.len() - 1).map(link).collect())
    }

    fn scheduled(
        (stages, links): &(Vec<StageTimes>, Vec<StageLink>),
        microbatches: u64,
        forwards_first: bool,
    ) -> Vec<Scheduled> {
        let step = StepModel::new(ScheduleKind::OneForwardOneBackward, [0, 0, microbatches]);
        let scheduler = ListScheduler { step: &step, stages, links, forwards_first, deadline: Deadline::never() };
        let depths = depths(stages.len(), links.iter().map(|link| (link.from, link.to)));
        manners(&depths, microbatches).iter().filter_map(|manner| scheduler.schedule(manner)).collect()
    }

    /// Equal Stages: no more idle than until the first microbatch has come and its gradient has gone.
    #[test]
    fn eight_stages_and_sixteen_microbatches() {
        let case = chain(&[[1.0; 3]; 8], 0.0, [1.0, 0.0, f64::INFINITY]);
        let best = |first| scheduled(&case, 16, first).into_iter().map(|found| found.end_us).fold(f64::MAX, f64::min);
        let whole_us = f64::from((16 + 7) * 3);
        assert!(whole_us / best(false) > 1.18, "{}", best(false));
        assert!(whole_us / best(true) > 1.1, "{}", best(true));
    }

    #[test]
    fn no_order_is_found_without_time() {
        let (stages, links) = chain(&[[1.0; 3]; 8], 0.0, [1.0, 0.0, f64::INFINITY]);
        let step = StepModel::new(ScheduleKind::OneForwardOneBackward, [0, 0, 16]);
        let told = AtomicBool::new(false);
        let deadline = Deadline::new(&Limits { time_ms: Some(0), ..Limits::default() }, Clock::new(&told));
        let scheduler = ListScheduler { step: &step, stages: &stages, links: &links, forwards_first: false, deadline };
        assert!(scheduler.schedule(&Manner { in_flight: vec![8; 8], fits_gaps: false }).is_none());
    }

    /// More microbatches in flight do not always make Stages faster.
    #[test]
    fn memory_is_not_taken_for_nothing() {
        let case = chain(&[[1.0, 1.0, 1.0]; 2], 0.1, [1.0, 0.5, f64::INFINITY]);
        let told = |found: Scheduled| Told {
            us: found.end_us,
            bytes: found.orders.iter().map(|order| order.in_flight() as f64).fold(0.0, f64::max),
            of: found.orders,
        };
        let all: Vec<_> = scheduled(&case, 16, false).into_iter().map(told).collect();
        let best_us = all.iter().map(|told| told.us).fold(f64::INFINITY, f64::min);
        let most = all.iter().map(|told| told.bytes).fold(0.0, f64::max);
        let lean = leanest(all).expect("there are orders");
        assert!(lean.us <= best_us * 1.005, "{} of {best_us}", lean.us);
        assert!(lean.bytes < most, "{} of {most}", lean.bytes);
    }

    proptest! {
        /// Orders are complete, hold no more than there is room for, and take no longer than one computation at a time.
        #[test]
        fn orders_are_sound(
            times in prop::collection::vec(prop::array::uniform3(0.1..5.0_f64), 1..7),
            send_us in 0.0..3.0_f64,
            (microbatches, room, waiting_bytes) in (1..12_u64, 1.0..9.0_f64, 0.0..1.5_f64),
            forwards_first in any::<bool>(),
        ) {
            let room_bytes = if forwards_first { f64::INFINITY } else { room };
            let case = chain(&times, send_us, [1.0, waiting_bytes, room_bytes]);
            let found = scheduled(&case, microbatches, forwards_first);
            prop_assert!(!found.is_empty());
            let all_us = microbatches as f64 * times.iter().flatten().sum::<f64>();
            let sent_us = (microbatches * 2 * times.len() as u64) as f64 * send_us;
            for Scheduled { orders, end_us } in found {
                prop_assert!(end_us <= all_us + sent_us + 1e-6);
                for order in orders.iter().chain(&orders.iter().map(joined).collect::<Vec<_>>()) {
                    prop_assert_eq!(order.fault_of_stage(u32::try_from(microbatches).expect("few")), None);
                    prop_assert!(!forwards_first || order.has_forwards_first());
                }
                for order in &orders {
                    let held_bytes = order.in_flight() as f64;
                    prop_assert!(held_bytes <= room_bytes.max(1.0) + 1e-9, "{}", order);
                }
            }
        }
    }
}
