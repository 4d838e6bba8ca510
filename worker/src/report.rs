//! Pushes the engine's occupancy to a scheduler: on change, not too often, and at least every heartbeat.

use std::sync::Arc;
use std::time::Duration;

use async_stream::stream;
use contract::occupancy::Occupancy;
use daemon::client::{AddressError, ChannelOptions, channel};
use daemon::shutdown::Shutdown;
use daemon::task::Tasks;
use futures::Stream;
use proto::cluster::v1 as wire;
use proto::cluster::v1::scheduler_client::SchedulerClient;
use tokio::sync::watch;
use tokio::time::sleep;

use crate::engine_loop::EngineHandle;
use crate::transfer::cost::MoveCost;

/// Shortest wait before a lost stream is made anew.
const BACKOFF_MIN: Duration = Duration::from_millis(100);
/// Longest such wait.
const BACKOFF_MAX: Duration = Duration::from_secs(2);

/// How often to report.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pace {
    /// Shortest time between two reports.
    pub(crate) interval: Duration,
    /// Longest time between two reports.
    pub(crate) heartbeat: Duration,
}

/// Starts one task for each scheduler; each reconnects for ever and none holds up the engine.
///
/// # Errors
/// An address that cannot be parsed.
pub(crate) fn start(
    addresses: &[String],
    engine: &EngineHandle,
    cost: &Arc<MoveCost>,
    pace: Pace,
    tasks: &Tasks,
    shutdown: &Shutdown,
) -> Result<(), AddressError> {
    for address in addresses {
        let client = SchedulerClient::new(channel(address, &ChannelOptions::default())?);
        let (engine, cost, shutdown, address) = (engine.clone(), Arc::clone(cost), shutdown.clone(), address.clone());
        tasks.spawn("worker-report", async move {
            tokio::select! {
                () = shutdown.triggered() => {}
                () = report_for_ever(client, &address, engine, cost, pace) => {}
            }
        });
    }
    Ok(())
}

async fn report_for_ever(
    mut client: SchedulerClient<tonic::transport::Channel>,
    address: &str,
    engine: EngineHandle,
    cost: Arc<MoveCost>,
    pace: Pace,
) {
    let mut backoff = BACKOFF_MIN;
    loop {
        let began = daemon::clock::now();
        let ended = client
            .report_occupancy(reports(engine.occupancy(), engine.stall().follow(), Arc::clone(&cost), pace))
            .await;
        if daemon::clock::now().duration_since(began) > BACKOFF_MAX {
            backoff = BACKOFF_MIN;
        }
        match ended {
            Ok(_) => tracing::debug!(scheduler = address, "the scheduler ended the occupancy stream"),
            Err(status) => tracing::debug!(scheduler = address, %status, "the occupancy stream broke"),
        }
        sleep(backoff).await;
        backoff = (backoff * 2).min(BACKOFF_MAX);
    }
}

/// Reports as they are due; ends with the engine.
fn reports(
    mut occupancy: watch::Receiver<Occupancy>,
    mut stall: watch::Receiver<Option<Arc<str>>>,
    cost: Arc<MoveCost>,
    pace: Pace,
) -> impl Stream<Item = wire::OccupancyReport> {
    stream! {
        loop {
            let is_stalled = stall.borrow_and_update().is_some();
            let transfer_ms_per_token = cost.ms_per_token();
            let report = Occupancy { is_stalled, transfer_ms_per_token, ..occupancy.borrow_and_update().clone() };
            yield wire::OccupancyReport { occupancy: Some((&report).into()) };
            sleep(pace.interval).await;
            tokio::select! {
                changed = occupancy.changed() => if changed.is_err() { return },
                Ok(()) = stall.changed() => {}
                () = sleep(pace.heartbeat) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use contract::cost::{CostCoefficients, StepLoad};
    use contract::ids::{DataRank, EngineId, Incarnation};
    use contract::occupancy::BlockCounts;
    use futures::StreamExt as _;

    use super::*;

    fn occupancy(step: u64) -> Occupancy {
        Occupancy {
            engine: EngineId { worker: "w".into(), incarnation: Incarnation(1), data_rank: DataRank(0) },
            step,
            blocks: BlockCounts::default(),
            requests_waiting: 0,
            requests_running: 0,
            slots: 8,
            tokens_queued: 0,
            tokens_running: 0,
            cost: CostCoefficients::default(),
            step_tokens: 0,
            pairs_queued: 0.0,
            computed: StepLoad::default(),
            requests_begun: 0,
            prompt_tokens_begun: 0,
            is_stalled: false,
            transfer_ms_per_token: 0.0,
        }
    }

    #[tokio::test]
    async fn reports_changes_at_the_interval_and_silence_at_the_heartbeat() {
        let (sender, receiver) = watch::channel(occupancy(0));
        let (stall, stalls) = watch::channel(None);
        let pace = Pace { interval: Duration::from_millis(5), heartbeat: Duration::from_millis(20) };
        let mut reports = Box::pin(reports(receiver, stalls, Arc::default(), pace));
        let mut next = async || {
            let report = reports.next().await?.occupancy.unwrap();
            Some((report.step, report.stalled))
        };
        assert_eq!(next().await, Some((0, false)));
        for n in 1..=100 {
            sender.send_replace(occupancy(n));
        }
        assert_eq!(next().await, Some((100, false)), "changes in between travel together");
        assert_eq!(next().await, Some((100, false)), "a heartbeat");
        stall.send_replace(Some(Arc::from("a step hangs")));
        assert_eq!(next().await, Some((100, true)));
        drop(sender);
        assert_eq!(next().await, None);
    }
}
