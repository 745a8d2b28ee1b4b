//! Does every rank do everything once, in a possible order, and do Sends meet their Recvs?

use std::collections::{BTreeMap, HashMap, HashSet};

use rannc_ir::ValueId;

use super::carried::Carried;
use super::layout::computed_rows;
use super::{ActionFault, CheckError, covers_once, within};
use crate::partition::Partition;
use crate::program::{Action, BatchKind, Exchange, Interval, Message, Pass, Payload, Program, RankProgram};
use crate::schedule::Call;

/// What goes between which Stages.
struct Needs {
    /// By Stage, the Values that it takes and the Stage of each.
    values: Vec<Vec<(ValueId, u32)>>,
    /// By Stage, the Values whose gradients it takes and the Stage of each.
    grads: Vec<Vec<(ValueId, u32)>>,
    /// The same as a set: payload, Value, sending Stage, receiving Stage.
    routes: HashSet<(Payload, ValueId, u32, u32)>,
}

impl Needs {
    fn new(partition: &Partition) -> Self {
        let none = vec![Vec::new(); partition.stages.len()];
        let mut needs = Self { values: none.clone(), grads: none, routes: HashSet::new() };
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

/// Rows received for one computation, by Value and sending Stage.
type Received = BTreeMap<(ValueId, u32), Vec<Interval>>;

/// The way through one rank's Actions.
struct Walk<'a> {
    program: &'a Program,
    needs: &'a Needs,
    carried: &'a mut Carried,
    own: &'a RankProgram,
    forwards: HashSet<u32>,
    /// Microbatches whose gradients of what came in have been computed.
    backwards: HashSet<u32>,
    /// Microbatches whose gradients of Params have been computed too.
    ended: HashSet<u32>,
    /// Received and not yet used, by payload and microbatch.
    received: HashMap<(Payload, u32), Received>,
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
            Action::Forward { mb } => {
                self.check_has_rows(*mb)?;
                if !self.forwards.insert(*mb) {
                    return Err(ActionFault::Repeated);
                }
            }
            Action::Backward { mb } => {
                self.begin_backward(*mb)?;
                self.ended.insert(*mb);
            }
            Action::BackwardInput { mb } => self.begin_backward(*mb)?,
            Action::BackwardWeight { mb } => {
                self.check_has_rows(*mb)?;
                if !self.backwards.contains(mb) {
                    return Err(ActionFault::BeforeInput);
                }
                if !self.ended.insert(*mb) {
                    return Err(ActionFault::Repeated);
                }
            }
            Action::Exchange(exchange) => {
                self.carried.exchange(self.own.rank, exchange)?;
                self.check_place(exchange)?;
            }
            Action::Send(message) => {
                self.check_message(message, true)?;
                if !self.computed(message) {
                    return Err(ActionFault::NotComputed);
                }
            }
            Action::Recv(message) => {
                self.check_message(message, false)?;
                if self.computed(message) {
                    return Err(ActionFault::TooLate);
                }
                let peer_stage = self.program.ranks[message.peer as usize].stage;
                let received = self.received.entry((message.kind, message.mb)).or_default();
                for piece in &message.pieces {
                    received.entry((piece.value, peer_stage)).or_default().push(piece.rows);
                }
            }
        }
        Ok(())
    }

    fn begin_backward(&mut self, mb: u32) -> Result<(), ActionFault> {
        self.check_has_rows(mb)?;
        if !self.forwards.contains(&mb) {
            return Err(ActionFault::BeforeForward);
        }
        if self.backwards.insert(mb) { Ok(()) } else { Err(ActionFault::Repeated) }
    }

    fn check_has_rows(&self, mb: u32) -> Result<(), ActionFault> {
        let rows = computed_rows(self.program, self.own, mb as usize);
        if rows.lo < rows.hi { Ok(()) } else { Err(ActionFault::NoRows) }
    }

    /// True when the computation that makes or needs the message has been done.
    fn computed(&self, message: &Message) -> bool {
        match message.kind {
            Payload::Value => self.forwards.contains(&message.mb),
            Payload::Grad => self.backwards.contains(&message.mb),
        }
    }

    /// Demands that a rank has computed what it gives, and not yet what needs what it takes.
    fn check_place(&self, exchange: &Exchange) -> Result<(), ActionFault> {
        let &Exchange { kind, mb, ref sends, ref recvs } = exchange;
        let all_backwards = || {
            let mut all = (0..).zip(&self.program.microbatches).filter(|&(mb, _)| self.check_has_rows(mb).is_ok());
            all.all(|(mb, _)| self.backwards.contains(&mb))
        };
        let mut given = sends.iter().flat_map(|parcel| &parcel.pieces);
        let has_given = match kind {
            BatchKind::Input | BatchKind::OutputGrad => true,
            BatchKind::Output => sends.is_empty() || self.forwards.contains(&mb),
            BatchKind::InputGrad => given.all(|piece| match self.carried.is_whole(piece) {
                true => all_backwards(),
                false => self.backwards.contains(&mb),
            }),
        };
        let needed = match kind {
            BatchKind::Input => self.forwards.contains(&mb),
            BatchKind::OutputGrad => self.backwards.contains(&mb),
            BatchKind::Output | BatchKind::InputGrad => false,
        };
        match (has_given, needed && !recvs.is_empty()) {
            (false, _) => Err(ActionFault::NotComputed),
            (true, true) => Err(ActionFault::TooLate),
            (true, false) => Ok(()),
        }
    }

    fn check_message(&self, message: &Message, sends: bool) -> Result<(), ActionFault> {
        self.check_has_rows(message.mb)?;
        let first = message.pieces.first().ok_or(ActionFault::Empty)?;
        let peer = self.program.ranks.get(message.peer as usize).ok_or(ActionFault::WrongPeer(first.value))?;
        let (from, to) = if sends { (self.own, peer) } else { (peer, self.own) };
        let mb = message.mb as usize;
        let (sent, taken) = (computed_rows(self.program, from, mb), computed_rows(self.program, to, mb));
        for piece in &message.pieces {
            if !self.needs.routes.contains(&(message.kind, piece.value, from.stage, to.stage)) {
                return Err(ActionFault::WrongPeer(piece.value));
            }
            if !within(piece.rows, sent) || !within(piece.rows, taken) {
                return Err(ActionFault::WrongRows { value: piece.value, rows: piece.rows });
            }
        }
        Ok(())
    }

    /// Demands that a computation has received all it needs, each row once.
    fn check_received(&mut self, position: usize, action: &Action) -> Result<(), CheckError> {
        let (kind, mb, needed) = match action {
            Action::Forward { mb } => (Payload::Value, *mb, &self.needs.values),
            Action::Backward { mb } | Action::BackwardInput { mb } => (Payload::Grad, *mb, &self.needs.grads),
            _ => return Ok(()),
        };
        let mut received = self.received.remove(&(kind, mb)).unwrap_or_default();
        let rows = computed_rows(self.program, self.own, mb as usize);
        for &(value, stage) in &needed[self.own.stage as usize] {
            let mut pieces = received.remove(&(value, stage)).unwrap_or_default();
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
        for (mb, _) in (0..).zip(&self.program.microbatches) {
            if self.check_has_rows(mb).is_err() {
                continue;
            }
            if !self.forwards.contains(&mb) {
                return missing(Action::Forward { mb });
            }
            if trains && !self.backwards.contains(&mb) {
                return missing(Action::Backward { mb });
            }
            if trains && !self.ended.contains(&mb) {
                return missing(Action::BackwardWeight { mb });
            }
        }
        Ok(())
    }
}

/// Messages of one channel as one side sees them, with their places.
type Side<'a> = Vec<(usize, &'a Action, &'a Message)>;

/// Checks that on each channel the n-th Send and the n-th Recv are the same message.
pub(super) fn check_channels(program: &Program) -> Result<(), CheckError> {
    let mut channels: BTreeMap<(u32, u32), (Side, Side)> = BTreeMap::new();
    for own in &program.ranks {
        for (position, action) in own.forward.iter().chain(&own.backward).enumerate() {
            match action {
                Action::Send(message) => {
                    channels.entry((own.rank, message.peer)).or_default().0.push((position, action, message));
                }
                Action::Recv(message) => {
                    channels.entry((message.peer, own.rank)).or_default().1.push((position, action, message));
                }
                _ => {}
            }
        }
    }
    for ((src, dst), (sends, recvs)) in channels {
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
