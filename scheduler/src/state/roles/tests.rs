//! Roles follow the demand, and schedulers that see the same agree.

use contract::ids::Incarnation;
use contract::model::{Fingerprint, ModelIdentity};
use contract::occupancy::BlockCounts;

use super::*;

const COST: CostCoefficients = CostCoefficients {
    prefill_base_ms: 0.0,
    prefill_per_token_ms: 0.66,
    prefill_per_token_context_ms: 0.0,
    decode_base_ms: 8.0,
    decode_per_sequence_ms: 0.75,
    decode_per_context_token_ms: 0.0,
};

fn engine(index: u64, life: u64) -> EngineId {
    EngineId { worker: format!("w{index}").into(), incarnation: Incarnation(life), data_rank: DataRank(0) }
}

/// An engine that has computed so many tokens of prompts, and in so many steps of answers, for so many requests, whose
/// prompts have so many tokens.
fn view(engine: EngineId, [prefill_tokens, decode_sequences, requests_begun, step, asked]: [u64; 5]) -> EngineView {
    let one = Fingerprint([1; 16]);
    EngineView {
        engine: engine.clone(),
        address: String::new(),
        identity: ModelIdentity {
            name: "m".into(),
            block_size: 16,
            context_length: 100,
            vocab_size: 10,
            model: one,
            tokenizer: one,
            hash_key: one,
            numerics: one,
        },
        role: None,
        draining: None,
        occupancy: Some(Occupancy {
            engine,
            step,
            blocks: BlockCounts { total: 4, allocated: 0, cached: 0, free: 4 },
            requests_waiting: 0,
            requests_running: 16,
            slots: 32,
            tokens_queued: 0,
            pairs_queued: 0.0,
            tokens_running: 0,
            cost: COST,
            step_tokens: 512,
            computed: StepLoad { prefill_tokens, decode_sequences, ..StepLoad::default() },
            requests_begun,
            prompt_tokens_begun: asked,
            is_stalled: false,
            transfer_ms_per_token: 0.0,
        }),
    }
}

/// A cluster whose `n` engines are asked for the same every second, and compute it in equal parts.
struct Cluster {
    engines: Vec<EngineId>,
    started: Instant,
    second: u64,
    /// Requests that each engine decodes at once.
    batch: u64,
    /// Part of prompts that is cached where all do everything.
    hits: f64,
    computed: [u64; 5],
}

impl Cluster {
    fn new(n: u64) -> Self {
        let engines = (0..n).map(|index| engine(index, 1)).collect();
        Self { engines, started: daemon::clock::now(), second: 0, batch: 10, hits: 0.0, computed: [0; 5] }
    }

    /// Lets a second go by in which each engine computes so many tokens of prompts, of answers, and begins so many
    /// requests; yields which schedulers changed roles.
    fn go_on(&mut self, [prompts, answers, requests]: [u64; 3], schedulers: &mut [Roles]) -> Vec<bool> {
        self.second += 1;
        let asked = (prompts as f64 / (1.0 - self.hits)) as u64;
        let is_split = self.roles(&schedulers[0])[0] == PREFILL;
        let more = if is_split { computed_again(self.hits) } else { 0.0 };
        let prompts = (prompts as f64 * (1.0 + more)) as u64;
        let load = [prompts, answers, requests, answers / self.batch, asked];
        self.computed.iter_mut().zip(load).for_each(|(sum, new)| *sum += new);
        let views: Vec<_> = self.engines.iter().map(|id| view(id.clone(), self.computed)).collect();
        let (views, now) = (views.iter().collect::<Vec<_>>(), self.started + Duration::from_secs(self.second));
        let decide = |roles: &mut Roles| {
            views.iter().for_each(|view| roles.observe(view.occupancy.as_ref().unwrap(), now));
            roles.decide(&views, now)
        };
        schedulers.iter_mut().map(decide).collect()
    }

    fn roles(&self, of: &Roles) -> Vec<Option<Role>> {
        self.engines.iter().map(|engine| of.of(engine)).collect()
    }
}

const PREFILL: Option<Role> = Some(Role::Prefill);
const DECODE: Option<Role> = Some(Role::Decode);
const MIXED: Option<Role> = Some(Role::Mixed);

