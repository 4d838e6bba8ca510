//! All choices of a question as one stream of events.

use std::sync::Arc;
use std::time::Instant;

use contract::error::RequestError;
use contract::ids::{RequestId, Token};
use daemon::telemetry::propagation::Trace;
use futures::future::ready;
use futures::stream::{BoxStream, SelectAll, StreamExt as _, once, select_all, unfold};
use tracing::Instrument as _;

use super::choice::{Choice, Progress};
use super::gate::Claim;
use super::place::Asked;
use super::prepare::Prepared;
use super::record::Record;
use super::{Event, Question, Service};
use crate::admission::Tenant;
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

/// What comes of choices, each with its index.
type News = BoxStream<'static, (u32, Result<Progress, RequestError>)>;

type Choices = SelectAll<News>;

impl Service {
    /// Checks a question, places its prompts and begins to answer.
    ///
    /// # Errors
    /// Whatever is wrong before anything was sent to a worker.
    pub(crate) async fn ask(self: &Arc<Self>, question: Question, trace: Trace) -> Result<Answer, RequestError> {
        let began = daemon::clock::now();
        let result = self.begin(question, trace, began).await;
        if let Err(error) = &result {
            self.metrics.refused(error);
        }
        result
    }

    async fn begin(
        self: &Arc<Self>,
        mut question: Question,
        trace: Trace,
        began: Instant,
    ) -> Result<Answer, RequestError> {
        // What is wrong at first sight costs no quota; what takes work to find out does.
        self.check(&question)?;
        let permit = self.admission.admit(&question.tenant)?;
        let id = RequestId(daemon::random::u128());
        let mut record = Record::new(&self.metrics, question.operation, trace.span().clone(), began, permit);
        let choices = async {
            let prepared = self.prepare(&mut question).await?;
            let n_tokens = prepared.iter().map(|prompt| prompt.requests[0].prompt.len()).sum::<usize>();
            let n_choices = prepared.iter().map(|prompt| prompt.requests.len()).sum();
            record.begin(u32::try_from(n_tokens).unwrap_or(u32::MAX), n_choices)?;
            self.place(id, prepared, &question, began, trace.clone()).await
        };
        let choices = choices.instrument(trace.span().clone()).await.inspect_err(|error| record.refuse(error))?;
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

    /// Places the first prompt, and has each other one placed when the answer begins, so that none waits for the others.
    async fn place(
        self: &Arc<Self>,
        id: RequestId,
        prepared: Vec<Prepared>,
        question: &Question,
        began: Instant,
        trace: Trace,
    ) -> Result<Choices, RequestError> {
        let options = &question.options;
        let output = OutputOptions {
            stop: options.stop.clone(),
            skip_special: options.skip_special,
            include_stop: options.include_stop,
            min_tokens: options.min_tokens,
            continues: question.operation == super::Operation::Completion,
        };
        let plan = Arc::new(Plan {
            service: Arc::clone(self),
            id,
            tenant: Arc::clone(&question.tenant),
            priority: options.priority,
            deadline: deadline(began, self.limits.request_timeout_ms, options.timeout),
            output,
            stop_token_ids: options.stop_token_ids.clone(),
            trace,
        });
        let mut prompts = (0..).step_by(options.n as usize).zip(prepared);
        let (index, first) = prompts.next().expect("a question without prompts was refused");
        let first = plan.begin(index, first, false).await?;
        let others = prompts.map(|(index, prompt)| {
            let plan = Arc::clone(&plan);
            let begun = async move {
                let begun = plan.begin(index, prompt, true).await;
                begun.map_or_else(
                    |error| once(ready((index, Err(error)))).boxed(),
                    |choices| select_all(choices).boxed(),
                )
            };
            once(begun).flatten().boxed()
        });
        Ok(select_all(first.into_iter().chain(others)))
    }
}

/// What all choices of a question have in common.
struct Plan {
    service: Arc<Service>,
    id: RequestId,
    tenant: Arc<Tenant>,
    priority: i32,
    deadline: Instant,
    output: OutputOptions,
    stop_token_ids: Vec<Token>,
    trace: Trace,
}

impl Plan {
    /// Places a prompt when it is its turn, the first or a later one; its first choice has `index`.
    async fn begin(&self, index: u32, prepared: Prepared, is_later: bool) -> Result<Vec<News>, RequestError> {
        let Prepared { requests, blocks } = prepared;
        let service = &self.service;
        let n_tokens = requests[0].prompt.len() as u64;
        let asked = Asked {
            question: self.id,
            tenant: self.tenant.name.clone(),
            n_tokens,
            blocks: Arc::clone(&blocks),
            span: self.trace.span().clone(),
        };
        let claim = Claim { tenant: &self.tenant, priority: self.priority, deadline: self.deadline, is_later };
        let first = service.acquire(claim, asked).await?;
        service.cluster.remember(&requests[0], &blocks);
        // All choices go to one engine, where the first computes the prompt for the others.
        let beside =
            |_| Placement { engine: Arc::clone(&first.engine), prefill_on: Vec::new(), flight: first.flight.beside() };
        let others: Vec<Placement> = (1..requests.len()).map(beside).collect();
        let placements = std::iter::once(first).chain(others);
        let choice = |(index, (request, placement))| {
            let blocks = Arc::clone(&blocks);
            let job = Job { question: self.id, request, blocks, deadline: self.deadline, placement };
            let dispatch = Dispatch::new(Arc::clone(&service.cluster), job, self.trace.clone());
            let text = OutputText::new(Arc::clone(&service.model.text), self.output.clone());
            unfold(Choice::new(index, dispatch, text, self.stop_token_ids.clone()), next).boxed()
        };
        Ok((index..).zip(requests.into_iter().zip(placements)).map(choice).collect())
    }
}

async fn next(mut choice: Choice) -> Option<((u32, Result<Progress, RequestError>), Choice)> {
    let progress = choice.next().await?;
    Some(((choice.index, progress), choice))
}
