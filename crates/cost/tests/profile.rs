//! Profiles: what is read between the points, and their file. `PROPTEST_CASES` runs more cases with
//! damaged files.

use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use rannc_cost::{
    BlockPoint, BlockProfile, Link, MeasuredLevel, MeasuredUpdate, PROFILE_SCHEMA, Profile, ProfileError, ProfileFault,
};
use rannc_ir::testing::{cases, damaged};

fn point(rows: u64, forward_us: f64) -> BlockPoint {
    BlockPoint {
        rows,
        fits: true,
        forward_us,
        backward_us: 2.0 * forward_us,
        forward_host_us: 0.5 * forward_us,
        backward_host_us: 0.8 * forward_us,
        backward_input_us: forward_us,
        backward_weight_us: 1.5 * forward_us,
        saved_bytes: 100 * rows,
        workspace_bytes: 10 * rows,
    }
}

fn out_of_memory(rows: u64) -> BlockPoint {
    BlockPoint { fits: false, saved_bytes: 0, workspace_bytes: 0, ..point(rows, 0.0) }
}

fn sealed() -> Profile {
    let mut profile = Profile::new("abc", "NVIDIA H200", "float32 with TF32");
    profile.versions.insert("torch".to_owned(), "2.11.0".to_owned());
    profile.blocks.insert("b1".to_owned(), BlockProfile::new(vec![point(4, 10.0), point(8, 18.5), out_of_memory(64)]));
    profile.blocks.insert("b2".to_owned(), BlockProfile::new(vec![out_of_memory(1)]));
    profile.update = Some(MeasuredUpdate { params_bytes: 4_000_000, update_us: 25.0 });
    (profile.collective_slowdown, profile.message_slowdown) = (Some(0.75), Some(0.05));
    let link = Link { latency_us: 12.5, bytes_per_s: 3.3e11 };
    profile.levels.push(MeasuredLevel { name: "NVLink".to_owned(), send: link, collective: link });
    profile.seal().expect("figures agree")
}

/// The fault of a profile with one Block.
fn fault(points: Vec<BlockPoint>) -> ProfileFault {
    let mut profile = sealed();
    profile.blocks.insert("b3".to_owned(), BlockProfile::new(points));
    match profile.seal() {
        Err(ProfileError::Inconsistent(fault)) => fault,
        other => panic!("the profile contradicts itself, but gave {other:?}"),
    }
}

/// Points by increasing rows, with any times.
fn points() -> impl Strategy<Value = Vec<BlockPoint>> {
    (btree_map(1..1000_u64, 0.0..1e6, 1..6), 0..3_usize).prop_map(|(times, without)| {
        let mut points: Vec<BlockPoint> = times.into_iter().map(|(rows, us)| point(rows, us)).collect();
        let fitting = points.len().saturating_sub(without);
        points[fitting..].iter_mut().for_each(|point| *point = out_of_memory(point.rows));
        points
    })
}

/// Everything that a Block is asked for.
fn amounts(block: &BlockProfile, rows: u64) -> [f64; 8] {
    let cost = block.cost(rows);
    [
        cost.forward_us,
        cost.backward_us,
        cost.forward_host_us,
        cost.backward_host_us,
        block.backward_input_us(rows),
        block.backward_weight_us(rows),
        block.saved_bytes(rows),
        block.workspace_bytes(rows),
    ]
}

proptest! {
    #[test]
    fn points_are_met_and_nothing_is_negative(points in points(), rows in 0..5000_u64) {
        let block = BlockProfile::new(points.clone());
        prop_assert!(amounts(&block, rows).into_iter().all(|amount| amount >= 0.0));
        prop_assert_eq!(block.has_times(), block.cost(rows).forward_us.is_finite());
        for point in &points {
            prop_assert_eq!(block.fits(point.rows), point.fits);
            let us = block.cost(point.rows).forward_us;
            prop_assert!(!point.fits || (us - point.forward_us).abs() <= 1e-9 * point.forward_us.max(1.0));
        }
        prop_assert!(block.fits(rows) || !block.fits(rows + 1));
    }

    #[test]
    fn monotone_points_give_monotone_times(mut points in points(), rows in 0..5000_u64) {
        let mut us = 0.0;
        for point in points.iter_mut().filter(|point| point.fits) {
            us += point.forward_us;
            point.forward_us = us;
        }
        let block = BlockProfile::new(points);
        prop_assert!(block.cost(rows).forward_us <= block.cost(rows + 1).forward_us * (1.0 + 1e-12));
    }

    #[test]
    fn reads_what_it_wrote(blocks in btree_map("[a-f0-9]{4}", points(), 0..4), names in vec(".{0,9}", 3)) {
        let mut profile = Profile::new(&names[0], &names[1], &names[2]);
        profile.blocks = blocks.into_iter().map(|(hash, points)| (hash, BlockProfile::new(points))).collect();
        let profile = profile.seal().expect("figures agree");
        let text = profile.to_json();
        let read = Profile::from_json(&text).expect("just written");
        prop_assert_eq!(read.to_json(), text);
        prop_assert_eq!(read, profile);
    }
}

