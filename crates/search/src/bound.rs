//! A lower bound for the time of every Plan.
//!
//! Two terms of the objective (see [`crate::step`]) alone, each minimised by a dynamic program over
//! Blocks and ranks: the longest of every Stage's `M t` with the passes before it, and the same with the
//! work at the end. Every Stage has the best place in the cluster, and ranks may be left over. No term is
//! counted that some Plan does not have, so no Plan takes less, whatever its cuts between Blocks, Replicas,
//! ranks and savings of memory.

use std::ops::{Range, RangeInclusive};

use rannc_cost::{Cluster, Link};

use crate::place::Place;
use crate::price::{At, Pricing, Problem};
use crate::table::Entry;
use crate::variant::Variant;

/// Stages from the end that are told apart, with many ranks and with few; further ones hold at least as many
/// microbatches.
const COUNTED: [usize; 2] = [4, 8];
/// From so many ranks on there are many.
const MANY_RANKS: u32 = 128;

/// For the Blocks from some place on and some number of Stages, by the number of ranks they may have at
/// most.
#[derive(Clone, Default)]
struct Least {
    /// From the first forward to the last backward.
    span_us: Vec<f64>,
    /// To the end of the step.
    all_us: Vec<f64>,
}

/// No Plan with this number of microbatches takes less; or none that takes less than `best_us` exists.
pub(crate) fn lower_bound_us(problem: Problem<'_>, microbatches: u64, best_us: f64) -> f64 {
    let cluster = with_best_sends(problem.cluster);
    // 1F1B needs less memory, and fill-drain has all the terms of this bound as well.
    let schedule = problem.settings.schedules()[0];
    let pricing = &Pricing::new(Problem { cluster: &cluster, ..problem }, schedule, microbatches);
    let (blocks, ranks) = (pricing.chain.len(), pricing.problem.settings.world_size);
    let few = usize::from(ranks < MANY_RANKS);
    let counted = (1..COUNTED[few]).find(|&count| pricing.step.in_flight(count) == pricing.step.microbatches);
    let counted = counted.unwrap_or(COUNTED[few]);
    let variants = Variant::all(&pricing.problem.settings.capabilities, pricing.step.in_flight(counted));
    let places = places(pricing);
    let places: Vec<(u32, At<'_>)> = places.iter().map(|(replicas, place)| (*replicas, pricing.at(place))).collect();
    let mut bound = Bound::new(pricing, counted, ranks as usize);
    for first in (0..blocks).rev() {
        for (replicas, at) in &places {
            for variants in variants.chunk_by(Variant::is_again_of) {
                let mut workspace_bytes: f64 = 0.0;
                for end in first + 1..=blocks {
                    let run = first..end;
                    workspace_bytes = workspace_bytes.max(pricing.workspace_bytes(end - 1, at.place.replicas));
                    let plain = pricing.plain(&run, at, variants[0], workspace_bytes);
                    // Both only grow with the run, and computing again adds time.
                    if pricing.step.busy_us(&plain.0) >= best_us || plain.1.model_bytes() > at.usable_bytes {
                        break;
                    }
                    for &variant in variants {
                        let entry = Entry::beside(pricing, &run, at, variant, &plain);
                        bound.put(run.clone(), &entry, variant, *replicas as usize);
                    }
                }
            }
        }
    }
    bound.least_us().min(best_us)
}

/// A cluster where devices of one node send to each other as fast as any two devices.
pub(crate) fn with_best_sends(cluster: &Cluster) -> Cluster {
    let mut cluster = cluster.clone();
    let best = cluster.levels.iter().map(|level| level.send).reduce(|best, send| Link {
        latency_us: best.latency_us.min(send.latency_us),
        bytes_per_s: best.bytes_per_s.max(send.bytes_per_s),
    });
    if let (Some(first), Some(best)) = (cluster.levels.first_mut(), best) {
        first.send = best;
    }
    cluster
}

/// Places as good as any for the numbers of Replicas that have equally many rows, with the least of these
/// numbers.
fn places(pricing: &Pricing<'_>) -> Vec<(u32, Place)> {
    let cluster = pricing.problem.cluster;
    let equal = pricing.equal_replicas();
    let place =
        |kind: usize, replicas: &RangeInclusive<u32>| (*replicas.start(), Place::ideal(cluster, replicas, kind));
    let kinds = 0..cluster.kinds.len();
    kinds.flat_map(|kind| equal.iter().map(move |replicas| place(kind, replicas))).collect()
}

struct Bound<'a> {
    pricing: &'a Pricing<'a>,
    /// By number of Stages less one (the last for all larger numbers), by first Block.
    least: Vec<Vec<Least>>,
}

impl<'a> Bound<'a> {
    fn new(pricing: &'a Pricing<'a>, counted: usize, ranks: usize) -> Self {
        let unknown = Least { span_us: vec![f64::INFINITY; ranks + 1], all_us: vec![f64::INFINITY; ranks + 1] };
        Self { pricing, least: vec![vec![unknown; pricing.chain.len()]; counted] }
    }

    /// Puts a Stage before every number of later ones that its memory allows.
    fn put(&mut self, run: Range<usize>, entry: &Entry, variant: Variant, replicas: usize) {
        let last = self.least.len() - 1;
        let numbers = if run.end == self.pricing.chain.len() { 0..1 } else { last.min(1)..last + 1 };
        for number in numbers {
            let in_flight = self.pricing.step.in_flight(number + 1);
            if entry.max_in_flight < in_flight || !variant.serves(in_flight) {
                continue;
            }
            self.improve(number, number.saturating_sub(1), &run, entry, replicas);
            if number == last {
                self.improve(number, number, &run, entry, replicas);
            }
        }
    }

    /// Puts a Stage before the later ones, for every number of ranks.
    fn improve(&mut self, number: usize, later: usize, run: &Range<usize>, entry: &Entry, replicas: usize) {
        let cost = &entry.cost;
        let busy_us = self.pricing.step.busy_us(cost);
        if run.end == self.pricing.chain.len() {
            let own = &mut self.least[number][run.start];
            let (span_us, all_us) = (busy_us + cost.in_us + cost.in_grad_us, busy_us + cost.end_us + cost.in_us);
            own.span_us[replicas..].iter_mut().for_each(|least_us| *least_us = least_us.min(span_us));
            own.all_us[replicas..].iter_mut().for_each(|least_us| *least_us = least_us.min(all_us));
            return;
        }
        let mut own = std::mem::take(&mut self.least[number][run.start]);
        let rest = &self.least[later][run.end];
        let pass_us = cost.compute_us() + cost.out_us + cost.out_grad_us;
        for (ranks, (&later_span_us, &later_all_us)) in (replicas..).zip(rest.span_us.iter().zip(&rest.all_us)) {
            let Some(own_span_us) = own.span_us.get_mut(ranks) else { break };
            let span_us = busy_us.max(pass_us + later_span_us);
            let all_us = (span_us + cost.end_us).max(cost.forward_us + cost.out_us + later_all_us);
            *own_span_us = own_span_us.min(span_us + cost.in_us + cost.in_grad_us);
            own.all_us[ranks] = own.all_us[ranks].min(all_us + cost.in_us);
        }
        self.least[number][run.start] = own;
    }

    fn least_us(&self) -> f64 {
        let all = self.least.iter().filter_map(|of_count| of_count[0].all_us.last());
        all.copied().fold(f64::INFINITY, f64::min)
    }
}
