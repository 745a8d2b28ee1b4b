//! Orders for tests, here and in crates above.

use crate::schedule::{Compute, Order};

/// The order of one Stage with some of its backwards in two parts, of which the second comes later or much later; every seed gives
/// another one.
pub fn in_two_parts(order: &Order, mut seed: u64) -> Order {
    let mut draw = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % 3
    };
    let (mut found, mut waiting) = (Vec::new(), std::collections::VecDeque::new());
    for compute in order.computes() {
        let whole = draw() == 0;
        match compute {
            Compute::Backward(mb) if !whole => {
                found.push(Compute::BackwardInput(mb));
                waiting.push_back(Compute::BackwardWeight(mb));
            }
            Compute::Backward(_) => found.extend(waiting.drain(..).chain([compute])),
            _ => found.push(compute),
        }
        while !waiting.is_empty() && draw() == 0 {
            found.extend(waiting.pop_front());
        }
    }
    found.extend(waiting);
    found.into_iter().collect()
}