#[test]
fn roles_change_when_a_split_promises_more_for_long_enough_and_change_back() {
    let (mut cluster, mut roles) = (Cluster::new(2), [Roles::new(RoleSettings::default())]);
    let mut changes = Vec::new();
    for second in 0..400 {
        // From the second minute on there are hardly any prompts any more.
        let prompts = if second < 120 { 530 } else { 1 };
        if cluster.go_on([prompts, 300, 1], &mut roles)[0] {
            changes.push((second, cluster.roles(&roles[0])));
        }
    }
    let [(first, split), (second, mixed)] = &changes[..] else { panic!("{changes:?}") };
    assert!((10..30).contains(first) && (130..380).contains(second), "{changes:?}");
    assert_eq!((split, mixed), (&vec![PREFILL, DECODE], &vec![MIXED; 2]));
}

#[test]
fn a_split_in_which_tokens_take_too_long_is_given_up_and_tried_again_much_later() {
    let (mut cluster, mut roles) = (Cluster::new(2), [Roles::new(RoleSettings::default())]);
    // 15 steps a second: 67 ms for each token.
    cluster.batch = 20;
    let mut changes = Vec::new();
    for second in 0..800 {
        if cluster.go_on([530, 300, 1], &mut roles)[0] {
            changes.push((second, cluster.roles(&roles[0])[0]));
        }
    }
    let [(first, PREFILL), (second, MIXED), (third, PREFILL), (_, MIXED)] = changes[..] else { panic!("{changes:?}") };
    assert!((25..=60).contains(&(second - first)) && (600..=640).contains(&(third - second)), "{changes:?}");
}

#[test]
fn roles_change_once_where_the_demand_is_what_is_believed_of_it() {
    for (hits, prompts) in [(0.0, 550), (0.2, 550), (0.3, 500), (0.45, 450), (0.45, 300), (0.6, 300)] {
        let (mut cluster, mut roles) = (Cluster::new(8), [Roles::new(RoleSettings::default())]);
        cluster.hits = hits;
        let n_changes = (0..1200).filter(|_| cluster.go_on([prompts, 250, 1], &mut roles)[0]).count();
        assert_eq!(n_changes, 1, "{hits} of prompts are cached, {prompts} tokens a second are not");
    }
}

#[test]
fn who_does_not_say_what_is_cached_leaves_roles_as_they_are() {
    let (mut cluster, mut roles) = (Cluster::new(2), [Roles::new(RoleSettings::default())]);
    cluster.hits = f64::NEG_INFINITY;
    for _ in 0..100 {
        assert_eq!(cluster.go_on([530, 300, 1], &mut roles), [false]);
    }
}

#[test]
fn a_scheduler_says_nothing_before_it_has_seen_the_demand_and_then_what_others_say() {
    let mut cluster = Cluster::new(6);
    let load = [600, 300, 1];
    let mut schedulers = vec![Roles::new(RoleSettings::default())];
    for _ in 0..100 {
        cluster.go_on(load, &mut schedulers);
    }
    let said = cluster.roles(&schedulers[0]);
    assert_eq!((said[0], said[5]), (PREFILL, DECODE));
    schedulers.push(Roles::new(RoleSettings::default()));
    let mut n_seconds = 0;
    while cluster.roles(&schedulers[1]) == vec![None; 6] {
        n_seconds += 1;
        cluster.go_on(load, &mut schedulers);
    }
    assert!((10..30).contains(&n_seconds), "it takes {n_seconds} s");
    assert_eq!([cluster.roles(&schedulers[0]), cluster.roles(&schedulers[1])], [said.clone(), said]);
}

#[test]
fn engines_that_come_and_go_leave_others_their_roles() {
    let (mut cluster, mut roles) = (Cluster::new(6), [Roles::new(RoleSettings::default())]);
    for _ in 0..100 {
        cluster.go_on([600, 300, 1], &mut roles);
    }
    let said = cluster.roles(&roles[0]);
    assert_eq!(roles[0].of(&engine(0, 2)), PREFILL, "who comes back is what it was");
    cluster.engines.remove(0);
    assert_eq!(cluster.go_on([600, 300, 1], &mut roles), [false], "it may come back at once");
    assert_eq!(cluster.roles(&roles[0]), said[1..]);
}

#[test]
fn without_automatic_roles_all_do_everything_from_the_start() {
    let (mut cluster, settings) = (Cluster::new(2), RoleSettings { auto: false, ..RoleSettings::default() });
    let mut roles = [Roles::new(settings)];
    for _ in 0..30 {
        assert_eq!(cluster.go_on([530, 500, 3], &mut roles), [false]);
        assert_eq!(cluster.roles(&roles[0]), [MIXED; 2]);
    }
}
