//! Orders for tests, here and in crates above.

use crate::schedule::{Compute, Order, Seated};

/// The order with some of its backwards in two parts, of which the second comes later or much later; every seed gives
/// another one.
pub fn in_two_parts(order: &Order, mut seed: u64) -> Order {
    let mut draw = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) % 3
    };
    let (mut found, mut waiting) = (Vec::new(), std::collections::VecDeque::new());
    for &seated in &order.0 {
        let whole = draw() == 0;
        let with = |compute: Compute| Seated { compute, ..seated };
        match seated.compute {
            Compute::Backward(mb) if !whole => {
                found.push(with(Compute::BackwardInput(mb)));
                waiting.push_back(with(Compute::BackwardWeight(mb)));
            }
            Compute::Backward(_) => found.extend(waiting.drain(..).chain([seated])),
            _ => found.push(seated),
        }
        while !waiting.is_empty() && draw() == 0 {
            found.extend(waiting.pop_front());
        }
    }
    found.extend(waiting);
    Order(found)
}
