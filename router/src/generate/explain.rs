//! Why a request went where it did, or where one would go.

use contract::error::RequestError;
use contract::ids::RequestId;

use super::{Question, Service};
use crate::decisions::History;
use crate::route::placer::Decision;

impl Service {
    /// Where each prompt of a question would go now; nothing is placed.
    ///
    /// # Errors
    /// What is wrong with the question, or that no worker is ready.
    pub(crate) async fn foresee(&self, mut question: Question) -> Result<Vec<Decision>, RequestError> {
        self.check(&question)?;
        let _permit = self.admission.admit(&question.tenant)?;
        let prepared = self.prepare(&mut question).await?;
        let decide = |prompt: &super::prepare::Prepared| {
            let n_tokens = prompt.requests[0].prompt.len() as u64;
            self.cluster.explain(&question.tenant.name, n_tokens, &prompt.blocks)
        };
        prepared.iter().map(decide).collect()
    }

    /// What was decided about a request that this router answered, by the id in its answer, with or without a prefix
    /// such as `chatcmpl-`.
    ///
    /// # Errors
    /// When the id is none, or is not remembered.
    pub(crate) fn recall(&self, id: &str) -> Result<History, RequestError> {
        let digits = id.rsplit('-').next().unwrap_or_default();
        let request = u128::from_str_radix(digits, 16).ok().filter(|_| digits.len() == 32).map(RequestId);
        let wrong = || {
            let message = format!("{id:?} is no request id; give the 32 hexadecimal digits of an answer's id");
            RequestError::invalid("request_id", message)
        };
        let history = self.cluster.decisions.get(request.ok_or_else(wrong)?);
        if history.decisions.is_empty() {
            let message = format!("{id:?} is not among the last requests of this router");
            return Err(RequestError::invalid("request_id", message));
        }
        Ok(history)
    }
}
