//! What answers questions: the model's text side, the cluster, and who is let in.

use std::sync::Arc;

use contract::error::RequestError;
use contract::ids::Token;
use tokio::sync::Semaphore;

use super::admit::Admission;
use super::gate::Gate;
use super::place::Asked;
use crate::admission::AdmissionSettings;
use crate::cluster::{Cluster, Placement};
use crate::config::Limits;
use crate::error::Error;
use crate::metrics::Metrics;
use crate::model::ServedModel;
use crate::text::TextError;

/// Characters shown of a name that is not served.
const N_SHOWN_MAX: usize = 100;

/// Shared by both APIs.
pub(crate) struct Service {
    pub(crate) model: Arc<ServedModel>,
    pub(crate) cluster: Arc<Cluster>,
    pub(crate) limits: Limits,
    pub(crate) admission: Arc<Admission>,
    pub(crate) metrics: Arc<Metrics>,
    pub(super) gate: Gate<Asked, Placement>,
    /// Threads that tokenize, so that long texts do not take all of the runtime's.
    tokenizing: Semaphore,
}

impl Service {
    /// Makes what answers questions.
    ///
    /// # Errors
    /// When the table of tenants cannot be used.
    pub(crate) fn new(
        model: Arc<ServedModel>,
        cluster: Arc<Cluster>,
        limits: Limits,
        settings: AdmissionSettings,
        metrics: Arc<Metrics>,
    ) -> Result<Self, Error> {
        let admission = Arc::new(Admission::new(&settings, &limits, &metrics)?);
        let gate = Gate::new(settings, limits.retry_after_ms, metrics.queued.clone());
        let tokenizing = Semaphore::new(limits.n_tokenizing_max.clamp(1, Semaphore::MAX_PERMITS));
        Ok(Self { model, cluster, limits, admission, metrics, gate, tokenizing })
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
        Err(RequestError::UnknownModel { name: shortened(name), served: vec![served.to_owned()] })
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

/// The beginning of a name that a client gave, which may be anything.
fn shortened(name: &str) -> String {
    match name.char_indices().nth(N_SHOWN_MAX) {
        Some((end, _)) => format!("{}…", &name[..end]),
        None => name.to_owned(),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_of_any_length_is_shown_in_part() {
        assert_eq!(shortened("gpt-4"), "gpt-4");
        assert_eq!(shortened(&"ö".repeat(100)), "ö".repeat(100));
        assert_eq!(shortened(&"ö".repeat(100_000)), format!("{}…", "ö".repeat(100)));
    }
}
