//! Which Blocks use what others make, and how deep that puts Stages.

use std::collections::BTreeSet;
use std::ops::Range;

use super::spec::CrossingSpec;

/// Which Blocks use what others make. A *way* leads from a Block to each that uses what it makes, and on from there.
#[derive(Clone, Debug)]
pub(crate) struct Feeds {
    /// By Block, those that use what it makes, increasing.
    users: Vec<Vec<usize>>,
    /// By place between Blocks, the last Block before it whose Values one behind it uses.
    last_open: Vec<Option<usize>>,
    /// By place between Blocks, the end of the shortest run behind it to which a way leads from each Block before it from
    /// which one leads behind it.
    reached: Vec<usize>,
}

impl Feeds {
    pub(super) fn new(len: usize, crossings: &[CrossingSpec]) -> Self {
        let mut users = vec![Vec::new(); len];
        crossings.iter().for_each(|crossing| users[crossing.made_by].extend(&crossing.used_by));
        for users in &mut users {
            users.sort_unstable();
            users.dedup();
        }
        let mut feeds = Self { users, last_open: Vec::new(), reached: Vec::new() };
        for place in 0..=len {
            let first_user = |block: usize| feeds.users_from(block, place).first().copied();
            let last_open = (0..place).rev().find(|&block| first_user(block).is_some());
            let reached = feeds.along_ways(place, |block| first_user(block).unwrap_or(len), usize::min);
            let furthest = reached.into_iter().filter(|&block| block < len).max();
            feeds.last_open.push(last_open);
            feeds.reached.push(furthest.map_or(place, |block| block + 1));
        }
        feeds
    }

    /// By Stage, given where each ends, the number of Stages on the longest way from it to one that feeds no other, both
    /// included.
    pub(crate) fn depths(&self, ends: &[usize]) -> Vec<u32> {
        rannc_plan::depths(ends.len(), self.edges(ends))
    }

    /// Stages, each with one that uses what it makes, given where each Stage ends.
    pub(crate) fn edges(&self, ends: &[usize]) -> BTreeSet<(usize, usize)> {
        let stage_of = |block: usize| ends.partition_point(|&end| end <= block);
        let of = |(block, users): (usize, &Vec<usize>)| {
            let from = stage_of(block);
            users.iter().map(move |&user| (from, stage_of(user))).collect::<Vec<_>>()
        };
        self.users.iter().enumerate().flat_map(of).filter(|(from, to)| from != to).collect()
    }

    /// True when a Block behind a run uses what is made in it.
    pub(crate) fn feeds_later(&self, run: &Range<usize>) -> bool {
        self.last_open[run.end].is_some_and(|block| block >= run.start)
    }

    /// True when a Block behind a place uses what is made before it.
    pub(crate) fn is_crossed(&self, place: usize) -> bool {
        self.last_open[place].is_some()
    }

    /// True when a way leads to a run from each Block before it from which one leads to the run or behind it.
    pub(crate) fn all_lead_to(&self, run: &Range<usize>) -> bool {
        run.end >= self.reached[run.start]
    }

    /// True when one of these Blocks uses what this one makes.
    pub(crate) fn is_used_in(&self, block: usize, blocks: Range<usize>) -> bool {
        self.users_from(block, blocks.start).first().is_some_and(|&user| user < blocks.end)
    }

    /// For each Block before a place what is told of it `together` with what is told of all those before the place to
    /// which a way leads from it.
    pub(crate) fn along_ways<T: Copy>(
        &self,
        place: usize,
        told: impl Fn(usize) -> T,
        together: impl Fn(T, T) -> T,
    ) -> Vec<T> {
        let mut all: Vec<T> = (0..place).map(told).collect();
        for block in (0..place).rev() {
            let users = self.users[block].iter().take_while(|&&user| user < place);
            all[block] = users.fold(all[block], |known, &user| together(known, all[user]));
        }
        all
    }

    fn users_from(&self, block: usize, place: usize) -> &[usize] {
        let users = &self.users[block];
        &users[users.partition_point(|&user| user < place)..]
    }
}
