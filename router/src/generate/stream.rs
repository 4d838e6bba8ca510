//! All choices of a question as one stream of events.

use std::sync::Arc;
use std::time::Instant;

use contract::error::RequestError;
use contract::ids::RequestId;
use futures::stream::{BoxStream, SelectAll, StreamExt as _, select_all, unfold};
use tracing::{Instrument as _, Span};

use super::choice::{Choice, Progress};
use super::prepare::Prepared;
use super::record::Record;
use super::{Event, Question, Service};
use crate::cluster::Placement;
use crate::dispatch::{Dispatch, Job, deadline};
use crate::text::{OutputOptions, OutputText};

/// An answer on its way; dropping it ends every call to a worker.
pub(crate) struct Answer {
    /// Stands for the whole question.
    pub(crate) id: RequestId,
    /// Deltas as they come, then the end; or an error, which is the last.
    pub(crate) events: BoxStream<'static, Result<Event, RequestError>>,
}

type Choices = SelectAll<BoxStream<'static, (u32, Result<Progress, RequestError>)>>;

impl Service {
    /// Checks a question, places its prompts and begins to answer.
    ///
    /// # Errors
    /// Whatever is wrong before anything was sent to a worker.
    pub(crate) async fn ask(self: &Arc<Self>, question: Question, span: Span) -> Result<Answer, RequestError> {
        let began = daemon::clock::now();
        let result = self.begin(question, span, began).await;
        if let Err(error) = &result {
            self.metrics.refused(error);
        }
        result
    }

    async fn begin(
        self: &Arc<Self>,
        mut question: Question,
        span: Span,
        began: Instant,
    ) -> Result<Answer, RequestError> {
        let permit = self.admit()?;
        let id = RequestId(daemon::random::u128());
        let mut record = Record::new(&self.metrics, question.operation, span.clone(), began, permit);
        let choices = async {
            let prepared = self.prepare(&mut question).await?;
            let n_tokens = prepared.iter().map(|prompt| prompt.requests[0].prompt.len()).sum::<usize>();
            let n_choices = prepared.iter().map(|prompt| prompt.requests.len()).sum();
            record.begin(u32::try_from(n_tokens).unwrap_or(u32::MAX), n_choices);
            self.place(id, prepared, &question, began)
        };
        let choices = choices.instrument(span.clone()).await.inspect_err(|error| record.fail(error))?;
        let n = question.options.n;
        let state = Some((choices, record));
        let events = unfold(state, move |state| async move {
            let (mut choices, mut record) = state?;
            let span = record.span().clone();
            let event = match choices.next().instrument(span).await {
                Some((index, Ok(progress))) => {
                    // Later choices of a prompt find what the first one computed; only that one tells of the past.
                    if index.is_multiple_of(n) {
                        progress.cached_tokens.into_iter().for_each(|tokens| record.cached(tokens));
                    }
                    record.delta(&progress.delta);
                    Ok(Event::Delta(progress.delta))
                }
                Some((_, Err(error))) => {
                    record.fail(&error);
                    return Some((Err(error), None));
                }
                None => return Some((Ok(Event::End(record.finish())), None)),
            };
            Some((event, Some((choices, record))))
        });
        Ok(Answer { id, events: events.boxed() })
    }

    fn place(
        &self,
        id: RequestId,
        prepared: Vec<Prepared>,
        question: &Question,
        began: Instant,
    ) -> Result<Choices, RequestError> {
        let options = &question.options;
        let deadline = deadline(began, self.limits.request_timeout_ms, options.timeout);
        let output = OutputOptions {
            stop: options.stop.clone(),
            skip_special: options.skip_special,
            include_stop: options.include_stop,
            min_tokens: options.min_tokens,
            continues: question.operation == super::Operation::Completion,
        };
        let mut choices = Vec::new();
        let mut index = 0;
        for Prepared { requests, blocks } in prepared {
            let n_prompt_tokens = requests[0].prompt.len() as u64;
            let first = self.cluster.place(id, n_prompt_tokens, &blocks, &[])?;
            // All choices go to one engine, where the first computes the prompt for the others.
            let beside = |_| Placement { engine: Arc::clone(&first.engine), flight: first.flight.beside() };
            let others: Vec<Placement> = (1..requests.len()).map(beside).collect();
            for (request, placement) in requests.into_iter().zip(std::iter::once(first).chain(others)) {
                let job = Job { question: id, request, blocks: Arc::clone(&blocks), deadline, placement };
                let dispatch = Dispatch::new(Arc::clone(&self.cluster), job, Span::current());
                let text = OutputText::new(Arc::clone(&self.model.text), output.clone());
                let choice = Choice::new(index, dispatch, text, options.stop_token_ids.clone());
                choices.push(unfold(choice, next).boxed());
                index += 1;
            }
        }
        Ok(select_all(choices))
    }
}

async fn next(mut choice: Choice) -> Option<((u32, Result<Progress, RequestError>), Choice)> {
    let progress = choice.next().await?;
    Some(((choice.index, progress), choice))
}
