//! The exchange over real sockets: every end is a thread that has connected through its door.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::{Arc, Barrier, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rannc_job::{Exchange, ExchangeError, Home, JobError, Meeting};
use rustix::process::{Resource, getrlimit, setrlimit};

const HOME: Home = Home::At(IpAddr::V4(Ipv4Addr::LOCALHOST));
const LABEL: u64 = 7;

/// Runs `run` at every end of an exchange that has come together; returns the results by rank.
fn at_all_ends<T: Send + 'static>(
    world_size: u32,
    run: impl Fn(u32, Exchange) -> T + Send + Sync + Clone + 'static,
) -> Vec<T> {
    let addresses = Arc::new(Mutex::new(vec![String::new(); world_size as usize]));
    let told = Arc::new(Barrier::new(world_size as usize));
    let end = |rank| {
        let (addresses, told, run) = (Arc::clone(&addresses), Arc::clone(&told), run.clone());
        let body = move || {
            let meeting = Meeting::open(rank, world_size, &HOME).expect("the door opens");
            addresses.lock().expect("no end fails")[rank as usize] = meeting.address().to_owned();
            told.wait();
            let addresses = addresses.lock().expect("no end fails").clone();
            run(rank, meeting.join(&addresses, Duration::from_secs(60)).expect("all come"))
        };
        thread::Builder::new().stack_size(1 << 18).spawn(body).expect("a thread more")
    };
    let threads: Vec<_> = (0..world_size).map(end).collect();
    threads.into_iter().map(|thread| thread.join().expect("no end panics")).collect()
}

/// Over when some time has passed.
fn within(patience: Duration) -> impl Fn() -> bool {
    let deadline = Instant::now() + patience;
    move || Instant::now() >= deadline
}

/// Raises the limit of open files as far as it goes: every connection has two ends in this process.
fn open_files(wanted: u64) {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum.map_or(Some(wanted), |maximum| Some(wanted.min(maximum)));
    setrlimit(Resource::Nofile, limit).expect("up to its maximum it may be raised");
    assert!(limit.current >= Some(wanted), "this test needs {wanted} open files");
}

/// What a rank says in a round: of unlike lengths, some empty.
fn words(rank: u32, round: u32) -> Vec<u8> {
    rank.to_le_bytes().repeat(((rank + round) % 5) as usize)
}

#[test]
fn a_thousand_ends_hear_one_another() {
    open_files(4096);
    let took = at_all_ends(1000, |rank, mut exchange| {
        let start = Instant::now();
        for round in 0..5 {
            let gathered = exchange.gather(LABEL, &words(rank, round), &within(Duration::from_secs(60)));
            let gathered = gathered.expect("all come");
            assert!(gathered.texts().eq((0..1000).map(|rank| words(rank, round))));
        }
        start.elapsed()
    });
    println!("1000 ends, 5 rounds: {:?}", took.iter().max());
}

#[test]
fn every_number_of_ranks_up_to_twenty() {
    for world_size in 1..=20 {
        at_all_ends(world_size, move |rank, mut exchange| {
            for round in 0..10 {
                let gathered = exchange.gather(LABEL, &words(rank, round), &within(Duration::from_secs(60)));
                assert!(gathered.expect("all come").texts().eq((0..world_size).map(|rank| words(rank, round))));
            }
        });
    }
}

#[test]
fn long_texts_go_through() {
    at_all_ends(10, |rank, mut exchange| {
        for bytes in [3 << 20, 10, 1 << 22] {
            let own = vec![rank as u8; bytes * rank as usize / 9];
            let gathered = exchange.gather(LABEL, &own, &within(Duration::from_secs(60))).expect("all come");
            for (rank, text) in gathered.texts().enumerate() {
                assert!(text.len() == bytes * rank / 9 && text.iter().all(|byte| *byte == rank as u8));
            }
        }
    });
}

#[test]
fn a_lost_end_is_an_error_of_all() {
    let errors = at_all_ends(20, |rank, mut exchange| {
        exchange.gather(LABEL, b"", &within(Duration::from_secs(60))).expect("all are there");
        if rank == 17 {
            return None;
        }
        let start = Instant::now();
        let error = exchange.gather(LABEL, b"", &within(Duration::from_secs(60))).err();
        assert!(start.elapsed() < Duration::from_secs(5));
        assert!(matches!(exchange.gather(LABEL, b"", &|| false), Err(ExchangeError::Broken)));
        Some(error.expect("one is missing"))
    });
    for (rank, error) in errors.into_iter().enumerate().filter(|(rank, _)| *rank != 17) {
        // Rank 16 misses it, rank 0 misses rank 16, and every other one loses the one above.
        let lost = match rank {
            0 => 16,
            16 => 17,
            _ if rank % 8 == 0 => 0,
            _ => rank - rank % 8,
        };
        assert_eq!(error.expect("it has waited").to_string(), format!("the connection with rank {lost} is closed"));
    }
}

#[test]
fn a_late_end_is_waited_for_as_long_as_it_makes_sense() {
    let late = Arc::new(Barrier::new(3));
    at_all_ends(3, move |rank, mut exchange| {
        if rank < 2 {
            let start = Instant::now();
            let error = exchange.gather(LABEL, b"", &within(Duration::from_millis(300))).err().expect("one is late");
            assert!(matches!(error, ExchangeError::Over { .. }), "{error}");
            assert!((250..5000).contains(&start.elapsed().as_millis()));
        }
        late.wait();
    });
}

#[test]
fn ends_that_are_about_different_things_do_not_meet() {
    let after = Arc::new(Barrier::new(10));
    at_all_ends(10, move |rank, mut exchange| {
        let label = if rank == 9 { LABEL + 1 } else { LABEL };
        let error = exchange.gather(label, b"", &within(Duration::from_millis(300))).err().expect("they differ");
        assert!(matches!(error, ExchangeError::Over { .. }), "{error}");
        after.wait();
    });
}

#[test]
fn who_does_not_come_is_named() {
    let meeting = Meeting::open(0, 3, &HOME).expect("the door opens");
    let address = [meeting.address().to_owned()];
    let come = thread::spawn(move || {
        let meeting = Meeting::open(2, 3, &HOME).expect("it has no door");
        assert_eq!(meeting.address(), "");
        meeting.join(&address, Duration::from_secs(10)).map(|_| ())
    });
    let error = meeting.join(&[], Duration::from_millis(500)).err().expect("rank 1 does not come");
    assert_eq!(error.to_string(), "rank 1 has not reached rank 0 within 0.5 s (connect_timeout_s)");
    come.join().expect("no panic").expect("rank 2 is in");
}

#[test]
fn who_has_another_idea_of_the_job_is_refused() {
    let meeting = Meeting::open(0, 3, &HOME).expect("the door opens");
    let call = |rank, world_size| {
        let caller = Meeting::open(rank, world_size, &HOME).expect("it has no door");
        caller.join(&[meeting.address().to_owned()], Duration::from_secs(5)).map(|_| ())
    };
    let refused = |result: Result<(), JobError>| result.expect_err("it is refused").to_string();
    assert_eq!(refused(call(1, 4)), "rank 0's watchdog refused rank 1: it counts 4 ranks, rank 0 counts 3");
    call(1, 3).expect("it is let in");
    assert_eq!(refused(call(1, 3)), "rank 0's watchdog refused rank 1: there is a rank 1 already");
}
