//! When a prompt is placed: at once while its worker has room and nobody waits, else when its tenant's turn comes.

use std::sync::Arc;
use std::time::Duration;

use contract::error::RequestError;
use contract::ids::{RequestId, TenantId};
use tracing::Span;

use super::Service;
use super::gate::{Attempt, Claim, Forecast};
use crate::admission::Turn;
use crate::cluster::Placement;
use crate::model::PromptBlocks;
use crate::route::placer::NotPlaced;

/// Shortest and longest time after which a request that waits is tried again where nothing happens.
const RETRY_MS: (f64, f64) = (1.0, 1_000.0);

/// A prompt that is to be placed.
pub(crate) struct Asked {
    /// What the client asked, which this is a part of.
    pub(super) question: RequestId,
    pub(super) tenant: TenantId,
    pub(super) n_tokens: u64,
    pub(super) blocks: Arc<PromptBlocks>,
    /// Gets the decision's attributes.
    pub(super) span: Span,
}

impl Service {
    /// Places a prompt as soon as it may be.
    ///
    /// # Errors
    /// When no worker is ready, or it is refused or waited for too long.
    pub(super) async fn acquire(&self, claim: Claim<'_>, asked: Asked) -> Result<Placement, RequestError> {
        self.gate.acquire(claim, asked, |asked, turn| self.attempt(asked, turn), |asked| self.forecast(asked)).await
    }

    /// Places what waits, whenever there may be room; never returns.
    pub(crate) async fn place_waiting(&self) {
        let mut again: Option<Duration> = None;
        let mut demands = self.cluster.elsewhere.follow_demands();
        loop {
            match again {
                // Nothing waits, so that room is no news.
                None => self.gate.entered().await,
                Some(again) => tokio::select! {
                    () = self.cluster.room.notified() => {}
                    () = self.gate.entered() => {}
                    () = tokio::time::sleep(again) => {}
                },
            }
            self.hear_others(&mut demands);
            again = self.gate.pump(daemon::clock::now(), |asked, turn| self.attempt(asked, turn));
        }
    }

    fn attempt(&self, asked: &Asked, turn: Turn) -> Attempt<Placement> {
        let Asked { question, tenant, n_tokens, blocks, span } = asked;
        match span.in_scope(|| self.cluster.place_if_free(*question, tenant, *n_tokens, blocks, turn)) {
            Ok(placement) => {
                let tokens = placement.flight.tokens_new();
                Attempt::Placed(placement, tokens)
            }
            Err(NotPlaced::Busy { wait_ms, .. }) => {
                Attempt::NotNow(Duration::from_secs_f64(wait_ms.clamp(RETRY_MS.0, RETRY_MS.1) / 1e3))
            }
            Err(why @ NotPlaced::NoEngine) => match self.cluster.waits_for_engine() {
                Some(left) => Attempt::NotNow(left),
                None => Attempt::Never(self.cluster.refusal(why)),
            },
        }
    }

    fn forecast(&self, asked: &Asked) -> Forecast {
        let explained = self.cluster.explain(&asked.tenant, asked.n_tokens, &asked.blocks);
        let Ok(decision) = explained else { return Forecast::default() };
        let chosen = decision.computes();
        let tokens_new = |cached: u64| asked.n_tokens.saturating_sub(cached).max(1);
        let known = decision.considered.iter().filter(|one| one.prediction.prefill_ms > 0.0);
        Forecast {
            tokens: tokens_new(chosen.tokens_cached),
            prefill_ms: chosen.prediction.prefill_ms,
            first_token_ms: chosen.prediction.first_token_ms,
            tokens_per_ms: known.map(|one| tokens_new(one.tokens_cached) as f64 / one.prediction.prefill_ms).sum(),
        }
    }
}
