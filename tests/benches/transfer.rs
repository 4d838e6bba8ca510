//! How fast blocks move between two workers, beside plain loopback TCP and plain copies measured in the same run.
//!
//! `cargo bench -p worker --bench transfer` fails when a goal is missed; it needs an idle machine of two cores.
#![expect(clippy::print_stdout, reason = "benchmarks print their measurements")]

use std::process::ExitCode;

use contract::kv::{BlockOrder, KvDtype, KvLayout};
use worker::transfer::speed::measure;

/// Bytes of a pool, some times those of the caches.
const N_BYTES: usize = 128 << 20;
const N_ROUNDS: usize = 25;

fn main() -> ExitCode {
    let models = [("8 heads of 128", 8, 128, 32), ("3 heads of 64", 3, 64, 30)];
    let mut is_met = true;
    for (name, kv_heads, dim, n_layers) in models {
        let (key_dim, value_dim, dtype) = (dim, dim, KvDtype::Bf16);
        let order = BlockOrder::HeadsFirst;
        let layout = KvLayout { order, n_layers, kv_heads, block_size: 16, key_dim, value_dim, dtype };
        let speeds = measure(layout, N_BYTES, N_ROUNDS).expect("the measurement can be made");
        let gb = |rate: f64| rate / 1e9;
        println!("{name}: memcpy {:.2} GB/s, loopback {:.2} GB/s", gb(speeds.memcpy), gb(speeds.loopback));
        let ways = [
            ("tcp", speeds.tcp, "loopback", speeds.loopback, 0.60),
            ("pull", speeds.pull, "memcpy", speeds.memcpy, 0.60),
            ("ring", speeds.ring, "memcpy", speeds.memcpy, 0.35),
        ];
        for (way, rate, bound_name, bound, goal) in ways {
            let part = rate / bound;
            let verdict = if part >= goal { "pass" } else { "FAIL" };
            is_met &= part >= goal;
            println!("  {verdict}  {way:<5} {:6.2} GB/s, {part:.2} of {bound_name} (goal {goal:.2})", gb(rate));
        }
    }
    if is_met { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
