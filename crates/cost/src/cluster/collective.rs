//! Time of communication: a latency for each step, a bandwidth for each byte.
//!
//! Laws: times do not fall with the bytes, nor with the members of a group whose nodes and least
//! members per node are the same; faster links never take longer; nothing takes no time.

use super::cluster::{Cluster, Link, RankGroup};

impl Link {
    /// Time to send `bytes` to one other device; nothing takes no time.
    pub fn send_us(&self, bytes: f64) -> f64 {
        if bytes <= 0.0 { 0.0 } else { self.latency_us + bytes / self.bytes_per_s * 1e6 }
    }
}

/// What a collective asks of its links: steps one after another, and times that each device moves all
/// bytes.
struct Algorithm {
    inside_steps: u32,
    between_steps: u32,
    volumes: f64,
}

/// Half of an all-reduce: around a ring, every member passes on a part in each step.
fn ring_pass(group: RankGroup) -> Algorithm {
    let steps = group.members - 1;
    let between_steps = if group.nodes > 1 { steps } else { 0 };
    let volumes = f64::from(steps) / f64::from(group.members);
    Algorithm { inside_steps: steps - between_steps, between_steps, volumes }
}

/// Half of an all-reduce: up or down a tree of the nodes and, in each, of its members.
fn tree_pass(group: RankGroup) -> Algorithm {
    let depth = |members: u32| members.max(1).next_power_of_two().ilog2();
    Algorithm {
        inside_steps: depth(group.members.div_ceil(group.nodes.max(1))),
        between_steps: depth(group.nodes),
        volumes: 1.0,
    }
}

impl Cluster {
    /// Time to send `bytes` to a device that `level` joins; nothing takes no time.
    pub fn send_us(&self, level: usize, bytes: f64) -> f64 {
        self.levels[level].send.send_us(bytes)
    }

    /// The same between the two devices that are quickest at it.
    pub fn least_send_us(&self, bytes: f64) -> f64 {
        self.levels.iter().map(|level| level.send.send_us(bytes)).fold(f64::INFINITY, f64::min)
    }

    /// Time to sum `bytes` over a group for all members, by a ring or a tree, whichever is quicker.
    pub fn all_reduce_us(&self, group: RankGroup, bytes: f64) -> f64 {
        let pass_us = |pass: fn(RankGroup) -> Algorithm| 2.0 * self.pass_us(group, bytes, pass);
        pass_us(ring_pass).min(pass_us(tree_pass))
    }

    /// Time to sum `bytes` over a group, of which each member keeps its own part.
    pub fn reduce_scatter_us(&self, group: RankGroup, bytes: f64) -> f64 {
        self.pass_us(group, bytes, ring_pass)
    }

    /// Time until every member of a group has `bytes`, of which each member has its own part.
    pub fn all_gather_us(&self, group: RankGroup, bytes: f64) -> f64 {
        self.pass_us(group, bytes, ring_pass)
    }

    fn pass_us(&self, group: RankGroup, bytes: f64, pass: fn(RankGroup) -> Algorithm) -> f64 {
        if group.members < 2 || bytes <= 0.0 {
            return 0.0;
        }
        let Algorithm { inside_steps, between_steps, volumes } = pass(group);
        let (inside, between) = (&self.levels[0].collective, &self.levels[1..=group.level]);
        // Steps of a ring are taken together by all members, so that the slowest hop counts.
        let between_us = between.iter().fold(inside.latency_us, |us, level| us.max(level.collective.latency_us));
        let latency_us = f64::from(inside_steps) * inside.latency_us + f64::from(between_steps) * between_us;
        // The members of a node share what leaves it.
        let lanes = f64::from(group.least_per_node.max(1));
        let bytes_per_s =
            between.iter().fold(inside.bytes_per_s, |rate, level| rate.min(lanes * level.collective.bytes_per_s));
        latency_us + volumes * bytes / bytes_per_s * 1e6
    }
}
