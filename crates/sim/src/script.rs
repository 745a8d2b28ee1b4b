//! A Program made ready to run: every Action with its time, every message with its place in its channel.

use std::collections::HashMap;

use rannc_plan::{Action, CheckError, Compute, Interval, Message, Payload, Program, RankProgram};

use crate::costs::{Costs, RowCostTable, RowCosts, time};
use crate::error::SimError;
use crate::links::{Channel, Parcel, share_links};

/// What a rank does next.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Task {
    Compute {
        compute: Compute,
        costs: RowCosts,
    },
    Send {
        slot: Slot,
    },
    Recv {
        channel: usize,
        payload: Payload,
        mb: u32,
    },
    /// Waits until all that was sent has arrived.
    Settle,
    Reduce {
        us: f64,
    },
    Update {
        us: f64,
    },
}

/// A message: the `place`-th of a channel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot {
    pub(crate) channel: usize,
    pub(crate) place: usize,
}

/// A rank's Tasks, each with the place of its Action among the rank's Actions.
pub(crate) type RankScript = Vec<(usize, Task)>;

/// All Tasks and messages.
pub(crate) struct Script {
    pub(crate) ranks: Vec<RankScript>,
    pub(crate) channels: Vec<Channel>,
}

impl Script {
    pub(crate) fn new(program: &Program, costs: &dyn Costs) -> Result<Self, SimError> {
        check_ranks(program)?;
        let mut writer = Writer {
            program,
            costs,
            row_costs: RowCostTable::new(costs),
            channels: Vec::new(),
            channel_of: HashMap::new(),
        };
        let ranks = program.ranks.iter().map(|own| writer.rank(own)).collect::<Result<_, _>>()?;
        let mut channels = writer.channels;
        share_links(program, costs, &mut channels)?;
        Ok(Self { ranks, channels })
    }

    pub(crate) fn parcel(&self, slot: Slot) -> Parcel {
        self.channels[slot.channel].parcels[slot.place]
    }
}

fn check_ranks(program: &Program) -> Result<(), CheckError> {
    let numbered = (0..).zip(&program.ranks).all(|(rank, own)| own.rank == rank);
    if numbered { Ok(()) } else { Err(CheckError::Shape("the ranks are not numbered in order")) }
}

struct Writer<'a> {
    program: &'a Program,
    costs: &'a dyn Costs,
    row_costs: RowCostTable<'a>,
    channels: Vec<Channel>,
    channel_of: HashMap<(u32, u32), usize>,
}

impl Writer<'_> {
    fn rank(&mut self, own: &RankProgram) -> Result<RankScript, SimError> {
        let mut script = Vec::with_capacity(own.forward.len() + own.backward.len() + 3);
        let mut position = 0;
        for list in [&own.forward, &own.backward] {
            let start = position;
            for action in list {
                script.push((position, self.task(own, action)?));
                position += 1;
            }
            if position > start {
                script.push((position - 1, Task::Settle));
            }
            if list.last() == Some(&Action::Reduce) {
                let us = time(self.costs.update_us(own.stage), || format!("the update of stage {}", own.stage))?;
                script.push((position - 1, Task::Update { us }));
            }
        }
        Ok(script)
    }

    fn task(&mut self, own: &RankProgram, action: &Action) -> Result<Task, SimError> {
        Ok(match action {
            Action::Forward { mb } => self.compute(own, Compute::Forward(*mb))?,
            Action::Backward { mb } => self.compute(own, Compute::Backward(*mb))?,
            Action::Send(message) => self.send(own, message)?,
            Action::Recv(message) => {
                let channel = self.channel(message.peer, own.rank)?;
                Task::Recv { channel, payload: message.kind, mb: message.mb }
            }
            Action::Reduce => {
                let name = || format!("the gradient reduction of stage {}", own.stage);
                Task::Reduce { us: time(self.costs.reduce_us(own.stage), name)? }
            }
        })
    }

    fn compute(&mut self, own: &RankProgram, compute: Compute) -> Result<Task, SimError> {
        let stage = self.program.stage_rows.get(own.stage as usize);
        let replicas = stage.and_then(|stage| stage.get(compute.microbatch() as usize));
        let rows = replicas.and_then(|replicas| replicas.get(own.replica as usize)).copied().map(Interval::rows);
        let rows = rows.ok_or(CheckError::Shape("a rank computes what stage_rows does not have"))?;
        Ok(Task::Compute { compute, costs: self.row_costs.at(own.stage, rows)? })
    }

    fn send(&mut self, own: &RankProgram, message: &Message) -> Result<Task, SimError> {
        let (src, dst) = (own.rank, message.peer);
        let channel = self.channel(src, dst)?;
        let sizes = message.pieces.iter().map(|piece| self.costs.value_bytes(piece.value, piece.rows.rows()));
        let bytes = sizes.fold(0, u64::saturating_add);
        let parcels = &mut self.channels[channel].parcels;
        let place = parcels.len();
        parcels.push(Parcel { payload: message.kind, mb: message.mb, bytes, us: 0.0 });
        Ok(Task::Send { slot: Slot { channel, place } })
    }

    fn channel(&mut self, src: u32, dst: u32) -> Result<usize, CheckError> {
        if src.max(dst) as usize >= self.program.ranks.len() {
            return Err(CheckError::Shape("a message comes from or goes to a rank that does not exist"));
        }
        let next = self.channels.len();
        let channel = *self.channel_of.entry((src, dst)).or_insert(next);
        if channel == next {
            self.channels.push(Channel { src, dst, parcels: Vec::new() });
        }
        Ok(channel)
    }
}
