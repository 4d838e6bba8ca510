//! Measures Tessera and its peers: servers under load, one model in this process, single kernels.
//!
//! Each returns a report with tables for people and JSON for scripts, whose fields stay as they are.
//!
//! # JSON of [`serve`](serve::serve)
//! One object: `bench` (`"serve"`), `target`, `api`, `model`, `trace` (its name, or null), `goals` (`ttft_ms` and
//! `tpot_ms`, or null), `input_len`, `output_len`, `shared_prefix`, `seed`, `started_unix_ms`, `interrupted`, and
//! `points`, in each of which:
//! `concurrency` or `rate` or `speed` (the other two are null), `requests`, `completed`, `short`, `interrupted`,
//! `errors` (kind to count; kinds are `connect`, `timeout`, `disconnected`, `stream`, `malformed`, `status_NNN`),
//! `error_examples`, `duration_s`, `input_tokens`, `output_tokens`, `output_tokens_per_s`, `total_tokens_per_s`,
//! `requests_per_s`, `goodput_requests_per_s`, `goodput_fraction`, `client_cpu_fraction` (of one core), and
//! `ttft_ms`, `tpot_ms`, `itl_ms`, `e2e_ms`, each `{n, mean, p50, p90, p99, min, max}`, null when n is 0.
//!
//! # JSON of [`engine`](engine::engine)
//! One object: `bench` (`"engine"`), `model`, `threads`, `numerics`, `kv_dtype`, `weight_bytes`, `kv_bytes_per_token`,
//! `load_s`, `read_bytes_per_s`, `read_by`, `peak_f32_flops`, `peak_bf16_flops`, `peak_int8_flops`, `peak_by`, `chunk`, `context`, `decode_steps`, and `results`:
//! `{test: "prefill", tokens, ..}`, `{test: "decode", batch, ..}` and, when asked for,
//! `{test: "engine_decode", batch, .., overhead_us}`, each with `tokens_per_s`, `bound_tokens_per_s`, `of_bound` and
//! `step_us`; spreads are `{median, min, max}`.
//!
//! # JSON of [`operators`](operators::operators)
//! One object: `bench` (`"kernels"`), `threads`, `numerics`, `read_bytes_per_s`, `read_by`, the three peaks and `peak_by`,
//! `one_thread` (the same six), and `results`: `kernel` (`matmul`, `attention_prefill`, `attention_decode`, `rms_norm`,
//! `rope`, `gated_activation`), `m`, and where they apply `format`, `k`, `n`, `context`; then `us`, `gflops`,
//! `gbytes_per_s`, `bound_gflops`, `of_bound`.

pub mod engine;
pub mod operators;
pub mod overhead;
mod plot;
mod random;
pub mod roofline;
pub mod serve;
pub mod statistics;
mod table;