proptest! {
    #![proptest_config(cases(4000))]

    #[test]
    fn damaged_files_are_refused(text in damaged(Just(sealed().to_json()))) {
        // Damage that JSON does not see, of spaces or the order of fields, does no harm.
        match Profile::from_json(&text) {
            Ok(profile) => prop_assert_eq!(profile, sealed()),
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }

    #[test]
    fn what_is_sealed_can_be_read_and_asked(text in damaged(Just(sealed().to_json())), rows: u64) {
        let Ok(profile) = serde_json::from_str::<Profile>(&text) else { return Ok(()) };
        match profile.seal() {
            Ok(profile) => {
                let again = Profile::from_json(&profile.to_json());
                prop_assert!(profile.schema != PROFILE_SCHEMA || again.is_ok_and(|again| again == profile));
                for block in profile.blocks.values() {
                    prop_assert!(amounts(block, rows).into_iter().all(|amount| amount >= 0.0));
                }
            }
            Err(error) => prop_assert!(!error.to_string().is_empty()),
        }
    }
}

#[test]
fn lines_go_through_the_points_and_beyond() {
    let block = BlockProfile::new(vec![point(4, 10.0), point(8, 18.0), point(10, 17.0)]);
    for (rows, us) in [(0, 2.0), (2, 6.0), (6, 14.0), (9, 17.5), (10, 17.0), (100, 17.0)] {
        assert_eq!(block.cost(rows).forward_us, us, "{rows} rows");
    }
    assert_eq!(block.backward_weight_us(6), 21.0);
    assert_eq!(BlockProfile::new(vec![point(4, 10.0), out_of_memory(8)]).cost(6).forward_us, 15.0);
    assert_eq!(BlockProfile::new(vec![out_of_memory(8)]).cost(1).forward_us, f64::INFINITY);
}

#[test]
fn contradictions_are_named() {
    let block = || "b3".to_owned();
    assert_eq!(fault(vec![]), ProfileFault::NoPoints { block: block() });
    assert_eq!(fault(vec![point(0, 1.0)]), ProfileFault::Rows { block: block(), before: 0, rows: 0 });
    let repeated = vec![point(3, 1.0), point(3, 1.0)];
    assert_eq!(fault(repeated), ProfileFault::Rows { block: block(), before: 3, rows: 3 });
    assert_eq!(fault(vec![point(3, -1.0)]), ProfileFault::Time { block: block(), rows: 3, us: -1.0 });
    assert!(matches!(fault(vec![point(3, f64::NAN)]), ProfileFault::Time { rows: 3, .. }));
    assert_eq!(fault(vec![out_of_memory(3), point(4, 1.0)]), ProfileFault::FitsAgain { block: block(), rows: 4 });
    let measured = vec![BlockPoint { fits: false, ..point(3, 1.0) }];
    assert_eq!(fault(measured), ProfileFault::FiguresWithoutRun { block: block(), rows: 3 });
    let mut profile = sealed();
    profile.update = Some(MeasuredUpdate { params_bytes: 0, update_us: 25.0 });
    let error = profile.seal().expect_err("no parameters").to_string();
    assert!(error.contains("takes 25 us for 0 bytes of parameters"), "{error}");
    for name in ["collective_slowdown", "message_slowdown"] {
        let mut profile = sealed();
        let share =
            if name == "message_slowdown" { &mut profile.message_slowdown } else { &mut profile.collective_slowdown };
        *share = Some(-0.5);
        let error = profile.seal().expect_err("a speed-up").to_string();
        assert!(error.contains(&format!("{name} prolongs computations by a share of -0.5")), "{error}");
    }
    let mut profile = sealed();
    profile.levels[0].send.bytes_per_s = 0.0;
    let error = profile.seal().expect_err("no bandwidth").to_string();
    assert!(error.contains("level NVLink has a link of 12.5 us and 0 bytes/s"), "{error}");
}

#[test]
fn other_files_are_refused() {
    let text = sealed().to_json();
    let error = |text: &str| Profile::from_json(text).expect_err("must be refused");
    assert!(matches!(error(&text.replace("18.5", "19.5")), ProfileError::Checksum { .. }));
    assert!(matches!(error(&text.replace("forward_us", "forward_ms")), ProfileError::Form(_)));
    assert!(matches!(error(&text[..text.len() / 2]), ProfileError::NotJson(_)));
    assert_eq!(
        error(&text.replace("\"schema\": 2", "\"schema\": 3")).to_string(),
        "the profile file has schema 3, this RaNNC reads schema 2; measure again with this version"
    );
    let missing = Profile::read(std::path::Path::new("/nowhere/profile.json")).expect_err("no such file");
    assert!(missing.to_string().starts_with("cannot read the profile file /nowhere/profile.json"), "{missing}");
}

#[test]
fn the_seed_of_the_fuzz_target_can_be_sealed() {
    let seed = include_str!("../../../fuzz/seeds/profile/profile.json");
    let profile: Profile = serde_json::from_str(seed).expect("of the form of a profile");
    assert_eq!(profile.seal().expect("figures agree").blocks.len(), 2);
}
