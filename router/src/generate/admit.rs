//! What answers questions: the model's text side, the cluster, and bounds on how much runs at once.

use std::sync::Arc;

use contract::error::RequestError;
use contract::ids::Token;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::cluster::Cluster;
use crate::config::Limits;
use crate::metrics::Metrics;
use crate::model::ServedModel;
use crate::text::TextError;

/// Shared by both APIs.
pub(crate) struct Service {
    pub(crate) model: Arc<ServedModel>,
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) limits: Limits,
    pub(crate) metrics: Arc<Metrics>,
    permits: Arc<Semaphore>,
    /// Threads that tokenize, so that long texts do not take all of the runtime's.
    tokenizing: Semaphore,
}

impl Service {
    pub(crate) fn new(model: Arc<ServedModel>, cluster: Arc<Cluster>, limits: Limits, metrics: Arc<Metrics>) -> Self {
        let permits = Arc::new(Semaphore::new(limits.n_in_flight_max.min(Semaphore::MAX_PERMITS)));
        let tokenizing = Semaphore::new(limits.n_tokenizing_max.clamp(1, Semaphore::MAX_PERMITS));
        Self { model, cluster, limits, metrics, permits, tokenizing }
    }

    /// Lets a request in until the result is dropped.
    ///
    /// # Errors
    /// `Overloaded` when too many run.
    pub(crate) fn admit(&self) -> Result<OwnedSemaphorePermit, RequestError> {
        Arc::clone(&self.permits).try_acquire_owned().map_err(|_| RequestError::Overloaded {
            reason: format!("{} requests are in flight", self.limits.n_in_flight_max),
            retry_after_ms: self.limits.retry_after_ms,
        })
    }

    /// Checks that a client asks for what is served; no name asks for it too.
    ///
    /// # Errors
    /// `UnknownModel` with what there is.
    pub(crate) fn check_model(&self, name: &str) -> Result<(), RequestError> {
        let served = self.model.name();
        if name.is_empty() || name == served {
            return Ok(());
        }
        Err(RequestError::UnknownModel { name: name.to_owned(), served: vec![served.to_owned()] })
    }

    /// Runs `work` where it may take its time when `is_long`, else here.
    ///
    /// # Errors
    /// `Internal` when it panics.
    pub(crate) async fn compute<T: Send + 'static>(
        &self,
        is_long: bool,
        work: impl FnOnce(&ServedModel) -> T + Send + 'static,
    ) -> Result<T, RequestError> {
        if !is_long {
            return Ok(work(&self.model));
        }
        let failed = || RequestError::Internal("a text could not be processed".to_owned());
        let _permit = self.tokenizing.acquire().await.map_err(|_| failed())?;
        let model = Arc::clone(&self.model);
        tokio::task::spawn_blocking(move || work(&model)).await.map_err(|_| failed())
    }

    /// Tokens of a text that came in `field`.
    ///
    /// # Errors
    /// When it cannot be encoded.
    pub(crate) async fn encode(
        &self,
        field: &'static str,
        text: String,
        add_special: Option<bool>,
    ) -> Result<Vec<Token>, RequestError> {
        let is_long = self.model.text.is_long(&text);
        let tokens = self.compute(is_long, move |model| model.text.encode(&text, add_special)).await?;
        tokens.map_err(|error| text_error(field, &error))
    }
}

/// What a client can do about an error of the text layer.
pub(crate) fn text_error(field: &'static str, error: &TextError) -> RequestError {
    match error {
        TextError::MissingChatTemplate
        | TextError::Encode { .. }
        | TextError::Template { .. }
        | TextError::MessagesRefused { .. }
        | TextError::TemplateLimit { .. } => RequestError::invalid(field, error.to_string()),
        TextError::MissingTokenizer { .. }
        | TextError::UnsupportedTokenizer { .. }
        | TextError::InvalidTokenizer { .. } => RequestError::Internal(error.to_string()),
    }
}
