//! The objective: time and memory of a Stage, time of a step.

mod again;
mod at;
mod batch;
mod end;
mod knapsack;
mod memory;
mod model;
mod parts;
mod place;
mod replicas;
mod saver;
mod sharding;
mod sizes;
mod stage;
mod step;
mod time;

pub(crate) use at::{At, Beside, Pricing, Problem};
#[cfg(test)]
pub(crate) use end::End;
pub(crate) use knapsack::CHEAPER;
pub(crate) use memory::{GRADS_ON_THE_WAY, StageMemory};
pub(crate) use model::Model;
pub(crate) use place::{Place, RankOrder};
pub(crate) use replicas::{ReplicaPass, Replicas, TimedStage};
pub(crate) use saver::{Again, Saver};
pub(crate) use sizes::BySize;
pub(crate) use stage::{PlainStage, Priced};
#[cfg(test)]
pub(crate) use step::PassCost;
pub(crate) use step::{StageCost, StepModel, StepTime};
