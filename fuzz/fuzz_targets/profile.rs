//! A profile that can be sealed can be read again and asked for any number of rows.

#![no_main]

use libfuzzer_sys::fuzz_target;
use rannc_cost::{PROFILE_SCHEMA, Profile};

fuzz_target!(|text: &str| {
    let _ = Profile::from_json(text);
    // Checksums are beyond a fuzzer.
    let Ok(profile) = serde_json::from_str::<Profile>(text) else { return };
    let Ok(profile) = profile.seal() else { return };
    if profile.schema == PROFILE_SCHEMA {
        assert_eq!(Profile::from_json(&profile.to_json()).expect("just written"), profile);
    }
    for block in profile.blocks.values() {
        for rows in [0, 1, 7, 1 << 20, u64::MAX] {
            assert!(block.cost(rows).us() >= 0.0 && block.saved_bytes(rows) >= 0.0);
        }
    }
});
