//! The machine's clock at given costs.

use rannc_plan::{
    CheckError, Clock, Collective, CollectiveKind, Compute, Interval, Program, ProgramScript, RankProgram, Slot,
};

use crate::costs::{Costs, RowCostTable, RowCosts, time};
use crate::error::SimError;
use crate::links::{Parcel, exchanges_us, parcels};

/// How long everything in a Program takes.
pub(crate) struct Prices {
    /// By rank and microbatch; nothing where a rank computes nothing.
    rows: Vec<Vec<Option<RowCosts>>>,
    /// By channel, its messages in order.
    parcels: Vec<Vec<Parcel>>,
    /// By sum of the script.
    sums_us: Vec<f64>,
    /// By rank.
    updates_us: Vec<f64>,
}

impl Prices {
    pub(crate) fn new(program: &Program, script: &ProgramScript, costs: &dyn Costs) -> Result<Self, SimError> {
        let mut table = RowCostTable::new(costs);
        let rows = program.ranks.iter().map(|own| of_rank(program, own, &mut table)).collect::<Result<_, _>>()?;
        let update =
            |own: &RankProgram| time(costs.update_us(own.stage), || format!("the update of stage {}", own.stage));
        Ok(Self {
            rows,
            parcels: parcels(program, &script.script, costs)?,
            sums_us: sums_us(program, &script.sums, costs)?,
            updates_us: program.ranks.iter().map(update).collect::<Result<_, _>>()?,
        })
    }

    /// What a rank computes of a microbatch costs.
    pub(crate) fn of_rows(&self, rank: u32, mb: u32) -> RowCosts {
        self.rows[rank as usize][mb as usize].expect("it was asked for when the prices were made")
    }

    pub(crate) fn parcel(&self, message: Slot) -> Parcel {
        self.parcels[message.channel as usize][message.place as usize]
    }
}

fn of_rank(
    program: &Program,
    own: &RankProgram,
    table: &mut RowCostTable<'_>,
) -> Result<Vec<Option<RowCosts>>, SimError> {
    let stage = program.stage_rows.get(own.stage as usize);
    let mut found = vec![None; program.microbatches.len()];
    for action in own.forward.iter().chain(&own.backward) {
        let Some(mb) = action.compute().map(Compute::microbatch) else { continue };
        let replicas = stage.and_then(|stage| stage.get(mb as usize));
        let rows = replicas.and_then(|replicas| replicas.get(own.replica as usize)).copied().map(Interval::rows);
        let rows = rows.ok_or(CheckError::Shape("a rank computes what stage_rows does not have"))?;
        found[mb as usize] = Some(table.at(own.stage, rows)?);
    }
    Ok(found)
}

fn sums_us(program: &Program, sums: &[Collective], costs: &dyn Costs) -> Result<Vec<f64>, SimError> {
    let exchanges_us = exchanges_us(program, costs)?;
    let us = |&sum: &Collective| match sum {
        Collective::Bucket { bucket, kind } => bucket_us(program, bucket, kind, costs),
        Collective::Exchange { kind, mb } => Ok(exchanges_us[&(kind, mb)]),
    };
    sums.iter().map(us).collect()
}

fn bucket_us(program: &Program, bucket: u32, kind: CollectiveKind, costs: &dyn Costs) -> Result<f64, SimError> {
    let bucket = &program.buckets[bucket as usize];
    let ranks = &program.groups[bucket.group as usize];
    let stage = |rank: &u32| program.ranks[*rank as usize].stage;
    let own = ranks.first().map(stage).filter(|first| ranks.iter().all(|rank| stage(rank) == *first));
    let Some(stage) = own else {
        return time(costs.reduce_tied_us(ranks, bucket.bytes), || {
            format!("the reduction of tied gradients over ranks {ranks:?}")
        });
    };
    let us = match kind {
        CollectiveKind::AllReduce => costs.reduce_us(stage, bucket.bytes),
        CollectiveKind::ReduceScatter(_) => costs.reduce_scatter_us(stage, bucket.bytes),
        CollectiveKind::AllGather(..) => {
            let us = costs.gather_us(stage, bucket.parts.iter().sum::<u64>().saturating_mul(bucket.dtype.bytes()));
            return time(us, || format!("the gathering of parameters of stage {stage}"));
        }
    };
    time(us, || format!("the gradient reduction of stage {stage}"))
}

impl Clock for Prices {
    fn compute(&self, rank: u32, compute: Compute) -> f64 {
        let costs = self.of_rows(rank, compute.microbatch());
        match compute {
            Compute::Forward(_) => costs.forward_us,
            Compute::Backward(_) => costs.backward_us,
            Compute::BackwardInput(_) => costs.backward_input_us,
            Compute::BackwardWeight(_) => costs.backward_weight_us,
        }
    }
    fn message(&self, message: Slot) -> f64 {
        self.parcel(message).us
    }
    fn sum(&self, sum: u32) -> f64 {
        self.sums_us[sum as usize]
    }
    fn update(&self, rank: u32) -> f64 {
        self.updates_us[rank as usize]
    }
}
