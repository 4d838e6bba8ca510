//! The state against a naive model, and what it promises by name.

use contract::cost::{CostCoefficients, StepLoad};
use contract::ids::Incarnation;
use contract::model::{Fingerprint, ModelIdentity};
use contract::occupancy::BlockCounts;
use contract::view::Role;
use proptest::prelude::*;

use super::*;

const STALE: Duration = Duration::from_millis(50);

/// Nobody was given a role.
fn free() -> BTreeMap<Kind, Roles> {
    BTreeMap::new()
}

fn identity(model: u8, block_size: u32) -> ModelIdentity {
    ModelIdentity {
        name: format!("m{model}").into(),
        block_size,
        context_length: 100,
        vocab_size: 10,
        model: Fingerprint([model; 16]),
        tokenizer: Fingerprint([2; 16]),
        hash_key: Fingerprint([3; 16]),
        numerics: Fingerprint([4; 16]),
    }
}

fn worker(id: u8, life: u64, block_size: u32) -> Member {
    Member {
        kind: MemberKind::Worker,
        id: format!("w{id}"),
        incarnation: Incarnation(life),
        address: format!("w{id}:1"),
        n_data_ranks: 1,
        identity: Some(identity(0, block_size)),
        draining: false,
        role: None,
        epoch: 1,
    }
}

fn engine(id: u8, life: u64, rank: u32) -> EngineId {
    EngineId { worker: format!("w{id}").into(), incarnation: Incarnation(life), data_rank: DataRank(rank) }
}

