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

/// Half of an all-reduce over a group: steps one after another, in which each device moves all bytes so many times.
#[derive(Clone, Copy, Debug)]
struct Pass {
    latency_us: f64,
    volumes: f64,
    bytes_per_s: f64,
}

impl Pass {
    fn us(&self, bytes: f64) -> f64 {
        if bytes <= 0.0 { 0.0 } else { self.latency_us + self.volumes * bytes / self.bytes_per_s * 1e6 }
    }

    /// What takes twice the latency.
    fn balanced_bytes(&self) -> f64 {
        if self.volumes <= 0.0 { 0.0 } else { self.latency_us / 1e6 * self.bytes_per_s / self.volumes }
    }
}

/// Collectives over one group.
#[derive(Clone, Copy, Debug)]
pub struct Collective {
    ring: Pass,
    tree: Pass,
}

impl Collective {
    /// Time to sum `bytes` for all members, by a ring or a tree, whichever is quicker.
    pub fn all_reduce_us(&self, bytes: f64) -> f64 {
        (2.0 * self.ring.us(bytes)).min(2.0 * self.tree.us(bytes))
    }

    /// Size of a sum that takes twice as long as its latency: less takes hardly less time, and more shows longer where
    /// nothing hides it.
    pub fn balanced_bytes(&self) -> f64 {
        self.ring.balanced_bytes().min(self.tree.balanced_bytes())
    }

    /// Time to sum `bytes`, of which each member keeps its own part.
    pub fn reduce_scatter_us(&self, bytes: f64) -> f64 {
        self.ring.us(bytes)
    }

    /// Time until every member has `bytes`, of which each member has its own part.
    pub fn all_gather_us(&self, bytes: f64) -> f64 {
        self.ring.us(bytes)
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

    /// The collectives over a group.
    pub fn collective(&self, group: RankGroup) -> Collective {
        let RankGroup { members, nodes, least_per_node, level } = group;
        let (inside, between) = (&self.levels[0].collective, &self.levels[1..=level]);
        // Steps of a ring are taken together by all members, so that the slowest hop counts.
        let between_us = between.iter().fold(inside.latency_us, |us, level| us.max(level.collective.latency_us));
        // The members of a node share what leaves it.
        let lanes = f64::from(least_per_node.max(1));
        let bytes_per_s =
            between.iter().fold(inside.bytes_per_s, |rate, level| rate.min(lanes * level.collective.bytes_per_s));
        let pass = |inside_steps: u32, between_steps: u32, volumes: f64| Pass {
            latency_us: f64::from(inside_steps) * inside.latency_us + f64::from(between_steps) * between_us,
            volumes,
            bytes_per_s,
        };
        // Around a ring, every member passes on a part in each step.
        let steps = members.saturating_sub(1);
        let between_steps = if nodes > 1 { steps } else { 0 };
        let ring = pass(steps - between_steps, between_steps, f64::from(steps) / f64::from(members.max(1)));
        // Up or down a tree of the nodes and, in each, of its members.
        let depth = |members: u32| members.max(1).next_power_of_two().ilog2();
        let tree = pass(depth(members.div_ceil(nodes.max(1))), depth(nodes), 1.0);
        Collective { ring, tree }
    }

    /// Time to sum `bytes` over a group for all members.
    pub fn all_reduce_us(&self, group: RankGroup, bytes: f64) -> f64 {
        self.collective(group).all_reduce_us(bytes)
    }

    /// Time to sum `bytes` over a group, of which each member keeps its own part.
    pub fn reduce_scatter_us(&self, group: RankGroup, bytes: f64) -> f64 {
        self.collective(group).reduce_scatter_us(bytes)
    }

    /// Time until every member of a group has `bytes`, of which each member has its own part.
    pub fn all_gather_us(&self, group: RankGroup, bytes: f64) -> f64 {
        self.collective(group).all_gather_us(bytes)
    }
}
