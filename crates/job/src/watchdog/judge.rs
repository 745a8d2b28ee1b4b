//! What is wrong between the ranks, told from their beats alone.

use super::Limits;
use super::peers::{Peer, Peers, Standing};
use crate::calls::{Call, Place};

/// Why the job must end, if it must. Rank 0 knows all ranks; another rank knows only itself and rank 0.
pub fn verdict(peers: &Peers, limits: &Limits, rank: u32) -> Option<String> {
    let of_all =
        || different_calls(peers, limits).or_else(|| failed_alone(peers, limits)).or_else(|| stall(peers, limits));
    left_behind(peers, limits).or_else(|| (rank == 0).then(of_all).flatten())
}

/// A rank's script has ended before a call in which another rank waits.
fn left_behind(peers: &Peers, limits: &Limits) -> Option<String> {
    let has_left =
        |place: Place, (_, peer): &(u32, &Peer)| peer.standing == Standing::Left && !peer.beat.calls.has_come_to(place);
    let ends_with = |(rank, waiter): (u32, &Peer)| -> Option<String> {
        let call = waiter.call()?;
        let leaver = if waiter.beat.torn {
            // The leaver may have come to the call, and left with its connections what the waiter still needed.
            peers.all().find(|(_, peer)| peer.standing == Standing::Left)
        } else if waiter.rests(limits.left) {
            peers.all().find(|other| has_left(call.place, other))
        } else {
            None
        };
        leaver.map(|(leaver, _)| {
            format!("rank {leaver} has left (its script ended) while rank {rank} waits {}", waiter.beat.place())
        })
    };
    peers.all().find_map(ends_with)
}

/// Two ranks wait in calls that no two ranks can make at the same time.
fn different_calls(peers: &Peers, limits: &Limits) -> Option<String> {
    let resting = || peers.all().filter(|(_, peer)| peer.rests(limits.different));
    let ahead =
        resting().filter(|(_, peer)| peer.call().is_some()).max_by_key(|(_, peer)| peer.beat.calls.last_place());
    let (_, ahead) = ahead?;
    resting().find(|(_, peer)| peer.call().is_some_and(|call| ahead.beat.calls.contradict(call)))?;
    Some(describe_calls(peers.all().filter_map(|(rank, peer)| Some((rank, peer.call()?))).collect()))
}

/// A rank waits in a call that another one has left by an exception, which its script has caught, without a second try.
fn failed_alone(peers: &Peers, limits: &Limits) -> Option<String> {
    let waiting = peers.all().filter(|(_, peer)| peer.rests(limits.different));
    waiting.filter_map(|(rank, peer)| Some((rank, peer, peer.call()?))).find_map(|(rank, peer, call)| {
        let repeats = |other: &Peer| {
            let again = other.call().filter(|again| again.place.round == call.place.round);
            again.is_some_and(|again| again.name == call.name)
        };
        let (failed, other) = peers.all().find(|(_, other)| {
            other.beat.calls.has_failed_in(call.place) && other.rests(limits.different) && !repeats(other)
        })?;
        Some(format!(
            "{} has failed on rank {failed}, which {} now, while rank {rank} waits {}: a script may catch an \
             exception that all ranks get, but one of a rank alone has to end it",
            call.name,
            other.state(),
            peer.beat.place()
        ))
    })
}

fn describe_calls(calls: Vec<(u32, &Call)>) -> String {
    let one_name = calls.iter().all(|(_, call)| call.name == calls[0].1.name);
    let one_round = calls.iter().all(|(_, call)| call.place.round == calls[0].1.place.round);
    let mut groups: Vec<(String, Vec<u32>)> = Vec::new();
    for (rank, call) in &calls {
        let number = if one_name && !one_round { format!(" (round {})", call.place.round) } else { String::new() };
        let text = format!("in {}{number}", call.name);
        match groups.iter_mut().find(|(known, _)| *known == text) {
            Some((_, ranks)) => ranks.push(*rank),
            None => groups.push((text, vec![*rank])),
        }
    }
    let demand = match groups.len() {
        1 => "but have not made the same calls before: all calls must be made by all ranks, in the same order",
        _ if one_name => "it must be called by all ranks, as often on each",
        2 => "both must be called by all ranks, in the same order",
        _ => "each must be called by all ranks, in the same order",
    };
    let places = groups.iter().map(|(text, ranks)| (text.as_str(), ranks.as_slice()));
    let separator = if groups.len() == 1 { ", " } else { ": " };
    format!("{}{separator}{demand}", enumerate_places(places))
}

/// "rank 0 waits in state_dict(), ranks 1-3 in model(...)".
fn enumerate_places<'a>(places: impl Iterator<Item = (&'a str, &'a [u32])>) -> String {
    let one = |(index, (text, ranks)): (usize, (&str, &[u32]))| match (index, ranks.len()) {
        (0, 1) => format!("{} waits {text}", name(ranks)),
        (0, _) => format!("{} wait {text}", name(ranks)),
        _ => format!("{} {text}", name(ranks)),
    };
    places.enumerate().map(one).collect::<Vec<_>>().join(", ")
}

/// Some rank waits in a call, and no rank has come further for long.
fn stall(peers: &Peers, limits: &Limits) -> Option<String> {
    let mut working = peers.all().filter(|(_, peer)| peer.standing == Standing::Working);
    if !working.clone().all(|(_, peer)| peer.rests(limits.stall)) {
        return None;
    }
    let (rank, _) = working.find(|(_, peer)| peer.call().is_some())?;
    let seconds = limits.stall.as_secs_f64();
    let places: Vec<String> = peers.all().map(|(rank, peer)| format!("rank {rank} {}", peer.state())).collect();
    Some(format!("rank {rank} has made no progress for {seconds} s (stall_timeout_s): {}", places.join(", ")))
}

/// Ranks that have not come to a call in which others wait, with the place of the call.
pub fn late(peers: &Peers, limits: &Limits) -> Option<(Place, String)> {
    let waiting = peers.all().filter(|(_, peer)| peer.rests(limits.late)).filter_map(|(_, peer)| peer.call());
    let call = waiting.max_by_key(|call| call.place)?;
    let missing = peers.all().filter(|(_, peer)| peer.rests(limits.late) && peer.misses(call.place));
    let missing: Vec<u32> = missing.map(|(rank, _)| rank).collect();
    if missing.is_empty() {
        return None;
    }
    let there = peers.all().filter(|(_, peer)| peer.call().is_some_and(|other| other.place == call.place));
    let there: Vec<u32> = there.map(|(rank, _)| rank).collect();
    let (has, waits) =
        (if missing.len() == 1 { "has" } else { "have" }, if there.len() == 1 { "waits" } else { "wait" });
    let text = format!(
        "{} {has} not come to {} for {} s; {} {waits} there. It must be called by all ranks; without progress the job \
         ends after {} s (stall_timeout_s)",
        name(&missing),
        call.name,
        limits.late.as_secs_f64(),
        name(&there),
        limits.stall.as_secs_f64(),
    );
    Some((call.place, text))
}

/// Ranks in words: "rank 3", "ranks 0-2, 5".
fn name(ranks: &[u32]) -> String {
    let runs = ranks.chunk_by(|one, next| one + 1 == *next);
    let runs = runs.map(|run| match run {
        [first, .., last] => format!("{first}-{last}"),
        _ => run[0].to_string(),
    });
    let plural = if ranks.len() == 1 { "" } else { "s" };
    format!("rank{plural} {}", runs.collect::<Vec<_>>().join(", "))
}
