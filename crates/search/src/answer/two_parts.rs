//! Plans whose backwards come in two parts: of a division that was found, with the best orders that list scheduling finds
//! for it.

use std::collections::BTreeMap;

use rannc_plan::{Compute, Order, Plan, PlanFileError, Schedule, Sharding};

use super::assemble::Assembly;
use super::links::{Linker, ReplicaLink};
use super::list_schedule::{ListScheduler, Manner, Scheduled, StageLink, StageTimes};
use crate::price::{At, BySize, Priced};
use crate::solve::{FoundStage, Solution};

/// Orders that are told exactly: the best by the list scheduler's own account.
const TOLD_EXACTLY: usize = 3;

impl Assembly<'_> {
    /// The fastest Plan of a division with backwards in two parts; `None` where that has no use.
    pub(crate) fn plan_in_two_parts(
        &self,
        solution: &Solution,
        lower_bound_us: f64,
    ) -> Result<Option<Plan>, PlanFileError> {
        let linker = self.linker(solution);
        let links = stage_links(&linker);
        let stages: Vec<StageTimes> = self.stage_times(solution, &links);
        if stages.iter().all(|stage| stage.parts_us.is_none()) {
            return Ok(None);
        }
        let settings = self.pricing.problem.settings;
        let forwards_first = !settings.loss_inside;
        let scheduler = ListScheduler { step: &self.pricing.step, stages: &stages, links: &links, forwards_first };
        let manners = manners(&linker, self.pricing.step.microbatches, forwards_first);
        let mut found: Vec<Scheduled> = manners.iter().filter_map(|manner| scheduler.schedule(manner)).collect();
        found.sort_by(|one, other| one.end_us.total_cmp(&other.end_us));
        let mut tried: Vec<Vec<Order>> = Vec::new();
        let mut best: Option<Plan> = None;
        for Scheduled { orders, .. } in found {
            if tried.len() >= 2 * TOLD_EXACTLY {
                break;
            }
            for orders in [orders.iter().map(joined).collect(), orders] {
                if tried.contains(&orders) {
                    continue;
                }
                tried.push(orders.clone());
                let plan = self.plan_by(Schedule::Explicit(orders), solution, lower_bound_us)?;
                if best.as_ref().is_none_or(|best| plan.predicted.step_us < best.predicted.step_us) {
                    best = Some(plan);
                }
            }
        }
        Ok(best)
    }

    fn stage_times(&self, solution: &Solution, links: &[StageLink]) -> Vec<StageTimes> {
        let times = |(number, stage): (usize, &FoundStage)| {
            let at = self.pricing.at(self.order.place_at(&stage.positions));
            let priced = self.priced(stage, &at);
            let sends_back = links.iter().any(|link| link.to == number && link.grads_us.is_some());
            of_stage(&priced, &at, sends_back && priced.end.divides < Sharding::Gradients)
        };
        solution.found.stages.iter().enumerate().map(times).collect()
    }
}

fn of_stage(priced: &Priced, at: &At<'_>, may_split: bool) -> StageTimes {
    let passes = priced.by_size();
    let parts = priced.parts;
    let parts_us = passes.map(|pass| [pass.backward_us * parts.input, pass.backward_us * parts.weight]);
    StageTimes {
        forward_us: passes.map(|pass| pass.forward_us),
        backward_us: passes.map(|pass| pass.backward_us),
        parts_us: (may_split && parts.weight > 0.0).then_some(parts_us),
        microbatch_bytes: priced.memory.microbatch_bytes,
        waiting_bytes: parts.waiting_bytes,
        room_bytes: at.usable_bytes - priced.memory.fixed_bytes(),
    }
}

/// The slowest of the links between the Replicas of each two Stages.
fn stage_links(linker: &Linker<'_>) -> Vec<StageLink> {
    let slower = |one: BySize<f64>, other: BySize<f64>| std::array::from_fn(|size| one[size].max(other[size]));
    let stage_of: Vec<usize> = linker.stage_of_replicas();
    let mut found: BTreeMap<(usize, usize), StageLink> = BTreeMap::new();
    for ReplicaLink { from, to, values_us, grads_us } in linker.links() {
        let (from, to) = (stage_of[from], stage_of[to]);
        let link = found.entry((from, to)).or_insert(StageLink { from, to, values_us, grads_us });
        link.values_us = slower(link.values_us, values_us);
        link.grads_us = link.grads_us.zip(grads_us).map(|(one, other)| slower(one, other));
    }
    found.into_values().collect()
}

/// Ways to put Stages in order: with as many microbatches in flight as 1F1B has, with up to as many more as there are
/// Stages, with twice as many, and with all.
fn manners(linker: &Linker<'_>, microbatches: u64, forwards_first: bool) -> Vec<Manner> {
    let stages = linker.stages.len() as u64;
    let depths: Vec<u64> = linker.depths().into_iter().map(u64::from).collect();
    let mut limits: Vec<Vec<u64>> = Vec::new();
    if !forwards_first {
        limits.extend((0..stages).map(|more| depths.iter().map(|depth| depth + more).collect()));
        limits.extend([stages, 2 * stages - 1].map(|most| vec![most; depths.len()]));
    }
    limits.push(vec![microbatches; depths.len()]);
    let manner =
        |in_flight: Vec<u64>| [false, true].map(|fits_gaps| Manner { in_flight: in_flight.clone(), fits_gaps });
    limits.into_iter().flat_map(manner).collect()
}

/// The order with one backward where both its parts follow each other.
fn joined(order: &Order) -> Order {
    let mut found: Vec<Compute> = Vec::with_capacity(order.0.len());
    for &compute in &order.0 {
        match (found.last_mut(), compute) {
            (Some(last @ Compute::BackwardInput(_)), Compute::BackwardWeight(mb)) if last.microbatch() == mb => {
                *last = Compute::Backward(mb);
            }
            _ => found.push(compute),
        }
    }
    Order(found)
}
