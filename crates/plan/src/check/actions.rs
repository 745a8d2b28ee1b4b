//! Does every rank do everything once, in a possible order, and do Sends meet their Recvs?

use std::collections::{BTreeMap, HashMap, HashSet};

use rannc_ir::ValueId;

use super::carried::Carried;
use super::layout::computed_rows;
use super::{ActionFault, CheckError, covers_once, within};
use crate::partition::{OutputSource, Partition};
use crate::program::{
    Action, BatchKind, Exchange, Interval, Message, Pass, Payload, Piece, Program, RankProgram, Seat,
};
use crate::schedule::Call;

/// What goes between which Stages.
struct Needs {
    /// By Stage, the Values that it takes and the Stage of each.
    values: Vec<Vec<(ValueId, u32)>>,
    /// By Stage, the Values whose gradients it takes and the Stage of each.
    grads: Vec<Vec<(ValueId, u32)>>,
    /// The same as a set: payload, Value, sending Stage, receiving Stage.
    routes: HashSet<(Payload, ValueId, u32, u32)>,
    /// The Stages that use an input of the Graph, or make an output.
    of_batch: HashMap<ValueId, Vec<u32>>,
}

impl Needs {
    fn new(partition: &Partition) -> Self {
        let none = vec![Vec::new(); partition.stages.len()];
        let (routes, of_batch) = (HashSet::new(), HashMap::new());
        let mut needs = Self { values: none.clone(), grads: none, routes, of_batch };
        let mut add = |value: ValueId, stage: u32| needs.of_batch.entry(value).or_default().push(stage);
        for (stage, part) in (0..).zip(&partition.stages) {
            part.inputs.iter().for_each(|input| add(input.value, stage));
        }
        for output in &partition.outputs {
            if let OutputSource::Stage(stage) = output.source {
                add(output.value, stage);
            }
        }
        for crossing in &partition.crossings {
            for &to in &crossing.to {
                needs.values[to as usize].push((crossing.value, crossing.from));
                needs.routes.insert((Payload::Value, crossing.value, crossing.from, to));
                if crossing.requires_grad {
                    needs.grads[crossing.from as usize].push((crossing.value, to));
                    needs.routes.insert((Payload::Grad, crossing.value, to, crossing.from));
                }
            }
        }
        needs
    }
}

/// Checks every rank's Actions on their own.
pub(super) fn check_ranks(program: &Program, partition: &Partition) -> Result<(), CheckError> {
    let needs = Needs::new(partition);
    let mut carried = Carried::new(program, partition);
    for own in &program.ranks {
        let mut walk = Walk {
            program,
            needs: &needs,
            carried: &mut carried,
            own,
            forwards: HashSet::new(),
            backwards: HashSet::new(),
            ended: HashSet::new(),
            received: HashMap::new(),
        };
        for (position, action) in own.forward.iter().chain(&own.backward).enumerate() {
            walk.check_list(position, action)
                .and_then(|()| walk.check_action(action))
                .map_err(|fault| CheckError::Action { rank: own.rank, position, action: action.clone(), fault })?;
            walk.check_received(position, action)?;
        }
        walk.check_complete()?;
    }
    carried.check_complete()
}

/// A microbatch of a Stage.
type Computed = (u32, u32);

/// Rows received for one computation, by Value and sending Stage.
type Received = BTreeMap<(ValueId, u32), Vec<Interval>>;

/// The way through one rank's Actions.
struct Walk<'a> {
    program: &'a Program,
    needs: &'a Needs,
    carried: &'a mut Carried,
    own: &'a RankProgram,
    forwards: HashSet<Computed>,
    /// Those whose gradients of what came in have been computed.
    backwards: HashSet<Computed>,
    /// Those whose gradients of Params have been computed too.
    ended: HashSet<Computed>,
    /// Received and not yet used, by payload and what needs it.
    received: HashMap<(Payload, Computed), Received>,
}

