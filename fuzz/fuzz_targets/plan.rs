//! A plan that can be sealed can be read again.

#![no_main]

use libfuzzer_sys::fuzz_target;
use rannc_plan::{PLAN_SCHEMA, Plan};

fuzz_target!(|text: &str| {
    let _ = Plan::from_json(text);
    // Checksums are beyond a fuzzer.
    let Ok(plan) = serde_json::from_str::<Plan>(text) else { return };
    let Ok(plan) = plan.seal() else { return };
    if plan.schema == PLAN_SCHEMA {
        assert_eq!(Plan::from_json(&plan.to_json()).expect("just written"), plan);
    }
    plan.placement();
});
