//! What a rank tells the others, and when it looks at what they have told.

use std::sync::{Arc, PoisonError};
use std::thread;

use super::{Watchdog, ending, judge};
use crate::wire::{Message, Stop};

impl Watchdog {
    /// Sends beats and looks at the clock, until the script has ended.
    pub(super) fn beat(self: &Arc<Self>) {
        while !self.is_over() {
            self.tell();
            let cause = judge::verdict(&self.peers(), &self.limits, self.rank);
            if let Some(cause) = cause {
                self.order(&Stop { cause, said_by: None, grace_ms: 0 });
            }
            if self.rank == 0 {
                self.name_late();
            }
            thread::sleep(self.limits.heartbeat);
        }
    }

    /// Tells the other ranks, and this one's own record, where this rank is.
    pub(super) fn tell(&self) {
        let beat = self.position.beat();
        self.peers().hear(self.rank, beat.clone());
        self.broadcast(&Message::Beat(beat));
    }

    /// Says once for each call which ranks have not come to it for long.
    fn name_late(&self) {
        let Some((place, text)) = judge::late(&self.peers(), &self.limits) else { return };
        let mut noticed = self.noticed.lock().unwrap_or_else(PoisonError::into_inner);
        if noticed.replace(place) != Some(place) {
            ending::say(&text);
        }
    }

    pub(super) fn broadcast(&self, message: &Message) {
        let senders = self.peers().senders();
        for sender in senders {
            // A peer that cannot be reached shows on the receiving side too, and is dealt with there.
            let _ = sender.send(message);
        }
    }
}