impl Walk<'_> {
    fn check_list(&self, position: usize, action: &Action) -> Result<(), ActionFault> {
        let of_backward = match action {
            Action::Forward { .. } => false,
            Action::AllGather { pass, .. } => *pass == Pass::Backward,
            Action::Backward { .. }
            | Action::BackwardInput { .. }
            | Action::BackwardWeight { .. }
            | Action::AllReduce { .. }
            | Action::ReduceScatter { .. } => true,
            Action::Send(message) | Action::Recv(message) => message.kind == Payload::Grad,
            Action::Exchange(exchange) => exchange.kind.is_of_backward(),
        };
        let in_backward = position >= self.own.forward.len();
        let call = self.program.call;
        let allowed = match call {
            Call::Forward => !of_backward && !in_backward,
            Call::Whole => !in_backward,
            Call::Halves => of_backward == in_backward,
        };
        if allowed { Ok(()) } else { Err(ActionFault::WrongList(call)) }
    }

    fn check_action(&mut self, action: &Action) -> Result<(), ActionFault> {
        match action {
            // These are checked together, over all ranks.
            Action::AllReduce { .. } | Action::ReduceScatter { .. } | Action::AllGather { .. } => {}
            Action::Forward { mb, stage } => {
                let own = self.own_rows(*stage, *mb)?;
                if !self.forwards.insert(own) {
                    return Err(ActionFault::Repeated);
                }
            }
            Action::Backward { mb, stage } => {
                let own = self.begin_backward(*stage, *mb)?;
                self.ended.insert(own);
            }
            Action::BackwardInput { mb, stage } => _ = self.begin_backward(*stage, *mb)?,
            Action::BackwardWeight { mb, stage } => {
                let own = self.own_rows(*stage, *mb)?;
                if !self.backwards.contains(&own) {
                    return Err(ActionFault::BeforeInput);
                }
                if !self.ended.insert(own) {
                    return Err(ActionFault::Repeated);
                }
            }
            Action::Exchange(exchange) => {
                self.carried.exchange(self.own.rank, exchange)?;
                self.check_place(exchange)?;
            }
            Action::Send(message) => {
                let (from, _) = self.check_message(message, true)?;
                if !self.computed(message.kind, (from.stage, message.mb)) {
                    return Err(ActionFault::NotComputed);
                }
            }
            Action::Recv(message) => {
                let (from, to) = self.check_message(message, false)?;
                let needed = (to.stage, message.mb);
                if self.computed(message.kind, needed) {
                    return Err(ActionFault::TooLate);
                }
                let received = self.received.entry((message.kind, needed)).or_default();
                for piece in &message.pieces {
                    received.entry((piece.value, from.stage)).or_default().push(piece.rows);
                }
            }
        }
        Ok(())
    }

    fn begin_backward(&mut self, stage: Option<u32>, mb: u32) -> Result<Computed, ActionFault> {
        let own = self.own_rows(stage, mb)?;
        if !self.forwards.contains(&own) {
            return Err(ActionFault::BeforeForward);
        }
        if self.backwards.insert(own) { Ok(own) } else { Err(ActionFault::Repeated) }
    }

    /// The microbatch at the seat that an Action means, of which there must be rows.
    fn own_rows(&self, stage: Option<u32>, mb: u32) -> Result<Computed, ActionFault> {
        let seat = self.own.seat(stage).ok_or(ActionFault::WrongSeat)?;
        if self.rows(seat, mb).is_empty() { Err(ActionFault::NoRows) } else { Ok((seat.stage, mb)) }
    }

    fn rows(&self, seat: Seat, mb: u32) -> Interval {
        computed_rows(self.program, seat, mb as usize)
    }

    /// True when a Stage's computation has been done that makes or needs this.
    fn computed(&self, kind: Payload, of: Computed) -> bool {
        match kind {
            Payload::Value => self.forwards.contains(&of),
            Payload::Grad => self.backwards.contains(&of),
        }
    }

    /// Demands that a rank has computed what it gives, and not yet what needs what it takes.
    fn check_place(&self, exchange: &Exchange) -> Result<(), ActionFault> {
        let &Exchange { kind, mb, ref sends, ref recvs } = exchange;
        let mut given = sends.iter().flat_map(|parcel| &parcel.pieces);
        let mut taken = recvs.iter().flat_map(|parcel| &parcel.pieces);
        let has_given = match kind {
            BatchKind::Input | BatchKind::OutputGrad => true,
            BatchKind::Output => given.all(|piece| self.at_seats(piece, mb).all(|own| self.forwards.contains(&own))),
            BatchKind::InputGrad => {
                given.all(|piece| self.at_seats(piece, mb).all(|own| self.backwards.contains(&own)))
            }
        };
        let needed = match kind {
            BatchKind::Input => taken.any(|piece| self.at_seats(piece, mb).any(|own| self.forwards.contains(&own))),
            BatchKind::OutputGrad => {
                taken.any(|piece| self.at_seats(piece, mb).any(|own| self.backwards.contains(&own)))
            }
            BatchKind::Output | BatchKind::InputGrad => false,
        };
        match (has_given, needed) {
            (false, _) => Err(ActionFault::NotComputed),
            (true, true) => Err(ActionFault::TooLate),
            (true, false) => Ok(()),
        }
    }

    /// What the rank's seats compute with rows of an input, or to make them of an output. Of an input without rows that are
    /// all microbatches.
    fn at_seats(&self, &Piece { value, rows }: &Piece, mb: u32) -> impl Iterator<Item = Computed> {
        let is_whole = self.carried.is_whole(value);
        let stages = self.needs.of_batch.get(&value).into_iter().flatten();
        let seats = stages.filter_map(|&stage| self.own.seat_of(stage));
        let microbatches =
            move || (0..).take(self.program.microbatches.len()).filter(move |&own| is_whole || own == mb);
        let all = seats.flat_map(move |seat| microbatches().map(move |mb| (seat, mb)));
        let has_part = move |&(seat, mb): &(Seat, u32)| {
            let own = self.rows(seat, mb);
            if is_whole { !own.is_empty() } else { !own.overlap(rows).is_empty() }
        };
        all.filter(has_part).map(|(seat, mb)| (seat.stage, mb))
    }

    /// The seats between which a message goes.
    fn check_message(&self, message: &Message, sends: bool) -> Result<(Seat, Seat), ActionFault> {
        let first = message.pieces.first().ok_or(ActionFault::Empty)?;
        let peer = self.program.ranks.get(message.peer as usize).filter(|peer| peer.rank != self.own.rank);
        let peer = peer.ok_or(ActionFault::WrongPeer(first.value))?;
        let (sender, receiver) = if sends { (self.own, peer) } else { (peer, self.own) };
        let (from, to) = match message.stages {
            None => (sender.seat(None), receiver.seat(None)),
            Some(_) if !sender.has_several_seats() && !receiver.has_several_seats() => (None, None),
            Some((from, to)) => (sender.seat_of(from), receiver.seat_of(to)),
        };
        let (from, to) = from.zip(to).ok_or(ActionFault::WrongSeat)?;
        let (sent, taken) = (self.rows(from, message.mb), self.rows(to, message.mb));
        if sent.is_empty() || taken.is_empty() {
            return Err(ActionFault::NoRows);
        }
        for piece in &message.pieces {
            if !self.needs.routes.contains(&(message.kind, piece.value, from.stage, to.stage)) {
                return Err(ActionFault::WrongPeer(piece.value));
            }
            if !within(piece.rows, sent) || !within(piece.rows, taken) {
                return Err(ActionFault::WrongRows { value: piece.value, rows: piece.rows });
            }
        }
        Ok((from, to))
    }

    /// Demands that a computation has all it needs, each row once: received, or made by another seat of the rank.
    fn check_received(&mut self, position: usize, action: &Action) -> Result<(), CheckError> {
        let (kind, mb, named, needed) = match action {
            Action::Forward { mb, stage } => (Payload::Value, *mb, stage, &self.needs.values),
            Action::Backward { mb, stage } | Action::BackwardInput { mb, stage } => {
                (Payload::Grad, *mb, stage, &self.needs.grads)
            }
            _ => return Ok(()),
        };
        let Some(seat) = self.own.seat(*named) else { return Ok(()) };
        let mut received = self.received.remove(&(kind, (seat.stage, mb))).unwrap_or_default();
        let rows = self.rows(seat, mb);
        for &(value, stage) in &needed[seat.stage as usize] {
            let mut pieces = received.remove(&(value, stage)).unwrap_or_default();
            let beside = self.own.seat_of(stage).filter(|_| self.computed(kind, (stage, mb)));
            let handed_over = beside.map(|beside| self.rows(beside, mb).overlap(rows));
            pieces.extend(handed_over.filter(|rows| !rows.is_empty()));
            if !covers_once(&mut pieces, rows) {
                let (rank, action) = (self.own.rank, action.clone());
                return Err(CheckError::Rows { rank, position, action, value, stage, rows });
            }
        }
        Ok(())
    }

    fn check_complete(&self) -> Result<(), CheckError> {
        let missing = |action| Err(CheckError::Missing { rank: self.own.rank, action });
        let trains = self.program.call.trains();
        let microbatches = || (0..).take(self.program.microbatches.len());
        let computed = self.own.seats.iter().flat_map(|&seat| microbatches().map(move |mb| (seat, mb)));
        for (seat, mb) in computed.filter(|&(seat, mb)| !self.rows(seat, mb).is_empty()) {
            let of = (seat.stage, mb);
            let stage = self.own.has_several_seats().then_some(seat.stage);
            if !self.forwards.contains(&of) {
                return missing(Action::Forward { mb, stage });
            }
            if trains && !self.backwards.contains(&of) {
                return missing(Action::Backward { mb, stage });
            }
            if trains && !self.ended.contains(&of) {
                return missing(Action::BackwardWeight { mb, stage });
            }
        }
        Ok(())
    }
}

