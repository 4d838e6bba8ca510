//! Two real processes: one computes, the other takes, and the first is killed.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

use super::super::Peer;
use super::super::fetch::FetchFailure;
use super::pair::{DEADLINE, Setup, WAYS, engine, layout, order};
use super::random::Random;
use super::source::Plan;

/// Tells the other process that it is the one that computes.
const VARIABLE: &str = "TESSERA_TEST_PREFILL_WAY";
const CHILD: &str = "transfer::tests::processes::computes_for_another_process";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_process_computes_and_its_death_is_noticed() {
    let mut random = Random::seeded();
    for way in WAYS {
        let (mut child, peer) = start(&format!("{way:?}"));
        let pair = Setup::new(layout(), way).start(&mut random).await;
        let whole = order(500, 0, &mut random);
        let reservation = pair.reserve(&whole);
        pair.client.fetch(&peer, &whole, &reservation).await.unwrap();
        pair.check(&whole, &reservation, 32);
        pair.decode.wipe(&reservation.blocks);
        // This order takes longer than the other process lives.
        let endless = order(900, 0, &mut random);
        let reservation = pair.reserve(&endless);
        let killed = async {
            tokio::time::sleep(std::time::Duration::from_millis(30)).await;
            child.0.kill().unwrap();
            std::future::pending::<()>().await;
        };
        let error = tokio::select! {
            result = pair.client.fetch(&peer, &endless, &reservation) => result.expect_err("it was killed"),
            () = killed => unreachable!("it never ends"),
        };
        assert!(matches!(error.reason, FetchFailure::Lost(_)), "{way:?}: {error:?}");
        pair.check(&endless, &reservation, error.blocks_complete);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "half of another test, which starts it"]
async fn computes_for_another_process() {
    let Ok(name) = std::env::var(VARIABLE) else { return };
    let way = WAYS.into_iter().find(|way| format!("{way:?}") == name).unwrap();
    // 500 tokens end well; of 900 the rest never comes.
    let plan = Plan { chunk_tokens: 100, hang_after: Some(3 * 5 + 1), ..Plan::default() };
    let pair = Setup { plan, ..Setup::new(layout(), way) }.start(&mut Random(1)).await;
    println!("\nLISTENING {} {}", pair.peer.address, pair.peer.engine.incarnation.0);
    tokio::time::sleep(2 * DEADLINE).await;
}

fn start(way: &str) -> (Killed, Peer) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", CHILD, "--ignored", "--nocapture"]).env(VARIABLE, way);
    let mut child = Killed(command.stdout(Stdio::piped()).spawn().unwrap());
    let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines().map_while(Result::ok);
    let line = lines.find(|line| line.starts_with("LISTENING ")).unwrap();
    let words: Vec<&str> = line.split(' ').collect();
    let peer = Peer { address: words[1].into(), engine: engine("prefill", words[2].parse().unwrap()) };
    (child, peer)
}

/// A process that does not outlive its test.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
