//! How fast blocks move between two workers, beside plain loopback TCP and plain copies measured in the same run.
//!
//! `cargo bench --profile dev -p worker --bench transfer` prints a line of JSON for each way, in GB/s; it needs an idle
//! machine of two cores. `cargo xtask perf` holds it against the goals. Tests run each way once.
#![expect(clippy::print_stdout, reason = "benchmarks print their measurements")]

use contract::kv::{BlockOrder, KvDtype, KvLayout};
use serde_json::json;
use worker::transfer::speed::measure;

/// Bytes of a pool, some times those of the caches, and how often they are moved.
const MEASURED: (usize, usize) = (128 << 20, 15);
/// The same where it is only to work.
const TRIED: (usize, usize) = (1 << 20, 1);

fn main() {
    let (n_bytes, n_rounds) = if std::env::args().any(|arg| arg == "--bench") { MEASURED } else { TRIED };
    for (kv_heads, dim, n_layers) in [(8, 128, 32), (3, 64, 30)] {
        let (key_dim, value_dim, dtype) = (dim, dim, KvDtype::Bf16);
        let order = BlockOrder::HeadsFirst;
        let layout = KvLayout { order, n_layers, kv_heads, block_size: 16, key_dim, value_dim, dtype };
        let speeds = measure(layout, n_bytes, n_rounds).expect("the measurement can be made");
        assert!(speeds.len() >= 2, "a connection and a ring are always there: {speeds:?}");
        for speed in speeds {
            let gb = |rate: f64| (rate / 1e6).round() / 1e3;
            let (rate, bound, part) = (gb(speed.rate), gb(speed.bound), (speed.part * 1e3).round() / 1e3);
            let blocks = format!("{kv_heads} heads of {dim}");
            let line =
                json!({"blocks": blocks, "way": speed.way, "gb_per_s": rate, "bound_gb_per_s": bound, "part": part});
            println!("{line}");
        }
    }
}
