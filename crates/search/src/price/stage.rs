//! Time and memory of a Stage.

use std::ops::Range;

use rannc_plan::StagePrediction;

use super::at::{At, Pricing};
use super::end::End;
use super::memory::StageMemory;
use super::saver::Saver;
use super::step::StageCost;
use super::time::RunTime;

/// A priced Stage.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Priced {
    pub(crate) cost: StageCost,
    pub(crate) end: End,
    pub(crate) memory: StageMemory,
}

/// A Stage that computes nothing again, without the end of its step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlainStage {
    pub(crate) cost: StageCost,
    pub(crate) memory: StageMemory,
}

impl Pricing<'_> {
    /// Time and memory of a Stage whose Blocks need `workspace_bytes`.
    pub(crate) fn stage(&self, run: Range<usize>, at: &At<'_>, saver: Saver, workspace_bytes: f64) -> Priced {
        let plain = self.plain(&run, at, saver, workspace_bytes);
        self.with_saver(&run, at, saver, &plain)
    }

    /// What a Plan says of a priced Stage that holds so many microbatches, apart from tied parameters.
    pub(crate) fn prediction(
        &self,
        run: &Range<usize>,
        replicas: u32,
        priced: &Priced,
        in_flight: u64,
    ) -> StagePrediction {
        let rows = self.replica_rows(replicas);
        StagePrediction {
            forward_us: priced.cost.forward_us,
            backward_us: priced.cost.backward_us,
            transfer_us: priced.cost.transfer_us(),
            reduce_us: priced.end.reduce_us,
            update_us: priced.end.update_us,
            in_bytes: self.chain.traffic.in_bytes.at(run.start, run.end, rows) as u64,
            out_bytes: self.chain.traffic.out_bytes.at(run.start, run.end, rows) as u64,
            memory: priced.memory.prediction(in_flight),
        }
    }

    /// A Stage that computes nothing again, without the end of its step.
    pub(crate) fn plain(&self, run: &Range<usize>, at: &At<'_>, saver: Saver, workspace_bytes: f64) -> PlainStage {
        let &At { place, rows, .. } = at;
        let time = self.compute(run, at);
        let traffic = if self.problem.direct { &self.chain.direct } else { &self.chain.traffic };
        // Less than a byte is what rounding leaves of nothing.
        let half_us = |level: usize, bytes: f64| match bytes {
            ..1.0 => 0.0,
            bytes => self.problem.cluster.send_us(level, bytes) / 2.0,
        };
        let cost = StageCost {
            forward_us: time.forward_us,
            backward_us: time.backward_us,
            in_us: half_us(place.in_level, traffic.in_bytes.at(run.start, run.end, rows)),
            in_grad_us: half_us(place.in_level, traffic.in_grad_bytes.at(run.start, run.end, rows)),
            out_us: half_us(place.out_level, traffic.out_bytes.at(run.start, run.end, rows)),
            out_grad_us: half_us(place.out_level, traffic.out_grad_bytes.at(run.start, run.end, rows)),
            end_us: 0.0,
        };
        PlainStage { cost, memory: self.memory(run, at, saver, workspace_bytes) }
    }

    /// The Stage that computes again what the saver asks for, otherwise as this plain one.
    pub(crate) fn with_saver(
        &self,
        run: &Range<usize>,
        at: &At<'_>,
        saver: Saver,
        &PlainStage { cost: plain, mut memory }: &PlainStage,
    ) -> Priced {
        let mut time = RunTime { forward_us: plain.forward_us, backward_us: plain.backward_us };
        self.compute_again(run, at, saver.again, &mut time, &mut memory);
        let end = self.end(run, at, saver, &mut time);
        let RunTime { forward_us, backward_us } = time;
        let cost = StageCost { forward_us, backward_us, end_us: end.us(), ..plain };
        Priced { cost, end, memory }
    }
}