fn occupancy(engine: EngineId, step: u64) -> Occupancy {
    Occupancy {
        engine,
        step,
        blocks: BlockCounts { total: 10, allocated: 3, cached: 2, free: 5 },
        requests_waiting: 0,
        requests_running: 1,
        slots: 8,
        tokens_queued: 0,
        tokens_running: step,
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

fn start() -> (State, Instant) {
    (State::new(7, STALE, RoleSettings::default()), daemon::clock::now())
}

#[test]
fn engines_come_and_go_with_their_member() {
    let (mut state, now) = start();
    state.member(WatchEvent::Snapshot(vec![Member { n_data_ranks: 2, ..worker(0, 1, 16) }]));
    let engines: Vec<_> = state.view().engines.iter().map(|view| view.engine.clone()).collect();
    assert_eq!(engines, [engine(0, 1, 0), engine(0, 1, 1)]);
    state.report(occupancy(engine(0, 1, 1), 1), StreamId(0), now).unwrap();
    state.member(WatchEvent::Removed(worker(0, 1, 16).key()));
    assert_eq!((state.view().engines.len(), state.view().epoch, state.view().version), (0, 7, 3));
    assert_eq!(state.report(occupancy(engine(0, 1, 0), 2), StreamId(0), now), Err(Ignored::Unknown));
}

#[test]
fn engines_have_roles_for_the_demand_of_their_model_and_numerics() {
    for second_model in [identity(1, 16), ModelIdentity { numerics: Fingerprint([5; 16]), ..identity(0, 16) }] {
        roles_of_two_kinds([identity(0, 16), second_model]);
    }
}

fn roles_of_two_kinds(identities: [ModelIdentity; 2]) {
    let (mut state, start) = start();
    for id in 0..4 {
        let identity = Some(identities[usize::from(id / 2)].clone());
        state.member(WatchEvent::Changed(Member { identity, ..worker(id, 1, 16) }));
    }
    let cost = CostCoefficients {
        prefill_per_token_ms: 0.66,
        decode_base_ms: 8.0,
        decode_per_sequence_ms: 0.75,
        ..CostCoefficients::default()
    };
    for second in 1..60 {
        let now = start + Duration::from_secs(second);
        for id in 0..4 {
            // The second kind's answers follow on next to no prompts.
            let prefill_tokens = if id < 2 { 530 * second } else { second };
            let computed = StepLoad { prefill_tokens, decode_sequences: 300 * second, ..StepLoad::default() };
            let (requests_running, step_tokens) = (16, 512);
            let (requests_begun, prompt_tokens_begun) = (second, prefill_tokens);
            let report = Occupancy {
                cost,
                computed,
                requests_running,
                step_tokens,
                requests_begun,
                prompt_tokens_begun,
                ..occupancy(engine(id, 1, 0), 30 * second)
            };
            state.report(report, StreamId(0), now).unwrap();
        }
        state.give_roles(now);
    }
    let roles: Vec<_> = state.view().engines.iter().map(|view| view.role.unwrap()).collect();
    assert_eq!(roles, [Role::Prefill, Role::Decode, Role::Mixed, Role::Mixed]);
}

#[test]
fn reports_of_another_life_or_of_an_earlier_step_are_ignored() {
    let (mut state, now) = start();
    state.member(WatchEvent::Changed(worker(0, 2, 16)));
    let mut report = |life, rank, step| state.report(occupancy(engine(0, life, rank), step), StreamId(0), now);
    assert_eq!(report(1, 0, 9), Err(Ignored::OtherIncarnation));
    assert_eq!(report(2, 1, 9), Err(Ignored::Unknown));
    assert_eq!(report(2, 0, 5), Ok(()));
    assert_eq!(report(2, 0, 4), Err(Ignored::OldStep));
    assert_eq!(state.view().engines[0].occupancy, Some(occupancy(engine(0, 2, 0), 5)));
    let mut lost = occupancy(engine(0, 2, 0), 6);
    lost.blocks.free -= 1;
    assert_eq!(state.report(lost, StreamId(0), now), Err(Ignored::BlocksNotConserved));
}

#[test]
fn an_engine_that_stops_reporting_stays_without_occupancy() {
    let (mut state, now) = start();
    state.member(WatchEvent::Changed(worker(0, 1, 16)));
    state.report(occupancy(engine(0, 1, 0), 1), StreamId(0), now).unwrap();
    assert_eq!(state.next_tick(), Some(now + STALE));
    state.tick(now + STALE - Duration::from_millis(1));
    assert!(state.view().engines[0].occupancy.is_some());
    let version = state.view().version;
    state.tick(now + STALE);
    assert_eq!((state.view().engines[0].occupancy.as_ref(), state.view().version), (None, version + 1));
    assert_eq!(state.next_tick(), None);
}

#[test]
fn an_engine_that_stands_still_is_to_be_left_alone_until_it_steps_again() {
    let (mut state, now) = start();
    state.member(WatchEvent::Changed(worker(0, 1, 16)));
    let draining = |state: &State| state.view().engines[0].draining;
    let report = |state: &mut State, step, is_stalled| {
        let report = Occupancy { is_stalled, ..occupancy(engine(0, 1, 0), step) };
        state.report(report, StreamId(0), now).unwrap();
        draining(state)
    };
    assert_eq!(report(&mut state, 1, false), None);
    assert_eq!(report(&mut state, 1, true), Some(DrainReason::Stalled));
    state.member(WatchEvent::Changed(Member { epoch: 2, ..worker(0, 1, 16) }));
    assert_eq!(draining(&state), Some(DrainReason::Stalled), "whatever is registered");
    assert_eq!(report(&mut state, 2, false), None, "it steps again");
    assert_eq!(report(&mut state, 2, true), Some(DrainReason::Stalled));
    state.member(WatchEvent::Changed(Member { draining: true, ..worker(0, 1, 16) }));
    assert_eq!(report(&mut state, 3, false), Some(DrainReason::Leaving), "that is for good");
}

#[test]
fn the_end_of_an_old_stream_does_not_touch_what_a_newer_one_reported() {
    let (mut state, now) = start();
    state.member(WatchEvent::Changed(worker(0, 1, 16)));
    state.report(occupancy(engine(0, 1, 0), 1), StreamId(0), now).unwrap();
    state.report(occupancy(engine(0, 1, 0), 1), StreamId(1), now).unwrap();
    state.stream_ended(StreamId(0));
    assert!(state.view().engines[0].occupancy.is_some());
    state.stream_ended(StreamId(1));
    assert!(state.view().engines[0].occupancy.is_none());
}

#[test]
fn a_worker_that_disagrees_about_its_model_is_refused_with_both_values() {
    let (mut state, now) = start();
    assert_eq!(state.member(WatchEvent::Changed(worker(5, 1, 16))), []);
    let refusals = state.member(WatchEvent::Changed(worker(0, 1, 128)));
    let text = refusals[0].to_string();
    assert!(text.contains("w0") && text.contains("16 here") && text.contains("128 at"), "{text}");
    assert_eq!(state.view().engines.len(), 1);
    assert_eq!(state.report(occupancy(engine(0, 1, 0), 1), StreamId(0), now), Err(Ignored::Refused));
    // Said once, not with every change of membership.
    assert_eq!(state.member(WatchEvent::Changed(worker(6, 1, 16))), []);
    // Other numerics still serve together.
    let mut other = worker(7, 1, 16);
    other.identity.as_mut().unwrap().numerics = Fingerprint([9; 16]);
    assert_eq!(state.member(WatchEvent::Changed(other)), []);
}

#[test]
fn one_misconfigured_worker_that_comes_first_keeps_nobody_out_for_long() {
    let (mut state, _) = start();
    state.member(WatchEvent::Changed(worker(0, 1, 128)));
    assert_eq!(state.member(WatchEvent::Changed(worker(1, 1, 16))).len(), 1);
    let refusals = state.member(WatchEvent::Changed(worker(2, 1, 16)));
    assert!(matches!(&refusals[..], [Refusal::Identity { worker, .. }] if worker == "w0"), "{refusals:?}");
    assert_eq!(state.view().engines.len(), 2);
}

#[test]
fn malformed_registrations_are_refused_and_cost_nothing() {
    let (mut state, _) = start();
    let endless = Member { n_data_ranks: u32::MAX, ..worker(0, 1, 16) };
    let none = Member { n_data_ranks: 0, ..worker(1, 1, 16) };
    let nameless = Member { identity: None, ..worker(2, 1, 16) };
    let router = Member { kind: MemberKind::Router, n_data_ranks: 0, identity: None, ..worker(3, 1, 16) };
    let refusals = state.member(WatchEvent::Snapshot(vec![endless, none, nameless, router]));
    assert_eq!((refusals.len(), state.view().engines.len(), state.members().count()), (3, 0, 4));
}

/// Remembers everything and computes the view from it.
struct Naive {
    members: Vec<Member>,
    admitted: Vec<Member>,
    reports: Vec<NaiveReport>,
}

struct NaiveReport {
    occupancy: Occupancy,
    stream: u64,
    at_ms: u64,
    is_over: bool,
}

impl Naive {
    /// Workers per model and block size; the larger group wins, then the standing one, then the lowest key.
    fn admit(&mut self) {
        self.members.sort_by_key(Member::key);
        let size = |member: &Member| member.identity.as_ref().map(|identity| identity.block_size);
        let name = |member: &Member| member.identity.as_ref().map(|identity| identity.name.clone());
        let agrees = |one: &Member, two: &Member| name(one) == name(two) && size(one) == size(two);
        let strength = |member: &Member| {
            let n = self.members.iter().filter(|other| agrees(member, other)).count();
            (n, self.admitted.iter().any(|standing| agrees(member, standing)))
        };
        let winner = |member: &Member| {
            let mut best: Option<&Member> = None;
            for rival in self.members.iter().filter(|rival| name(rival) == name(member)) {
                if best.is_none_or(|best| strength(rival) > strength(best)) {
                    best = Some(rival);
                }
            }
            best.unwrap().clone()
        };
        let admitted = self.members.iter().filter(|member| agrees(member, &winner(member))).cloned().collect();
        self.admitted = admitted;
        let engines = self.engines();
        self.reports.retain(|report| engines.contains(&report.occupancy.engine));
    }

    fn engines(&self) -> Vec<EngineId> {
        let ids =
            self.admitted.iter().flat_map(|member| engines_of(member, &free()).into_iter().map(|view| view.engine));
        ids.collect()
    }

    fn report(&mut self, occupancy: Occupancy, stream: u64, at_ms: u64) -> bool {
        let is_old = |report: &NaiveReport| {
            report.occupancy.engine == occupancy.engine && report.occupancy.step > occupancy.step
        };
        if !self.engines().contains(&occupancy.engine) || self.reports.iter().any(is_old) {
            return false;
        }
        self.reports.push(NaiveReport { occupancy, stream, at_ms, is_over: false });
        true
    }

    fn last(&mut self) -> Vec<&mut NaiveReport> {
        let mut last: BTreeMap<EngineId, &mut NaiveReport> = BTreeMap::new();
        for report in &mut self.reports {
            last.insert(report.occupancy.engine.clone(), report);
        }
        last.into_values().collect()
    }

    fn view(&mut self) -> Vec<EngineView> {
        let admitted = self.admitted.clone();
        let mut engines: Vec<EngineView> = admitted.iter().flat_map(|member| engines_of(member, &free())).collect();
        engines.sort_by_key(|view| view.engine.clone());
        for report in self.last().into_iter().filter(|report| !report.is_over) {
            let view = engines.iter_mut().find(|view| view.engine == report.occupancy.engine).unwrap();
            view.occupancy = Some(report.occupancy.clone());
            if report.occupancy.is_stalled && view.draining.is_none() {
                view.draining = Some(DrainReason::Stalled);
            }
        }
        engines
    }
}

#[derive(Clone, Debug)]
enum Step {
    Join(Member),
    Leave(usize),
    Resnapshot(usize),
    Report { id: u8, life: u64, rank: u32, step: u64, is_stalled: bool, stream: u64 },
    End(u64),
    Advance(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let join = (0..4_u8, 0..2_u64, 0..2_u8, prop_oneof![Just(16_u32), Just(32)], 1..3_u32, any::<bool>());
    prop_oneof![
        4 => join.prop_map(|(id, life, model, block_size, n_data_ranks, draining)| {
            let identity = Some(identity(model, block_size));
            Step::Join(Member { n_data_ranks, draining, identity, ..worker(id, life, block_size) })
        }),
        1 => any::<usize>().prop_map(Step::Leave),
        1 => any::<usize>().prop_map(Step::Resnapshot),
        8 => (0..4_u8, 0..2_u64, 0..2_u32, 0..6_u64, any::<bool>(), 0..3_u64).prop_map(
            |(id, life, rank, step, is_stalled, stream)| Step::Report { id, life, rank, step, is_stalled, stream }
        ),
        1 => (0..3_u64).prop_map(Step::End),
        2 => (0..40_u64).prop_map(Step::Advance),
    ]
}

/// The seed that SEED names, or a random one; printed, so that a failure can be replayed.
#[expect(clippy::print_stderr, reason = "the test harness shows it with the failure")]
fn config() -> ProptestConfig {
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(daemon::random::u64);
    eprintln!("SEED={seed}");
    let rng_seed = proptest::test_runner::RngSeed::Fixed(seed);
    ProptestConfig { rng_seed, failure_persistence: None, ..ProptestConfig::default() }
}

fn apply(state: &mut State, naive: &mut Naive, step: Step, (start, now_ms): (Instant, &mut u64)) -> bool {
    let now = |ms: u64| start + Duration::from_millis(ms);
    match step {
        Step::Join(member) => {
            naive.members.retain(|known| known.key() != member.key());
            naive.members.push(member.clone());
            naive.admit();
            state.member(WatchEvent::Changed(member));
        }
        Step::Leave(index) if !naive.members.is_empty() => {
            let gone = naive.members.remove(index % naive.members.len());
            naive.admit();
            state.member(WatchEvent::Removed(gone.key()));
        }
        Step::Resnapshot(index) if !naive.members.is_empty() => {
            naive.members.remove(index % naive.members.len());
            naive.admit();
            state.member(WatchEvent::Snapshot(naive.members.clone()));
        }
        Step::Leave(_) | Step::Resnapshot(_) => {}
        Step::Report { id, life, rank, step, is_stalled, stream } => {
            let occupancy = Occupancy { is_stalled, ..occupancy(engine(id, life, rank), step) };
            let is_taken = state.report(occupancy.clone(), StreamId(stream), now(*now_ms)).is_ok();
            return is_taken == naive.report(occupancy, stream, *now_ms);
        }
        Step::End(stream) => {
            naive.last().into_iter().filter(|report| report.stream == stream).for_each(|report| report.is_over = true);
            state.stream_ended(StreamId(stream));
        }
        Step::Advance(by) => {
            *now_ms += by;
            let limit = u64::try_from(STALE.as_millis()).unwrap();
            let is_stale = |report: &NaiveReport| report.at_ms + limit <= *now_ms;
            naive.last().into_iter().filter(|report| is_stale(report)).for_each(|report| report.is_over = true);
            state.tick(now(*now_ms));
        }
    }
    true
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn the_view_is_what_a_naive_model_computes_and_its_version_tells_every_change(
        steps in prop::collection::vec(step(), 1..100),
    ) {
        let (mut state, start) = start();
        let mut naive = Naive { members: Vec::new(), admitted: Vec::new(), reports: Vec::new() };
        let mut now_ms = 0;
        for step in steps {
            let before = state.view().clone();
            prop_assert!(apply(&mut state, &mut naive, step, (start, &mut now_ms)), "one took a report, the other not");
            let after = state.view();
            prop_assert_eq!(&after.engines, &naive.view());
            prop_assert_eq!(after.version > before.version, after.engines != before.engines);
            let n_admitted = naive.admitted.len();
            prop_assert_eq!(state.refused().len(), naive.members.len() - n_admitted);
        }
    }
}
