//! Typed ids and the arena that they index.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Index, IndexMut};

use serde::{Deserialize, Serialize};

/// A typed index into an [`Arena`].
pub trait Entity: Copy + Eq + Ord + fmt::Display {
    /// The id of the element at `index`.
    fn new(index: usize) -> Self;
    /// The position of the element in its arena.
    fn index(self) -> usize;
}

/// Declares a `u32` newtype that prints as its prefix and its number, e.g. `op12`.
macro_rules! entity {
    ($(#[$doc:meta])* $name:ident, $prefix:literal) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash,
            serde::Serialize, serde::Deserialize,
        )]
        #[serde(transparent)]
        pub struct $name(pub u32);

        impl $crate::entity::Entity for $name {
            fn new(index: usize) -> Self {
                Self(u32::try_from(index).expect("an arena holds fewer than 2^32 elements"))
            }
            fn index(self) -> usize {
                self.0 as usize
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, concat!($prefix, "{}"), self.0)
            }
        }
    };
}
pub(crate) use entity;

/// A vector indexed by one kind of id; ids are given out in order and never reused.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Arena<K, T> {
    items: Vec<T>,
    #[serde(skip)]
    kind: PhantomData<K>,
}

impl<K, T> Default for Arena<K, T> {
    fn default() -> Self {
        Self { items: Vec::new(), kind: PhantomData }
    }
}

impl<K: Entity, T> Arena<K, T> {
    /// Appends an element and returns its id.
    pub fn push(&mut self, item: T) -> K {
        let id = K::new(self.items.len());
        self.items.push(item);
        id
    }
    /// The element, or `None` when the id belongs to no element.
    pub fn get(&self, id: K) -> Option<&T> {
        self.items.get(id.index())
    }
    /// Number of elements.
    pub fn len(&self) -> usize {
        self.items.len()
    }
    /// True when there is no element.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }
    /// All ids in order.
    pub fn ids(&self) -> impl DoubleEndedIterator<Item = K> + ExactSizeIterator + use<K, T> {
        (0..self.items.len()).map(K::new)
    }
    /// All elements with their ids, in order.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (K, &T)> + ExactSizeIterator {
        self.items.iter().enumerate().map(|(i, item)| (K::new(i), item))
    }
    /// All elements in order, to be changed.
    pub fn values_mut(&mut self) -> std::slice::IterMut<'_, T> {
        self.items.iter_mut()
    }
    /// All elements in order.
    pub fn values(&self) -> std::slice::Iter<'_, T> {
        self.items.iter()
    }
}

impl<K: Entity, T> FromIterator<T> for Arena<K, T> {
    fn from_iter<I: IntoIterator<Item = T>>(items: I) -> Self {
        Self { items: items.into_iter().collect(), kind: PhantomData }
    }
}

impl<K: Entity, T> Index<K> for Arena<K, T> {
    type Output = T;
    fn index(&self, id: K) -> &T {
        &self.items[id.index()]
    }
}

impl<K: Entity, T> IndexMut<K> for Arena<K, T> {
    fn index_mut(&mut self, id: K) -> &mut T {
        &mut self.items[id.index()]
    }
}
