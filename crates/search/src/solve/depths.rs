//! How deep Stages lie in the graph of Stages, as they are put before each other.

use std::collections::HashMap;
use std::ops::{Range, RangeInclusive};

use crate::chain::Feeds;

/// Of each Block before a place between Stages: how deep the deepest Stage behind the place is to which a way leads from
/// it. It decides how deep all Stages are that are put before the place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Ahead {
    /// The same of all from which a way leads there.
    Alike(usize),
    /// See [`Depths`].
    Apart(usize),
}

impl Ahead {
    /// Behind the last Stage.
    pub(crate) const END: Self = Self::Alike(0);
}

/// Tells how deep Stages are.
pub(crate) struct Depths<'a> {
    feeds: &'a Feeds,
    /// What is deeper counts as so deep.
    deepest: usize,
    /// What [`Ahead::Apart`] stands for: by Block, 0 where no way leads to a Stage.
    apart: Vec<Vec<usize>>,
    numbers: HashMap<Vec<usize>, usize>,
    told: HashMap<(Range<usize>, Ahead), (usize, Ahead)>,
}

impl<'a> Depths<'a> {
    pub(crate) fn new(feeds: &'a Feeds, deepest: usize) -> Self {
        Self { feeds, deepest, apart: Vec::new(), numbers: HashMap::new(), told: HashMap::new() }
    }

    /// How deep a Stage may be that is put before a place: one that feeds no other, and one that does.
    pub(crate) fn possible(&self, ahead: Ahead) -> [RangeInclusive<usize>; 2] {
        let feeding = match ahead {
            Ahead::Alike(behind) => self.above(behind)..=self.above(behind),
            Ahead::Apart(_) => self.above(1)..=self.deepest,
        };
        [1..=1, feeding]
    }

    /// How deep a Stage of these Blocks is, and what is ahead of those before it.
    pub(crate) fn put_before(&mut self, run: &Range<usize>, ahead: Ahead) -> (usize, Ahead) {
        if let Ahead::Alike(behind) = ahead {
            let depth = self.above(if self.feeds.feeds_later(run) { behind } else { 0 });
            if depth == behind || (depth > behind && self.feeds.all_lead_to(run)) {
                return (depth, if self.feeds.is_crossed(run.start) { Ahead::Alike(depth) } else { Ahead::END });
            }
        }
        let key = (run.clone(), ahead);
        if let Some(&told) = self.told.get(&key) {
            return told;
        }
        let told = self.follow(run, ahead);
        self.told.insert(key, told);
        told
    }

    /// The same, Block by Block.
    fn follow(&mut self, run: &Range<usize>, ahead: Ahead) -> (usize, Ahead) {
        let behind = self.by_block(run.end, ahead);
        let depth = self.above(behind[run.clone()].iter().copied().max().unwrap_or(0));
        let to_run = |block: usize| if self.feeds.is_used_in(block, run.clone()) { depth } else { 0 };
        let by_block = self.feeds.along_ways(run.start, |block| behind[block].max(to_run(block)), usize::max);
        (depth, self.number(by_block))
    }

    fn above(&self, behind: usize) -> usize {
        (behind + 1).min(self.deepest)
    }

    fn by_block(&self, place: usize, ahead: Ahead) -> Vec<usize> {
        match ahead {
            Ahead::Alike(depth) => {
                let is_open = |block: usize| self.feeds.is_used_in(block, place..usize::MAX);
                self.feeds.along_ways(place, |block| if is_open(block) { depth } else { 0 }, usize::max)
            }
            Ahead::Apart(number) => self.apart[number].clone(),
        }
    }

    fn number(&mut self, by_block: Vec<usize>) -> Ahead {
        let mut others = by_block.iter().copied().filter(|&depth| depth > 0);
        let depth = others.next().unwrap_or(0);
        if others.all(|other| other == depth) {
            return Ahead::Alike(depth);
        }
        let next = self.apart.len();
        let number = *self.numbers.entry(by_block.clone()).or_insert(next);
        if number == next {
            self.apart.push(by_block);
        }
        Ahead::Apart(number)
    }
}