/// Messages of one channel as one side sees them, with their places.
type Side<'a> = Vec<(usize, &'a Action, &'a Message)>;

/// A channel: the ranks at its ends, and their Stages where either has several.
type Ends = (u32, u32, Option<(u32, u32)>);

/// Checks that on each channel the n-th Send and the n-th Recv are the same message.
pub(super) fn check_channels(program: &Program) -> Result<(), CheckError> {
    let mut channels: BTreeMap<Ends, (Side, Side)> = BTreeMap::new();
    for own in &program.ranks {
        for (position, action) in own.forward.iter().chain(&own.backward).enumerate() {
            match action {
                Action::Send(message) => {
                    channels
                        .entry((own.rank, message.peer, message.stages))
                        .or_default()
                        .0
                        .push((position, action, message));
                }
                Action::Recv(message) => {
                    channels
                        .entry((message.peer, own.rank, message.stages))
                        .or_default()
                        .1
                        .push((position, action, message));
                }
                _ => {}
            }
        }
    }
    for ((src, dst, _), (sends, recvs)) in channels {
        for (&(position, send, sent), &(_, recv, received)) in sends.iter().zip(&recvs) {
            if (sent.mb, sent.kind, &sent.pieces) != (received.mb, received.kind, &received.pieces) {
                let (send, recv) = (Box::new(send.clone()), Box::new(recv.clone()));
                return Err(CheckError::Mismatch { src, position, send, dst, recv });
            }
        }
        if let Some(&(position, action, _)) = sends.get(recvs.len()) {
            return Err(CheckError::Unmatched { rank: src, position, action: action.clone() });
        }
        if let Some(&(position, action, _)) = recvs.get(sends.len()) {
            return Err(CheckError::Unmatched { rank: dst, position, action: action.clone() });
        }
    }
    Ok(())
}
