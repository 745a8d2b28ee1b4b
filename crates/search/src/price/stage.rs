//! Time and memory of a Stage.

use std::ops::Range;

use rannc_plan::{PassPrediction, Sharding, StagePrediction};

use super::again::Repeated;
use super::at::{At, Pricing};
use super::end::End;
use super::memory::StageMemory;
use super::replicas::{ReplicaPass, TimedStage};
use super::saver::Saver;
use super::sizes::{LARGER, SMALLER};
use super::step::{PassCost, StageCost};
use super::time::RunTime;

/// A priced Stage.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Priced {
    pub(crate) cost: StageCost,
    pub(crate) end: End,
    pub(crate) memory: StageMemory,
    pub(crate) again: Repeated,
    /// Memory of a microbatch between the two parts of its backward, where that may come in two.
    pub(crate) waiting_bytes: f64,
}

/// A Stage that computes nothing again, without the end of its step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlainStage {
    pub(crate) cost: StageCost,
    pub(crate) memory: StageMemory,
}

impl Pricing<'_> {
    /// Time and memory of a Stage whose Blocks need `workspace_bytes`, with whole backwards.
    pub(crate) fn stage(&self, run: Range<usize>, at: &At<'_>, saver: Saver, workspace_bytes: f64) -> Priced {
        self.with_saver(&run, at, saver, &self.plain(&run, at, saver, workspace_bytes))
    }

    /// Computation of all Replicas of a Stage in a step.
    pub(crate) fn busy_us(&self, stage: &TimedStage) -> f64 {
        let of_size =
            |(pass, count): (&ReplicaPass, u64)| if count == 0 { 0.0 } else { count as f64 * pass.whole_us() };
        stage.passes.iter().map(|passes| passes.iter().zip(self.sizes.counts).map(of_size).sum::<f64>()).sum()
    }

    /// What a Plan says of a priced Stage with so much memory for the microbatches in flight, apart from tied parameters.
    pub(crate) fn prediction(
        &self,
        run: &Range<usize>,
        priced: &Priced,
        timed: &TimedStage,
        activations_bytes: f64,
    ) -> StagePrediction {
        let rows = self.replica_rows(timed.replicas());
        StagePrediction {
            forward_us: priced.cost.larger.forward_us,
            backward_us: priced.cost.larger.backward_us,
            transfer_us: priced.cost.larger.transfer_us(),
            reduce_us: priced.end.reduce_us,
            update_us: priced.end.update_us,
            in_bytes: self.chain.traffic.in_bytes.at(run.start, run.end, rows) as u64,
            out_bytes: self.chain.traffic.out_bytes.at(run.start, run.end, rows) as u64,
            memory: priced.memory.prediction(activations_bytes),
            whole: priced.memory.whole(),
            sizes: self.pass_predictions(timed),
        }
    }

    /// What each size of microbatch takes, if there are several on the largest Replica.
    fn pass_predictions(&self, timed: &TimedStage) -> Vec<PassPrediction> {
        let replicas = timed.replicas();
        let sizes = self.sizes.rows.into_iter().zip(self.sizes.counts).zip(timed.largest());
        let found = sizes.filter(|((_, count), _)| *count > 0).map(|((rows, _), pass)| PassPrediction {
            rows: rows.div_ceil(u64::from(replicas)),
            forward_us: pass.forward_us,
            backward_us: pass.backward_us,
        });
        let mut found: Vec<PassPrediction> = found.collect();
        found.dedup_by_key(|pass| pass.rows);
        if found.len() > 1 { found } else { Vec::new() }
    }

    /// A Stage that computes nothing again, without the end of its step and what its Replicas send each other.
    pub(crate) fn plain(&self, run: &Range<usize>, at: &At<'_>, saver: Saver, workspace_bytes: f64) -> PlainStage {
        PlainStage { cost: self.plain_cost(run, at), memory: self.memory(run, at, saver, workspace_bytes) }
    }

    /// Time of such a Stage: the same whatever is divided.
    pub(crate) fn plain_cost(&self, run: &Range<usize>, at: &At<'_>) -> StageCost {
        let smaller = self.pass(run, at, SMALLER);
        let larger = if at.rows[LARGER] == at.rows[SMALLER] { smaller } else { self.pass(run, at, LARGER) };
        StageCost { larger, smaller, batch_us: self.batch_us(run, at, &larger, &smaller), ..StageCost::default() }
    }

    /// A microbatch of some size on a Stage that computes nothing again.
    pub(super) fn pass(&self, run: &Range<usize>, at: &At<'_>, size: usize) -> PassCost {
        let (place, rows) = (at.place, at.rows[size]);
        let RunTime { forward_us, backward_us } = self.compute(run, at, size);
        let traffic = if self.problem.direct { &self.chain.direct } else { &self.chain.traffic };
        // Less than a byte is what rounding leaves of nothing.
        let half_us = |level: usize, bytes: f64| match bytes {
            ..1.0 => 0.0,
            bytes => self.problem.cluster.send_us(level, bytes) / 2.0,
        };
        PassCost {
            forward_us,
            backward_us,
            in_us: half_us(place.in_level, traffic.in_bytes.at(run.start, run.end, rows)),
            in_grad_us: half_us(place.in_level, traffic.in_grad_bytes.at(run.start, run.end, rows)),
            out_us: half_us(place.out_level, traffic.out_bytes.at(run.start, run.end, rows)),
            out_grad_us: half_us(place.out_level, traffic.out_grad_bytes.at(run.start, run.end, rows)),
        }
    }

    /// The Stage that computes again what the saver asks for, otherwise as this plain one.
    pub(crate) fn with_saver(
        &self,
        run: &Range<usize>,
        at: &At<'_>,
        saver: Saver,
        &PlainStage { cost, mut memory }: &PlainStage,
    ) -> Priced {
        let again = self.compute_again(run, at, saver.again, &mut memory);
        self.with_repeated(run, at, saver, &PlainStage { cost, memory }, again)
    }

    /// A Stage that computes this again, which its memory knows of already.
    pub(crate) fn with_repeated(
        &self,
        run: &Range<usize>,
        at: &At<'_>,
        saver: Saver,
        &PlainStage { cost: StageCost { larger, smaller, batch_us, .. }, memory }: &PlainStage,
        again: Repeated,
    ) -> Priced {
        let mut passes = [larger, smaller];
        passes.iter_mut().for_each(|pass| again.add_to(pass));
        self.share_out(run, at, saver.sharding, &mut passes);
        let [larger, smaller] = passes;
        let end = self.end(run, at, saver, [&larger, &smaller]);
        let wait_us = if end.divides >= Sharding::Gradients { end.reduce_us } else { 0.0 };
        let cost = StageCost { larger, smaller, wait_us, end_us: end.us(), batch_us };
        Priced { cost, end, memory, again, waiting_bytes: 0.0 }
    }
}

impl Priced {
    /// What is kept of a microbatch in flight, and what waits between the two parts of its backward.
    pub(crate) fn held_bytes(&self) -> [f64; 2] {
        [self.memory.microbatch_bytes, self.waiting_bytes]
    }
}
