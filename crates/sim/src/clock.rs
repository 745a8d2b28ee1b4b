//! The machine's clock at given costs.

use std::collections::{BTreeMap, HashMap};

use rannc_plan::{
    Action, CheckError, Clock, Collective, CollectiveKind, Compute, Interval, Program, ProgramScript, RankProgram,
    Seated, Slot,
};

use crate::costs::{Costs, RowCostTable, RowCosts, time};
use crate::error::SimError;
use crate::links::{Parcel, exchanges_us, parcels};

/// How long everything in a Program takes.
pub(crate) struct Prices {
    /// By rank, what it computes.
    rows: Vec<HashMap<Computed, RowCosts>>,
    /// By channel, its messages in order.
    parcels: Vec<Vec<Parcel>>,
    /// By sum of the script.
    sums_us: Vec<f64>,
    /// By rank.
    updates_us: Vec<f64>,
}

/// A Stage, where the rank has several, and a microbatch.
type Computed = (Option<u32>, u32);

fn computed(seated: Seated) -> Computed {
    (seated.stage, seated.compute.microbatch())
}

impl Prices {
    pub(crate) fn new(program: &Program, script: &ProgramScript, costs: &dyn Costs) -> Result<Self, SimError> {
        let mut table = RowCostTable::new(costs);
        let rows = program.ranks.iter().map(|own| of_rank(program, own, &mut table)).collect::<Result<_, _>>()?;
        let update = |own: &RankProgram| {
            let of_stage = |stage| time(costs.update_us(stage), || format!("the update of stage {stage}"));
            own.seats.iter().map(|seat| of_stage(seat.stage)).sum()
        };
        Ok(Self {
            rows,
            parcels: parcels(program, &script.script, costs)?,
            sums_us: sums_us(program, &script.sums, costs)?,
            updates_us: program.ranks.iter().map(update).collect::<Result<_, _>>()?,
        })
    }

    /// What a rank's computation of a microbatch costs.
    pub(crate) fn of_rows(&self, rank: u32, seated: Seated) -> RowCosts {
        self.rows[rank as usize][&computed(seated)]
    }

    pub(crate) fn parcel(&self, message: Slot) -> Parcel {
        self.parcels[message.channel as usize][message.place as usize]
    }
}

fn of_rank(
    program: &Program,
    own: &RankProgram,
    table: &mut RowCostTable<'_>,
) -> Result<HashMap<Computed, RowCosts>, SimError> {
    let mut found = HashMap::new();
    for seated in own.forward.iter().chain(&own.backward).filter_map(Action::computed) {
        let seat =
            own.seat(seated.stage).ok_or(CheckError::Shape("a rank computes for a stage that it does not have"))?;
        let replicas = program.stage_rows.get(seat.stage as usize);
        let replicas = replicas.and_then(|stage| stage.get(seated.compute.microbatch() as usize));
        let rows = replicas.and_then(|replicas| replicas.get(seat.replica as usize)).copied().map(Interval::rows);
        let rows = rows.ok_or(CheckError::Shape("a rank computes what stage_rows does not have"))?;
        found.insert(computed(seated), table.at(seat.stage, rows)?);
    }
    Ok(found)
}

fn sums_us(program: &Program, sums: &[Collective], costs: &dyn Costs) -> Result<Vec<f64>, SimError> {
    let (exchanges_us, stages) = (exchanges_us(program, costs)?, stages_by_ranks(program));
    let us = |&sum: &Collective| match sum {
        Collective::Bucket { bucket, kind } => bucket_us(program, bucket, kind, &stages, costs),
        Collective::Exchange { kind, mb } => Ok(exchanges_us[&(kind, mb)]),
    };
    sums.iter().map(us).collect()
}

/// The Stages that have exactly these ranks, increasing.
fn stages_by_ranks(program: &Program) -> BTreeMap<Vec<u32>, Vec<u32>> {
    let mut ranks: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
    for own in &program.ranks {
        own.seats.iter().for_each(|seat| ranks.entry(seat.stage).or_default().push(own.rank));
    }
    let mut stages: BTreeMap<Vec<u32>, Vec<u32>> = BTreeMap::new();
    ranks.into_iter().for_each(|(stage, ranks)| stages.entry(ranks).or_default().push(stage));
    stages
}

/// Sums over the ranks of one Stage are hidden under its backwards; of those over other ranks, nothing is.
fn bucket_us(
    program: &Program,
    bucket: u32,
    kind: CollectiveKind,
    stages: &BTreeMap<Vec<u32>, Vec<u32>>,
    costs: &dyn Costs,
) -> Result<f64, SimError> {
    let bucket = &program.buckets[bucket as usize];
    let ranks = &program.groups[bucket.group as usize];
    let Some(&[stage]) = stages.get(ranks).map(Vec::as_slice) else {
        return time(costs.reduce_tied_us(ranks, bucket.bytes), || {
            format!("the reduction of tied gradients over ranks {ranks:?}")
        });
    };
    let us = match kind {
        CollectiveKind::AllReduce => costs.reduce_us(stage, bucket.bytes),
        CollectiveKind::ReduceScatter(_) => costs.reduce_scatter_us(stage, bucket.bytes),
        CollectiveKind::AllGather(..) => {
            let us = costs.gather_us(stage, bucket.parts.iter().sum::<u64>().saturating_mul(bucket.gathered.bytes()));
            return time(us, || format!("the gathering of parameters of stage {stage}"));
        }
    };
    time(us, || format!("the gradient reduction of stage {stage}"))
}

impl Clock for Prices {
    fn compute(&self, rank: u32, seated: Seated) -> f64 {
        let costs = self.of_rows(rank, seated);
        match seated.compute {
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
