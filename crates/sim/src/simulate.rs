//! Runs a Program on the machine and writes down what happens.

use rannc_plan::{
    Channel, CheckError, Collective, CollectiveKind, Compute, Memory, Observer, Pause, Program, ProgramScript,
    RankProgram, Seated, Slot, Span, run,
};

use crate::clock::Prices;
use crate::costs::Costs;
use crate::error::SimError;
use crate::timeline::{Event, RankTimeline, Timeline, What};

/// Simulates one step of a Program that passes [`check`](rannc_plan::check()).
///
/// # Errors
/// When the Program's lists do not fit together, when its ranks wait for each other, or when a cost is
/// not a time.
pub fn simulate(program: &Program, costs: &dyn Costs) -> Result<Timeline, SimError> {
    let script = ProgramScript::new(program).map_err(CheckError::from)?;
    let prices = Prices::new(program, &script, costs)?;
    let mut recorder = Recorder::new(program, &script, &prices, costs);
    let step_us = run(&script.script, &prices, &mut recorder)
        .map_err(|stuck| CheckError::from(script.deadlock(program, &stuck)))?;
    Ok(recorder.timeline(step_us))
}

/// What a rank holds throughout, for all its Stages.
fn fixed_bytes(own: &RankProgram, costs: &dyn Costs) -> u64 {
    let stages = || own.seats.iter().map(|seat| seat.stage);
    let framework_bytes = stages().map(|stage| costs.framework_bytes(stage)).max().unwrap_or(0);
    let beside = stages().map(|stage| costs.fixed_bytes(stage).saturating_sub(costs.framework_bytes(stage)));
    beside.fold(framework_bytes, u64::saturating_add)
}

/// Writes down what every rank does, and what it holds.
struct Recorder<'a> {
    trains: bool,
    script: &'a ProgramScript,
    prices: &'a Prices,
    ranks: Vec<RankTimeline>,
    memory: Vec<Memory>,
}

impl<'a> Recorder<'a> {
    fn new(program: &Program, script: &'a ProgramScript, prices: &'a Prices, costs: &dyn Costs) -> Self {
        let ranks = program.ranks.iter().map(|own| RankTimeline {
            rank: own.rank,
            seats: own.seats.clone(),
            events: Vec::new(),
            busy_us: 0.0,
            waiting_us: 0.0,
            reduce_us: 0.0,
            update_us: 0.0,
            bubble_us: 0.0,
            peak_bytes: 0,
            memory: Vec::new(),
        });
        let memory = program.ranks.iter().map(|own| Memory::new(fixed_bytes(own, costs)));
        Self { trains: program.call.trains(), script, prices, ranks: ranks.collect(), memory: memory.collect() }
    }

    fn note(&mut self, rank: u32, Span { start, end }: Span, what: What) {
        self.ranks[rank as usize].events.push(Event { start_us: start, end_us: end, what });
    }

    fn timeline(self, step_us: f64) -> Timeline {
        let finish = |(mut rank, memory): (RankTimeline, Memory)| {
            rank.events.sort_by(|a, b| a.start_us.total_cmp(&b.start_us));
            let spent_us = rank.busy_us + rank.waiting_us + rank.reduce_us + rank.update_us;
            rank.bubble_us = (step_us - spent_us).max(0.0);
            (rank.peak_bytes, rank.memory) = (memory.peak, memory.levels);
            rank
        };
        Timeline { step_us, ranks: self.ranks.into_iter().zip(self.memory).map(finish).collect() }
    }
}

impl Observer for Recorder<'_> {
    fn computed(&mut self, rank: u32, seated: Seated, span: Span) {
        let (compute, costs) = (seated.compute, self.prices.of_rows(rank, seated));
        let memory = &mut self.memory[rank as usize];
        match compute {
            Compute::Forward(_) => memory.hold(span.start, costs.microbatch_bytes),
            Compute::BackwardInput(_) => memory.hold(span.start, costs.waiting_bytes),
            Compute::Backward(_) | Compute::BackwardWeight(_) => {}
        }
        memory.use_between(span.start, span.end, costs.workspace_bytes);
        if compute.ends_microbatch() || !self.trains {
            memory.release(span.end, costs.microbatch_bytes);
        }
        if let Compute::BackwardWeight(_) = compute {
            memory.release(span.end, costs.waiting_bytes);
        }
        self.ranks[rank as usize].busy_us += span.end - span.start;
        self.note(rank, span, seated.into());
    }

    fn moved(&mut self, message: Slot, span: Span) {
        let Channel { src, dst, stages } = self.script.script.channels[message.channel as usize];
        let (mb, payload) = (self.prices.parcel(message).mb, self.prices.parcel(message).payload);
        self.note(src, span, What::Send { mb, peer: dst, stages, payload });
        self.note(dst, span, What::Recv { mb, peer: src, stages, payload });
    }

    fn summed(&mut self, sum: u32, span: Span) {
        let what = match self.script.sums[sum as usize] {
            Collective::Bucket { kind: CollectiveKind::AllGather(..), .. } => What::Gather,
            Collective::Bucket { .. } => What::Reduce,
            Collective::Exchange { kind, mb } => What::Exchange { mb, kind },
        };
        let members = &self.script.script.sums[sum as usize].members;
        members.iter().for_each(|&member| self.note(member, span, what));
    }

    fn updated(&mut self, rank: u32, span: Span) {
        self.ranks[rank as usize].update_us += span.end - span.start;
        self.note(rank, span, What::Update);
    }

    fn paused(&mut self, rank: u32, us: f64, pause: Pause) {
        let record = &mut self.ranks[rank as usize];
        match pause {
            Pause::Message => record.waiting_us += us,
            Pause::Sum => record.reduce_us += us,
        }
    }
}
